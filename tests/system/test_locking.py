"""A folder has one lock holder, which a second process is told, and which is forgotten when it dies."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from posbench.config import ConfigError
from posbench.system.files import is_locked, locked


def test_a_second_one_is_refused_with_process_and_host(tmp_path):
    folder = tmp_path / "runs" / "demo"
    with locked(folder):
        assert is_locked(folder)
        with (
            pytest.raises(ConfigError, match=f"by process {os.getpid()} on {socket.gethostname()} since 20"),
            locked(folder),
        ):
            pass
        assert is_locked(folder)
    assert not is_locked(folder) and not list(folder.iterdir())


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom posbench.system.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    with pytest.raises(ConfigError, match=f"process {process.pid} on"), locked(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (tmp_path / ".lock").exists() and not is_locked(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot write to .*choose another runs_dir"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
