"""wandb, here offline, shows a run's metrics under the right id, and never stops the run."""

import json
import os
import socket
import subprocess
import sys
from functools import cache

import pytest

from posbench.api import evaluate
from posbench.runs import Run, run_folder, tracking
from posbench.training import train
from tests.training.conftest import after_step, crash


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """Hide the machine's settings of wandb, and put its folders into the test's."""
    for name in os.environ:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "of-wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "_unreachable", {})
    monkeypatch.chdir(tmp_path)


def recordings(run):
    return sorted((run.path.parents[1] / "wandb").iterdir())


@cache
def records(recording):
    """Return the records of a recording, read by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(recording)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def header(recording):
    [run_record] = [record["run"] for record in records(recording) if record["type"] == "run"]
    return dict(run_record)


def history(recording):
    """Return the logged rows without wandb's own keys."""
    items = [record["history"]["item"] for record in records(recording) if record["type"] == "history"]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


def summary(recording):
    updates = [record["summary"]["update"] for record in records(recording) if record["type"] == "summary"]
    return {key: value for update in updates for key, value in update.items()}


def as_logged(rows):
    """Return rows of metrics.jsonl in the form that wandb shows."""
    at = ("kind", "step", "tokens")
    return [
        {"tokens": row["tokens"], **{f"{row['kind']}/{key}": value for key, value in row.items() if key not in at}}
        for row in rows
    ]


@pytest.mark.slow
def test_a_run_its_resumption_and_its_evaluation_have_one_id(config, tmp_path):
    words = ("tracking=wandb", "scheme=vo_rope", "tracking.tags=[paper]", "tracking.notes=of section 4")
    with pytest.raises(RuntimeError, match="fire"):
        train(config(*words), observe=after_step(6, crash))
    run = Run(run_folder(config(*words)))
    [first] = recordings(run)
    assert history(first) == as_logged(run.logged)
    metrics = [record["metric"] for record in records(first) if record["type"] == "metric"]
    kinds = {metric["glob_name"]: metric["step_metric"] for metric in metrics if "glob_name" in metric}
    assert kinds == {"train/*": "tokens", "validation/*": "tokens", "order/*": "tokens"}
    record = run.manifest.wandb
    about = header(first)
    assert record == {
        "id": about["run_id"],
        "project": "posbench",
        "mode": "offline",
        "folder": str(tmp_path / "runs/demo/wandb"),
    }
    assert (about["run_group"], about["job_type"], about["display_name"]) == ("demo", "train", "vo_rope/seed=0")
    assert about["tags"] == ["vo_rope", "tiny", "files", "paper"] and about["notes"] == "of section 4"
    sent = about["config"]["update"]
    assert (sent["scheme"]["name"], sent["model"]["num_layers"], sent["seed"]) == ("vo_rope", 2, 0)
    assert sent["fingerprints"]["data"] == run.manifest.fingerprints.data
    assert not about.get("host") and not {"runs_dir", "tracking"} & set(sent) and "cache_dir" not in sent["data"]

    train(config(*words))
    [second] = [folder for folder in recordings(run) if folder != first]
    assert run.manifest.wandb == record and header(second)["run_id"] == record["id"]
    assert history(second) == as_logged(run.logged)[2:], "from the checkpoint of step 4 on"
    assert (summary(second)["loss"], summary(second)["tokens"]) == (run.manifest.loss, run.manifest.tokens)

    evaluate(run, lengths=[64], protocols=["fixed"], quiet=True)
    [third] = [folder for folder in recordings(run) if folder not in (first, second)]
    assert run.manifest.wandb == record and header(third)["run_id"] == record["id"]
    [fixed] = [result for result in run.results()[0] if result.protocol == "fixed"]
    figures = summary(third)
    assert (figures["eval/fixed/nll@64"], figures["loss"]) == (fixed.header["nll_mean"], run.manifest.loss)


@pytest.mark.slow
def test_rows_that_a_kill_kept_from_wandb_are_logged_on_resume(config):
    words = ("tracking=wandb", "experiment_name=mine")
    with pytest.raises(RuntimeError, match="fire"):
        train(config(*words), observe=after_step(6, crash))
    [first] = recordings(Run(run_folder(config(*words))))
    os.truncate(next(first.glob("*.wandb")), 7)  # what SIGKILL leaves of a recording's first 15 seconds
    run = train(config(*words))
    [second] = [recording for recording in recordings(run) if recording != first]
    assert history(second) == as_logged(run.logged)
    assert header(second)["config"]["update"]["experiment"] == {"name": "mine"}, "not the demo, which is the default"


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "0123456789abcdef" * 2 + "fakekey0"])
def test_without_a_key_or_a_server_it_records_offline(config, monkeypatch, key):
    monkeypatch.delenv("WANDB_MODE")
    # A port that is taken, on which nobody listens: connections are refused at once.
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    for seed in (0, 1):
        run = train(config("tracking=wandb", "tracking.init_timeout=20", "train.steps=2", f"seed={seed}"))
        assert run.manifest.wandb is not None and run.manifest.wandb["mode"] == "offline"


@pytest.mark.slow
def test_what_goes_wrong_with_wandb_does_not_stop_the_run(config, monkeypatch, capsys, tmp_path):
    def broken(**_):
        raise OSError("disk full")

    monkeypatch.setattr("wandb.init", broken)
    run = train(config("tracking=wandb", "train.steps=2"))
    assert run.is_finished and run.manifest.wandb is None
    messages = capsys.readouterr().err
    assert "wandb cannot record here (disk full): not tracked" in messages
