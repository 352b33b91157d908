"""Runs as training and evaluation leave them, and what wandb recorded of them, read back."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import posbench
from posbench import tracking
from posbench.config import Config
from posbench.runs import FINISHED, FORMAT, RUNNING, Manifest, Run, append_metrics, run_folder
from posbench.runs.manifest import Costs, Fingerprints
from posbench.runs.readings import Reading
from posbench.runs.readings import store as store_result

TOKENS_A_STEP = 100


def a_run(root: Path, *words: str) -> tuple[Config, Run]:
    """A run folder as training leaves it before the first step."""
    words = ("scheme=vo_rope", "model=tiny", "tracking=wandb", "tracking.init_timeout=2", f"runs_dir={root}", *words)
    config = posbench.compose(words)
    run = Run(run_folder(config))
    if not (run.path / "run.json").exists():
        run.path.mkdir(parents=True)
        (run.path / "config.yaml").write_text(yaml.safe_dump(config.to_mapping()))
        run.write_manifest(
            Manifest(
                format=FORMAT,
                status=RUNNING,
                experiment=config.experiment_name,
                scheme=config.scheme.name,
                seed=config.seed,
                vocab_size=257,
                num_parameters={"embedding": 1, "body": 2, "scheme": 0},
                is_relative=True,
                fingerprints=Fingerprints("abc", "def", "012", "345", "678", {"norms": "9ab"}),
                identity={},
                versions={},
                device={},
                num_steps=8,
                tokens=800,
                started="2026-11-20T10:00:00Z",
            )
        )
    return config, run


def rows(first: int, last: int) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl for the steps first .. last: validation at every third."""
    found: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        at = {"step": step, "tokens": step * TOKENS_A_STEP}
        found.append(
            {"kind": "train", **at, "loss": 8 / (step + 1), "lr": 0.1, "grad_norm": None, "tokens_per_second": 5.0}
        )
        if step % 3 == 0:
            found.append({"kind": "validation", **at, "loss": 9 / (step + 1), "bits_per_byte": 1.5})
    return found


def train(config: Config, run: Run, first: int, last: int, notice: tracking.Notice, failed: bool = False) -> None:
    """What the training loop does with its tracker, from step `first`, where metrics.jsonl is cut off."""
    metrics = run.path / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] < first] if first else []
    metrics.write_text("".join(f"{line}\n" for line in kept))
    tracker = tracking.open_tracker(config, run, run.manifest, notice)
    run.update_manifest(wandb=tracker.record)
    for row in rows(first, last):
        append_metrics(metrics, row)
        tracker.log(row)
    if os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    if not failed:
        losses = {"loss": 2.5, "perplexity": math.exp(2.5), "bits_per_byte": 1.25}
        run.update_manifest(status=FINISHED, weights="fed", costs=Costs(5.0, 160.0, None, 3.0), **losses)
        tracker.summary(run.manifest.figures)
    tracker.finish(failed)


def evaluate(run: Run, *lengths: int) -> None:
    """Store evaluations by the formats of the run folder: nll = 2 nats at every length but 1 at 512."""
    for length in lengths:
        nll = 1.0 if length == 512 else 2.0
        result = {"protocol": "fixed", "split": "test", "length": length, "targets_total": 640, "nll_mean": nll}
        store(run, {**result, "bits_per_byte": 0.5, "documents": 3, "windows": 10})


def store(run: Run, result: dict[str, Any], rows: pd.DataFrame | None = None) -> None:
    windows = pd.DataFrame({"document": [0], "start": [1], "targets": [640], "nll": [1.0], "bytes": [900]})
    header = {"settings": {}, "targets_total": 640, "by_order": 0.1, "anchor": 1024, "weights": "fed", **result}
    store_result(run, Reading(result["protocol"], result["length"]), windows if rows is None else rows, header)


def recordings(root: Path) -> list[Path]:
    return sorted((root / "demo" / "wandb").iterdir())


def inspect(recording: Path) -> list[dict[str, Any]]:
    """The records of a recording, read by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(recording)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logged rows without wandb's own keys."""
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The single figures of a recording."""
    return {k: v for record in records if record["type"] == "summary" for k, v in record["summary"]["update"].items()}


def expected(*tokens_rows: dict[str, Any]) -> list[dict[str, Any]]:
    """How rows of metrics.jsonl look in wandb."""
    found = []
    for row in tokens_rows:
        named = {f"{row['kind']}/{key}": value for key, value in row.items() if key not in ("kind", "step", "tokens")}
        found.append({"tokens": row["tokens"], **{key: value for key, value in named.items() if value is not None}})
    return found


def rows_of(recording: Path, key: str) -> list[dict[str, Any]]:
    """The rows of the one table that was logged under this key."""
    [file] = recording.glob(f"files/media/table/{key}_*.json")
    content = json.loads(file.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
