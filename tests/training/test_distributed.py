"""A run on several processes (gloo, on CPUs) has the same batches and losses, and resumes on any number of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from posbench import compose, load_run
from posbench.config import ConfigError
from posbench.training import train
from posbench.training.processes import check_divides, joined_processes
from tests.refusals import refuses
from tests.training.conftest import until

STEPS = 60


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return the overrides of a tiny run on a small text, float32, two micro-batches a step."""
    folder = tmp_path_factory.mktemp("distributed")
    random = np.random.default_rng(0)
    (folder / "text").mkdir()
    for n in range(40):
        (folder / "text" / f"{n}.txt").write_text(" ".join(f"word{i}" for i in random.integers(0, 50, 400)))
    return [
        *(f"data.path={folder}/text", f"data.cache_dir={folder}/cache", f"runs_dir={folder}/runs", "data=files"),
        *("data.validation_fraction=0.2", "tokenizer=bytes", "tracking=none", "model=tiny", "scheme=qkvo_rope"),
        *(f"train.steps={STEPS}", "train.context_length=128", "train.batch_size=8", "train.accumulation=2"),
        *("train.dtype=float32", "train.compile=false", "train.log_every=1", "train.checkpoint_every=10"),
        "train.device=cpu",
        *("train.optimizer=adamw", "train.lr=5e-3"),
        *("train.validation_tokens=512", "train.order_every=10k", "evaluation.max_tokens=512"),
    ]


@pytest.fixture(scope="module")
def alone(words):
    """Return the run on one process."""
    return train(compose([*words, "experiment_name=alone"]))


def command(words, name, nproc):
    """Return the command `torchrun --standalone --nproc-per-node NPROC -m posbench train WORDS`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "-m", "posbench", "train", *words, f"experiment_name={name}"]


def on_two(words, name):
    """Train on two processes, and return the run and what they said."""
    done = subprocess.run(command(words, name, 2), capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return load_run(folder_of(words, name)), done.stderr


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def column(run, name, kind="train"):
    metrics = run.metrics
    return list(metrics[metrics["kind"] == kind][name])


def losses(run):
    return column(run, "loss")


def folder_of(words, name):
    return Path(compose([*words, f"experiment_name={name}"]).runs_dir) / name / "qkvo_rope/seed=0"


def assert_same(run, alone):
    """Check that both runs have equal batches and that their losses agree."""
    assert run.manifest.fingerprints.batches == alone.manifest.fingerprints.batches
    assert len(losses(run)) == STEPS and np.abs(np.subtract(losses(run), losses(alone))).max() < 1e-5
    assert abs(run.manifest.loss - alone.manifest.loss) < 1e-5
    steps, worth = (
        [column(trained, name, "order") for trained in (run, alone)] for name in ("step", "order_beyond_32")
    )
    assert steps[0] == steps[1] and len(steps[0]) == 7 and np.abs(np.subtract(*worth)).max() < 1e-5
    # AdamW and clipping both hide gradients of twice the size; their norm does not.
    assert np.allclose(column(run, "grad_norm"), column(alone, "grad_norm"), rtol=1e-4)
    ours, theirs = (dict(trained.load_model().named_parameters()) for trained in (run, alone))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-4) for name in theirs)


@pytest.mark.slow
def test_several_processes_train_as_one(words, alone):
    run, said = on_two(words, "two")
    assert said.count("nats/token, perplexity") == 1, "one process speaks"
    assert_same(run, alone)
    assert run.manifest.device["processes"] == 2
    assert {p.name for p in run.path.iterdir()} == {p.name for p in alone.path.iterdir()}


@pytest.mark.slow
def test_two_processes_train_with_muon_as_one(words):
    words = [*words, "train.optimizer=muon", "train.steps=12"]
    (run, _), whole = on_two(words, "muon"), train(compose([*words, "experiment_name=muon_alone"]))
    assert run.manifest.fingerprints.batches == whole.manifest.fingerprints.batches
    assert losses(run) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.slow
def test_several_processes_train_on_a_task_as_one(tmp_path):
    """Each has other numbers of answers, and the loss is of all of them."""
    words = ["data=copy", "scheme=qkvo_rope", "model=tiny", "train.steps=10", "train.batch_size=8", "train.log_every=1"]
    words += ["train.accumulation=2", "train.validation_tokens=400", "tracking=none", f"runs_dir={tmp_path}"]
    words += ["train.device=cpu"]
    (run, _), whole = on_two(words, "two"), train(compose([*words, "train.accumulation=1"]))
    assert run.manifest.fingerprints.batches == whole.manifest.fingerprints.batches
    assert np.abs(np.subtract(losses(run), losses(whole))).max() < 1e-6
    assert np.allclose(column(run, "grad_norm"), column(whole, "grad_norm"), rtol=1e-5)
    assert abs(run.manifest.loss - whole.manifest.loss) < 1e-6


def workers(pid):
    """Return the process id of each rank that the torchrun `pid` started."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(stat[1]) != pid:
                continue
            environ = (folder / "environ").read_text(errors="replace").split("\0")
        # The process has ended.
        except (OSError, IndexError):
            continue
        variables = dict(pair.split("=", 1) for pair in environ if "=" in pair)
        if "RANK" in variables:
            pids[int(variables["RANK"])] = int(folder.name)
    return pids


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="workers are found by /proc")
def test_a_killed_rank_ends_the_run_which_goes_on_in_one_process(words, alone):
    started = subprocess.Popen(command(words, "killed", 2), stderr=subprocess.PIPE, text=True, env=environment())
    checkpoints = folder_of(words, "killed") / "checkpoints"
    until(lambda: any(checkpoints.glob("step=*/state.json")))
    killed = workers(started.pid)[1]
    os.kill(killed, signal.SIGKILL)
    _, output = started.communicate(timeout=600)
    assert started.returncode == 1 and f"Signal 9 (SIGKILL) received by PID {killed}" in output, output
    console = Console(record=True, width=300)
    assert_same(train(compose([*words, "experiment_name=killed"]), console), alone)
    text = console.export_text()
    assert "resumed at step" in text and "device.processes: 2 -> 1" in text


