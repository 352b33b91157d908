"""Tracking shows a run as it is, exactly once, offline where it must be, and never costs the run anything."""

from __future__ import annotations

import ast
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from recorded import a_run, evaluate, expected, history, inspect, recordings, rows, rows_of, store, summary_of, train
from wandb_server import serving

import posbench
from posbench import tracking
from posbench.evaluation.charts import log_evaluations
from posbench.runs import Run
from posbench.tracking import connection
from posbench.tracking import recordings as of_recordings
from posbench.tracking.wandb_tracker import run_name

KEY = "0123456789abcdef" * 2 + "fakekey0"  # 40 characters, as a key has
TOKEN = "hf_" + "NotARealTokenNotARealToken"
PATH = os.pathsep.join([str(Path(__file__).parent), str(Path(posbench.__file__).parents[1])])  # of processes of ours
BAR = {"comparison/loss": 2.5}  # the row that gives each finished run a bar in one chart
EDITED = {"displayName": "my best", "tags": ["keep"], "notes": "seen"}  # by a person in wandb


def axes_of(records: list[dict[str, Any]]) -> dict[str, str]:
    """Metrics, as globs, and the metric that is their x axis."""
    named = [record["metric"] for record in records if record.get("metric", {}).get("glob_name")]
    return {metric["glob_name"]: metric["step_metric"] for metric in named}


