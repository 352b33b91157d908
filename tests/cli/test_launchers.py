"""Sweeps over processes: joblib on this machine, submitit over a cluster (here its local executor)."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import joblib
import pytest
from hydra.errors import MissingConfigException
from joblib.externals.loky import get_reusable_executor

from posbench.composition.compose import plain_errors
from posbench.config import ConfigError
from posbench.system import device
from posbench.system.device import gpu_of_process
from posbench.system.files import is_locked
from tests.training.conftest import until


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_one_failing_job_is_told_and_the_same_command_runs_what_is_missing(posbench, short, launcher, monkeypatch):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher", reason="pip install .[cluster]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(Path("of-wandb").resolve()))
    get_reusable_executor().shutdown()  # its workers keep the folder that they were started in
    words = [word for word in short if "launcher" not in word and "tracking" not in word] + [
        "-m",
        f"hydra/launcher={launcher}",
    ]
    words += ["hydra.launcher.n_jobs=2", "tracking=wandb"] if launcher == "joblib" else []
    Path("own/scheme").mkdir(parents=True)
    Path("own/scheme/wrong.yaml").write_text("name: wrong\nkind: rotary\nsites: [z]\n")
    schemes = ["nope", "vo_rope"] if launcher == "joblib" else ["nope"]
    result = posbench("train", *words, "--config-dir=own", f"scheme=wrong,{','.join(schemes)}", "seed=0")
    assert result.status == 1 and "Traceback" not in result.error, result
    assert "posbench: demo/wrong/seed=0: scheme.sites=['z'] must name each of" in result.error
    runs = {file.parent.parent.name: file for file in Path("runs").rglob("run.json")}
    assert sorted(runs) == schemes
    assert {json.loads(file.read_text())["status"] for file in runs.values()} == {"finished"}
    if launcher != "joblib":
        return
    assert result.error.count("wandb sync") == 1, "how to upload is said once a sweep"
    times_before = {name: file.stat().st_mtime_ns for name, file in runs.items()}
    assert posbench("train", *words, "seed=0", "scheme=nope,vo_rope,alibi").status == 0
    assert {name: file.stat().st_mtime_ns for name, file in runs.items()} == times_before
    assert json.loads(Path("runs/demo/alibi/seed=0/run.json").read_text())["status"] == "finished"


on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux has /proc, which lists processes")


@contextmanager
def command(*words):
    """Start `posbench WORDS` in a process group of its own, with its output in a pipe; kill the group in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "posbench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # A command ignores SIGHUP if the tests run under nohup.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def living():
    """Return {process id: its parent's} of all processes that have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            # Z: it has ended.
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def started_by(pid):
    """Return the process ids of what `pid` started, and of what these started."""
    parents, started = living(), {pid}
    while more := {child for child, parent in parents.items() if parent in started} - started:
        started |= more
    return started - {pid}


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(
    ("name", "subcommand", "launcher"),
    [
        ("TERM", "train", "--jobs=2"),
        ("INT to the group", "train", "--jobs=2"),
        ("HUP", "tune", "--jobs=2"),
        ("KILL", "tune", "--jobs=2"),
        ("TERM", "train", "hydra/launcher=submitit_local"),
        ("KILL", "train", "hydra/launcher=submitit_local"),
    ],
)
def test_what_a_command_started_ends_with_it_and_with_checkpoints(short, tmp_path, name, subcommand, launcher):
    number, logs = getattr(signal, f"SIG{name.split()[0]}"), "runs/**/seed=*/metrics.jsonl"
    words = [word for word in short if not word.startswith(("train.steps", "train.checkpoint", "hydra/launcher"))]
    words += [launcher, "scheme=nope,alibi", f"runs_dir={tmp_path}/runs", "train.steps=100000"]
    words += ["train.checkpoint_every=100000"]
    words += ["-m", "seed=0"] if subcommand == "train" else []
    with command(subcommand, *words) as process:
        until(lambda: len(list(tmp_path.glob(logs))) == 2 or process.poll() is not None)
        started = started_by(process.pid)
        if name.endswith("group"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # Workers of a killed command hold its pipe open until they have ended.
        output, _ = process.communicate(timeout=600)
        assert process.returncode == (-9 if name == "KILL" else 128 + number), output
        until(lambda: not started & living().keys())
    trained = [file.parent for file in tmp_path.glob(logs)]
    assert len(trained) == 2
    assert all(any(folder.glob("checkpoints/step=*/state.json")) for folder in trained)
    assert not any(is_locked(folder) for folder in trained)


@pytest.mark.slow
@on_linux
def test_a_second_signal_kills_workers_that_do_not_stop(short, tmp_path):
    words = [word for word in short if not word.startswith(("train.steps", "train.checkpoint", "hydra/launcher"))]
    words += ["-m", "seed=0", "scheme=nope,alibi", f"runs_dir={tmp_path}/runs", "--jobs=2"]
    words += ["train.steps=100000", "train.checkpoint_every=100000"]
    with command("train", *words) as process:
        until(lambda: len(list(tmp_path.glob("runs/**/metrics.jsonl"))) == 2 or process.poll() is not None)
        # Besides workers there is joblib's tracker, which ends with them.
        started = started_by(process.pid)
        workers = {pid for pid in started if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # signals within half a second are one, passed on
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "Error" not in output, output
        until(lambda: not started & living().keys())


@pytest.mark.slow
@on_linux
def test_an_evaluation_over_processes_ends_with_its_workers_even_while_they_start(runs):
    with command("eval", "demo", "--jobs=2", "--length=16,32,64", "--again") as process:
        until(lambda: len(started_by(process.pid)) > 2 or process.poll() is not None)
        started = started_by(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 130, output
        until(lambda: not started & living().keys())
    assert "the evaluation stopped with the results so far" in output and "lack of memory" not in output


@pytest.mark.slow
@on_linux
def test_a_killed_worker_ends_a_sweep_which_names_its_run_and_goes_on_with_the_same_command(short, tmp_path):
    words = [word for word in short if not word.startswith(("train.steps", "train.checkpoint", "hydra/launcher"))]
    words += ["train.steps=100000", "train.checkpoint_every=20", f"runs_dir={tmp_path}/runs"]
    begun = [tmp_path / f"runs/demo/qk_rope/seed={seed}/checkpoints" for seed in (0, 1)]
    with command("train", "-m", *words, "--jobs=2", "seed=0,1") as process:
        until(lambda: all(any(folder.glob("step=*")) for folder in begun) or process.poll() is not None)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in started_by(process.pid)}
        worker = next(pid for pid, line in lines.items() if "LokyProcess" in line)
        os.kill(worker, signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 1, output
    assert "a worker process was killed while these were trained: demo/qk_rope/seed=0" in output
    assert "lower --jobs" in output and "give the same command again" in output


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads_its_output_any_more(short, tmp_path):
    with command("train", "-m", *short, "--jobs=2", f"runs_dir={tmp_path}/runs", "seed=0,1") as process:
        process.stdout.close()
        assert process.wait(600) == 0
    manifests = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/*/*/run.json")]
    assert [manifest["status"] for manifest in manifests] == ["finished", "finished"]


def test_a_command_works_with_its_output_closed():
    command = f"{sys.executable} -m posbench train --help >&-"
    assert subprocess.run(command, shell=True, stderr=subprocess.PIPE).stderr == b""


def test_a_command_whose_reader_has_gone_has_its_own_exit_status():
    with command("train", "--help") as process:
        process.stdout.close()
        assert process.wait(600) == 0


def test_each_worker_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the sweep")
    held_by = {n: {} for n in range(1, 5)}

    def gpu_of(worker):
        monkeypatch.setattr(device, "_held", held_by[worker])
        return gpu_of_process(2)

    assert [gpu_of(1), gpu_of(2), gpu_of(1)] == [0, 1, 0], "and keeps it between jobs"
    assert gpu_of(3) in (0, 1), "shared where all are held"
    held_by[2][1].release()  # the worker is lost
    assert [gpu_of(4), gpu_of(1)] == [1, 0]
    monkeypatch.undo()
    assert gpu_of_process(2) == 0, "of a process that is no worker"


def test_workers_of_joblib_have_a_parent():
    [has_parent] = joblib.Parallel(n_jobs=2)([joblib.delayed(has_a_parent)()])
    assert has_parent and multiprocessing.parent_process() is None


def has_a_parent():
    return multiprocessing.parent_process() is not None


@pytest.mark.parametrize("command", ["train", "tune"])
def test_jobs_is_one_word_for_runs_side_by_side(posbench, monkeypatch, command):
    commands = []
    # First, because importing `tune` would keep a `run_application` that is replaced.
    monkeypatch.setattr("posbench.tools.tune.tune", lambda words, *rest: commands.append(words) or {})
    monkeypatch.setattr(
        "posbench.composition.sweep.run_application", lambda name, words, *rest: commands.append(words) or []
    )
    assert posbench(command, "-m", "--jobs", "3", "seed=0,1").status == 0
    assert sorted(commands[0]) == ["-m", "hydra.launcher.n_jobs=3", "hydra/launcher=joblib", "seed=0,1"]


def test_a_launcher_that_is_not_installed_names_its_extra():
    missing = MissingConfigException("", "hydra/launcher/submitit_local", ["basic", "joblib"])
    message = r"needs the extra 'cluster': pip install -e '\.\[cluster\]' \(there are basic, joblib\)"
    with pytest.raises(ConfigError, match=message), plain_errors():
        raise missing
