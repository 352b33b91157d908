"""The folder of recordings that wandb writes: which are of this run, and what of them the server has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posbench.config import Config, ConfigError
from posbench.runs import Manifest, Run


def stored_id(run: Run) -> str | None:
    """The id that run.json keeps, when the run was tracked before."""
    with contextlib.suppress(ConfigError):
        return (run.manifest.wandb or {}).get("id")
    return None


def new_id(config: Config, run: Run, manifest: Manifest) -> str:
    """The same for one run whenever it is opened; another in another folder, or once a folder is trained anew."""
    words = (config.experiment_name, config.scheme.name, config.seed, run.path.resolve(), manifest.started)
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()[:16]


def recordings(folder: Path, run_id: str) -> set[Path]:
    """This run's folders: `offline-run-<time>-<id>`, `run-<time>-<id>`, with `-1` ... when two fall into one second."""
    name = re.compile(rf"(offline-)?run-\d+_\d+-{re.escape(run_id)}(-\d+)?")
    return {path for path in folder.iterdir() if name.fullmatch(path.name)}


def is_uploaded(folder: Path) -> bool:
    """Whether the server has this recording: it was made online, or `wandb sync` left its mark."""
    return not folder.name.startswith("offline-") or any(folder.glob("*.wandb.synced"))


def uploaded(recordings: Iterable[Path]) -> tuple[dict[str, Any], int]:
    """What the server has by the uploaded ones of these recordings: its summary, and the rows of its history."""
    summary: dict[str, Any] = {}
    rows = 0
    for folder in _by_time(filter(is_uploaded, recordings)):
        recorded = _summary(folder)
        here = recorded.get("_step", -1) + 1
        # A recording made online counts on from what the server had, an offline one from nothing.
        rows = rows + here if folder.name.startswith("offline-") else max(rows, here)
        summary |= recorded
    return summary, rows


def figures_in(recordings: Iterable[Path]) -> dict[str, float]:
    """The single figures in the summaries of these recordings; the newest counts."""
    figures: dict[str, float] = {}
    for folder in _by_time(recordings):
        figures |= single_figures(_summary(folder))
    return figures


def single_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Without tables and charts, and without wandb's own keys."""
    return {key: value for key, value in summary.items() if isinstance(value, (int, float)) and not key.startswith("_")}


def _by_time(recordings: Iterable[Path]) -> list[Path]:
    return sorted(recordings, key=lambda path: path.name.removeprefix("offline-"))


def _summary(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
    answer = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return dict(json.loads(answer.stdout)["summary"])