def in_a_process(root: Path, *calls: str, **environment: str) -> tuple[list[str], float]:
    """Run `calls` on `config, run = a_run(root)` in a process of its own: its lines, its seconds after imports."""
    code = "import sys, time; import test_tracking as t, wandb; began = time.monotonic()\n"
    code += f"config, run = t.a_run(t.Path({str(root)!r}))\n" + "\n".join(calls)
    code += "\nimport atexit; atexit._run_exitfuncs(); print(time.monotonic() - began)"
    environment = {**os.environ, "PYTHONPATH": PATH, "WANDB_ERROR_REPORTING": "false", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    if environment.get("DIE"):
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout.splitlines(), math.nan
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    *lines, seconds = done.stdout.splitlines()
    return lines, float(seconds)


TRAIN = "t.train(config, run, {}, {}, print)"


def test_none_tracks_nothing_and_imports_nothing(tmp_path: Path) -> None:
    code = f"""
import sys, pathlib, test_tracking as t
for words in (["tracking=none"], ["seed=1"]):
    config, run = t.a_run(pathlib.Path({str(tmp_path / "runs")!r}), *words)
    t.train(config, run, 0, 3, print)
    assert run.manifest.wandb is None and t.log_evaluations(run, print) is None
    t.os.environ["WANDB_MODE"] = "disabled"
assert "wandb" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.rglob("wandb"))


def test_wandb_is_imported_by_tracking_alone() -> None:
    importers = set()
    for file in Path(posbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "wandb" for name in names):
                importers.add(file.parent.name)
    assert importers == {"tracking"}


def test_an_offline_run_holds_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    words = ("tracking.name=mine", "tracking.tags=[paper,tiny]", "tracking.notes=of section 4")
    config, run = a_run(tmp_path / "runs", "seed=7", *words)
    train(config, run, 0, 4, said.append)
    [recording] = recordings(tmp_path / "runs")
    records = inspect(recording)
    [header] = [record["run"] for record in records if record["type"] == "run"]
    assert (header["project"], header["run_group"], header["job_type"]) == ("posbench", "demo", "train")
    assert (header["display_name"], header["tags"]) == ("mine", ["vo_rope", "tiny", "stdlib", "paper"])
    assert header["notes"] == "of section 4"
    assert not header.get("host"), "the machine is named"
    of_config = header["config"]["update"]
    assert (of_config["scheme"]["name"], of_config["model"]["num_layers"], of_config["seed"]) == ("vo_rope", 2, 7)
    assert of_config["fingerprints"]["data"] == "abc"
    assert not {"runs_dir", "tracking"} & set(of_config) and "cache_dir" not in of_config["data"]
    assert history(records) == [*expected(*rows(0, 4)), BAR]
    assert axes_of(records) == {"train/*": "tokens", "validation/*": "tokens"}
    summary = summary_of(records)
    assert (summary["loss"], summary["bits_per_byte"], summary["validation/loss"]) == (2.5, 1.25, 9 / 4)
    assert "peak_memory_bytes" not in summary and records[-1]["exit"]["exit_code"] == 0
    assert run.manifest.wandb == {
        "id": header["run_id"],
        "project": "posbench",
        "mode": "offline",
        "folder": str(tmp_path / "runs/demo/wandb"),
    }
    assert said == [f"wandb records offline (WANDB_MODE=offline); upload with: wandb sync {tmp_path}/runs/demo/wandb"]
    assert not list(Path.cwd().iterdir()), "the working directory is littered"


def test_evaluations_join_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, run = a_run(tmp_path / "runs")
    train(config, run, 0, 2, print)
    [trained] = recordings(tmp_path / "runs")
    of_training = summary_of(inspect(trained))
    evaluate(run, 256, 512, 1024)
    store(run, {"protocol": "retrieval", "split": "test", "length": 300, "gap": 44, "nll_mean": 3.0, "drop": 0.25})
    columns = ["document", "bucket_start", "bucket_end", "targets", "nll"]
    table = pd.DataFrame(
        [(0, 0, 1, 2, 6.0), (1, 0, 1, 2, 10.0), (1, 1, 4, 10, 5.0), (0, 4, 8, 0, 0.0)], columns=columns
    )
    result = {"protocol": "position", "split": "test", "length": 256, "nll_mean": math.log(8), "bits_per_byte": 1.0}
    store(run, result, table)
    columns = ["document", "bucket_start", "bucket_end", "targets", "nll", "shuffled_nll", "other_nll"]
    table = pd.DataFrame([(0, 1, 2, 1, 2.0, 2.5, 3.0), (1, 1, 2, 1, 2.0, 2.5, 4.0), (0, 5, 9, 4, 4.0, 4.0, 5.0)])
    result = {"protocol": "order", "split": "test", "length": 256, "nll_mean": 2.0, "reach": 1, "lost_order": 0.5}
    store(run, result, table.set_axis(columns, axis=1))
    record = log_evaluations(run, print)
    assert record == run.manifest.wandb
    [recording] = recordings(tmp_path / "runs")
    records = inspect(recording)
    assert axes_of(records) == {
        **{"train/*": "tokens", "validation/*": "tokens", "eval/position/nll*": "eval/position/token"},
        "eval/order/lost*": "eval/order/distance",
        **{f"eval/{name}/*": "eval/length" for name in ("fixed", "nonoverlapping", "sliding")},
    }
    logged = history(records)
    assert logged[:4] == expected(*rows(0, 2))
    by_length = [row for row in logged if "eval/length" in row]
    assert [(row["eval/length"], row["eval/fixed/perplexity"], row["eval/fixed/nll"]) for row in by_length] == [
        (256, math.exp(2), 2),
        (512, math.exp(1), 1),
        (1024, math.exp(2), 2),
    ]
    assert {"eval/retrieval/gap": 44, "eval/retrieval/drop": 0.25} in logged
    by_position = [
        (row["eval/position/token"], row["eval/position/nll@256"]) for row in logged if "eval/position/token" in row
    ]
    assert by_position == [(0, 4.0), (2, 0.5)]  # 16 nats over 4 targets; 5 over 10; a bucket without targets is none
    by_distance = [row for row in logged if "eval/order/distance" in row]
    assert [(row["eval/order/distance"], row["eval/order/lost_order@256"]) for row in by_distance] == [
        (1, 0.5),
        (pytest.approx(40**0.5), 0),
    ]
    summary = summary_of(records)
    assert of_training["perplexity"] == math.exp(2.5) and of_training["train_seconds"] == 160
    lost = {key for key, value in of_training.items() if not key.startswith("_") and summary.get(key) != value}
    assert not lost, "an offline recording replaces the one of training"
    assert summary["eval/order/reach@256"] == 1
    assert (summary["loss"], summary["eval/fixed/perplexity@512"], summary["eval/fixed/nll@1024"]) == (2.5, math.e, 2)
    assert logged.count(BAR) == 1
    assert rows_of(recording, "comparison/fixed_perplexity_by_length_table") == [
        {"length": n, "nll": nll, "perplexity": math.exp(nll), "bits_per_byte": 0.5, "under": "as trained"}
        for n, nll in ((256, 2), (512, 1), (1024, 2))
    ]
    assert "Vega2" in json.dumps(records) and "wandb/line/v0" in json.dumps(records)
    cells = rows_of(recording, "eval/results")
    assert [(cell["scheme"], cell["protocol"], cell["length"]) for cell in cells] == [
        ("vo_rope", "fixed", 256),
        ("vo_rope", "fixed", 512),
        ("vo_rope", "fixed", 1024),
        ("vo_rope", "order", 256),
        ("vo_rope", "position", 256),
        ("vo_rope", "retrieval", 300),
    ]
    assert (cells[1]["perplexity"], cells[1]["targets_total"], cells[5]["drop"]) == (math.e, 640, 0.25)


def test_an_offline_resume_replaces_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, run = a_run(tmp_path / "runs")
    train(config, run, 0, 5, print, failed=True)
    first = run.manifest.wandb["id"]
    train(config, run, 4, 7, print)  # from the checkpoint of step 3: steps 4 and 5 come again
    assert run.manifest.wandb["id"] == first
    [recording] = recordings(tmp_path / "runs")
    records = inspect(recording)
    assert history(records) == [*expected(*rows(0, 7)), BAR]
    assert axes_of(records) == {"train/*": "tokens", "validation/*": "tokens"}


def test_a_sweep_in_one_process_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    ids = set()
    for scheme in ("nope", "qk_rope", "alibi"):
        config, run = a_run(tmp_path / "runs", f"scheme={scheme}")
        train(config, run, 0, 2, said.append)
        ids.add(run.manifest.wandb["id"])
    assert len(ids) == len(recordings(tmp_path / "runs")) == 3
    assert len(said) == 1


def test_names_sort_by_scheme_and_seed(tmp_path: Path) -> None:
    runs = [("alibi", 3), ("vo_rope", 2), ("vo_rope", 10)]
    names = [run_name(posbench.compose([f"scheme={scheme}", f"seed={seed}"])) for scheme, seed in runs]
    assert sorted(names) == names == ["alibi/seed=03", "vo_rope/seed=02", "vo_rope/seed=10"]


def test_the_id_belongs_to_the_run(tmp_path: Path) -> None:
    config, run = a_run(tmp_path / "runs")
    manifest = run.manifest
    first = of_recordings.new_id(config, run, manifest)
    assert first == of_recordings.new_id(config, Run(run.path), replace(manifest))
    config.seed = 1
    others = {of_recordings.new_id(config, run, manifest)}
    config.seed = 0
    others.add(of_recordings.new_id(config, Run(tmp_path / "elsewhere"), manifest))
    others.add(of_recordings.new_id(config, run, replace(manifest, started="2026-11-21T10:00:00Z")))
    assert len({first, *others}) == 4
    run.update_manifest(wandb={"id": "kept"})
    assert of_recordings.stored_id(run) == "kept"


def test_an_error_of_wandb_is_said_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    config, run = a_run(tmp_path / "runs")
    tracker = tracking.open_tracker(config, run, run.manifest, said.append)
    assert isinstance(tracker, tracking.WandbTracker)
    wandb_run = tracker._run
    monkeypatch.setattr(wandb_run, "log", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("disk full")))
    for row in rows(0, 3):
        tracker.log(row)
    tracker.summary({"loss": 1.0})
    tracker.finish()
    tracker.finish()
    assert [line for line in said if "sync" not in line] == [
        "wandb failed (disk full): no longer tracked, metrics.jsonl has everything"
    ]


def test_where_nothing_can_be_written_the_run_is_not_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    for seed in (0, 1):
        config, run = a_run(tmp_path / "runs", f"seed={seed}")
        (tmp_path / "runs/demo/wandb").touch()  # a file where the folder should be
        train(config, run, 0, 3, said.append)
        assert run.manifest.wandb is None
    assert len(said) == 1 and "not tracked" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", ["closed", *(pytest.param(server, marks=pytest.mark.slow) for server in ("no key", "refuses", "hangs"))]
)
def test_without_a_server_it_records_offline_soon_and_writes_no_credential(tmp_path: Path, server: str) -> None:
    root = tmp_path / "runs"
    secrets = {"HF_TOKEN": TOKEN, **({} if server == "no key" else {"WANDB_API_KEY": KEY})}
    calls = (
        TRAIN.format(0, 3),
        "run = t.a_run(t.Path(config.runs_dir), 'seed=1')[1]; config.seed = 1",
        TRAIN.format(0, 3),  # the second run must not wait again
    )
    if server in ("refuses", "hangs"):
        with serving(server) as there:
            lines, seconds = in_a_process(root, *calls, WANDB_BASE_URL=there.address, **secrets)
    else:
        lines, seconds = in_a_process(root, *calls, WANDB_BASE_URL="http://127.0.0.1:9", **secrets)
    assert len(lines) == 1 and lines[0].startswith("wandb records offline (")
    assert lines[0].endswith(f"upload with: wandb sync {root}/demo/wandb")
    assert {"no key": "no wandb key", "closed": "cannot be reached"}.get(server, "cannot be used") in lines[0]
    assert seconds < 12, "tracking delays the run"  # init_timeout is 2 s here, wandb's own would be 90
    assert [path.name.split("-run-")[0] for path in recordings(root)] == ["offline", "offline"]
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        for secret in (KEY, TOKEN):
            assert secret.encode() not in file.read_bytes(), f"{file} holds a credential"


@pytest.mark.slow
def test_a_killed_run_is_resumed_online_with_every_row_once(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with serving() as server:
        there = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
        in_a_process(root, TRAIN.format(0, 5), DIE="1", **there)
        lines, _ = in_a_process(root, TRAIN.format(4, 7), **there)
        [sent] = server.runs.values()
        assert (sent["displayName"], sent["tags"]) == ("vo_rope/seed=00", ["vo_rope", "tiny", "stdlib"])
        sent |= EDITED
        calls = [f"t.evaluate(run, {lengths}); t.log_evaluations(run, print)" for lengths in ("256, 512", "1024")]
        lines += in_a_process(root, *calls, **there)[0]
    assert lines == []
    _, run = a_run(root)
    [run_id] = server.runs
    assert run_id == run.manifest.wandb["id"] and run.manifest.wandb["mode"] == "online"
    logged = server.history(run_id)
    assert [row for row in logged if "tokens" in row] == expected(*rows(0, 7))
    assert [row["eval/length"] for row in logged if "eval/length" in row] == [256, 512, 1024]
    summary = json.loads(server.runs[run_id]["summary"])
    assert (summary["loss"], summary["eval/fixed/perplexity@512"]) == (2.5, math.e)
    sent = server.runs[run_id]
    assert (sent["groupName"], sent["jobType"]) == ("demo", "train")
    assert {key: sent[key] for key in EDITED} == EDITED, "what was changed in wandb is overwritten"
    assert (sent["program"], sent.get("host"), sent["exitcode"]) == ("posbench", None, 0)
    assert KEY not in json.dumps(server.runs) and str(tmp_path) not in json.dumps(server.runs)


@pytest.mark.slow
def test_syncing_again_after_more_evaluations_adds_only_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, run = a_run(tmp_path / "runs")
    train(config, run, 0, 3, print)
    with serving() as server:
        environment = {**os.environ, "WANDB_MODE": "online", "WANDB_BASE_URL": server.address, "WANDB_API_KEY": KEY}
        for length in (256, 512):
            evaluate(run, length)
            log_evaluations(run, print)
            command = [sys.executable, "-m", "wandb", "sync", str(tmp_path / "runs/demo/wandb")]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
            assert "Finished syncing" in done.stderr, done.stderr
            [sent] = server.runs.values()
            assert length == 512 or sent["displayName"] == "vo_rope/seed=00"
            sent |= {key: value for key, value in EDITED.items() if length == 256}
    [run_id] = server.runs
    logged = server.history(run_id)
    assert [row for row in logged if "tokens" in row] == expected(*rows(0, 3))
    assert [row["eval/length"] for row in logged if "eval/length" in row] == [256, 512]
    assert logged.count(BAR) == 1
    assert {key: sent[key] for key in EDITED} == EDITED, "what was changed in wandb is overwritten"
    summary = json.loads(sent["summary"])
    assert (summary["loss"], summary["comparison/loss"], summary["validation/loss"]) == (2.5, 2.5, 9 / 4)
    assert (summary["eval/fixed/nll@256"], summary["eval/fixed/nll@512"]) == (2, 1)


def test_no_time_is_lost_on_a_name_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "getproxies", dict)

    def hang(*_: object) -> None:
        time.sleep(30)
        raise OSError

    monkeypatch.setattr(connection.socket, "create_connection", hang)
    began = time.monotonic()
    assert not connection.answers("https://example.invalid", 0.2)
    assert time.monotonic() - began < 2