@pytest.mark.slow
def test_a_signal_to_everybody_leaves_a_checkpoint(words, alone):
    """Cluster managers signal every process of a job, and torchrun passes on what it hears: that counts as one."""
    started = subprocess.Popen(
        command(words, "stopped", 2),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    folder = folder_of(words, "stopped")
    until(lambda: (folder / "metrics.jsonl").exists())
    os.killpg(started.pid, signal.SIGTERM)
    _, output = started.communicate(timeout=600)
    assert started.returncode != 0 and output.count("stopping after this step") == 1, output
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["status"] == "stopped" and any((folder / "checkpoints").glob("step=*"))
    assert_same(train(compose([*words, "experiment_name=stopped"])), alone)


TWICE = """
import os, signal, sys
from types import SimpleNamespace
from posbench.system import signals as module
from posbench.system.signals import StopSignals
now = 0.0
module.time = SimpleNamespace(monotonic=lambda: now)
with StopSignals("a run", echo_seconds=float(sys.argv[1])) as signals:
    signals.waits = True
    for pause in (0.0, 0.0, 0.6):
        now += pause
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", flush=True)
"""


@pytest.mark.parametrize(("echo", "survived"), [(0.0, 1), (0.5, 2), (5.0, 3)])
def test_a_signal_that_comes_again_at_once_is_its_echo(echo, survived):
    done = subprocess.run([sys.executable, "-c", TWICE, str(echo)], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("alive") == survived and done.returncode == (0 if survived == 3 else 143)


@pytest.mark.slow
def test_a_sweep_within_one_process_group_is_refused(words):
    arguments = [sys.executable, "-m", "posbench", "train", *words, "-m", "seed=0,1"]
    done = subprocess.run(
        arguments, capture_output=True, text=True, env={**environment(), "RANK": "0", "WORLD_SIZE": "2"}, timeout=60
    )
    assert done.returncode == 2 and "a sweep (-m) cannot run under torchrun" in done.stderr


def test_a_batch_that_does_not_divide_among_the_processes_is_refused(words):
    refuses("do not divide among 3 processes: take a multiple of 6", check_divides, compose(words), 3)


TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be a whole number"),
        ({"RANK": ""}, "RANK='' must be a whole number"),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"MASTER_ADDR": ""}, "RANK=0 and WORLD_SIZE=2 are set, and MASTER_ADDR not"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT not"),
    ],
)
def test_variables_of_a_launcher_that_cannot_be_meant_are_named(changes, says, monkeypatch):
    for name, value in {**TWO, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=f"{says}.*unset RANK and WORLD_SIZE to train in one"),
        joined_processes("cpu"),
    ):
        pass


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": ""}, {"RANK": "", "WORLD_SIZE": ""}, {}])
def test_empty_variables_are_unset(variables, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined_processes("cpu") as processes:
        assert processes.size == 1


def test_waiting_for_other_processes_is_said(monkeypatch, capsys):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("posbench.training.processes.WAITING_SECONDS", 0.01)
    said = []

    def alone(*_, **__):
        until(lambda: said.append(capsys.readouterr().err) or "waiting" in "".join(said))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.distributed, "init_process_group", alone)
    with pytest.raises(KeyboardInterrupt), joined_processes("cpu"):
        pass
    assert "waiting for the other processes of 2 to start (RANK=0, WORLD_SIZE=2)" in "".join(said)
