"""A sample of `make torture`, in a process of its own because it forks."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_runs_end_byte_equal():
    words = [sys.executable, "-m", "tests.faults.torture", "--kills", "2", "--seed", "1"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 2 times: 0 did not end" in done.stdout
