"""A sample of `make torture`, in a process of its own because it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_runs_end_byte_equal_and_no_bad_checkpoint_is_loaded() -> None:
    words = [sys.executable, "-m", "tests.faults.torture", "--kills", "2", "--faults", "40", "--seed", "1"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 2 times: 0 did not end" in done.stdout and "40 faults: 0 loaded" in done.stdout
