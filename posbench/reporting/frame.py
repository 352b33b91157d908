"""Run folders as a DataFrame: one row a run, whatever became of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.reporting.evaluations import LOSS_PROTOCOLS, VALIDATION, Evaluation, evaluations, perplexity
from posbench.runs import FINISHED, UNREADABLE, Run, find_runs, state_of
from posbench.runs.manifest import Costs

if TYPE_CHECKING:
    import pandas as pd

FINGERPRINTS = ("data", "tokenizer", "config", "code", "initial_weights", "batches")


def results(folder: str | Path) -> pd.DataFrame:
    """Every run at or under `folder` as a row, the died and the unreadable among them (`status`, `reason` say so).

    Columns: experiment, scheme, seed, status, reason, is_relative (promised), loss (nats/token, on the validation
    split), bits_per_byte, perplexity; `perplexity@<length>/<protocol>` for each evaluation there is (lengths in tokens;
    protocols are never mixed); num_steps, tokens, skipped_steps; tokens_per_second, train_seconds, peak_memory_bytes;
    device, dtype, parameters; `fingerprint.*`; `version.*`; started, ended; path.

    Losses are recomputed from the stored windows where there are any. What is not known is NaN or None.
    Raises: ConfigError where `folder` does not exist.
    """
    import pandas as pd

    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder: give an experiment's, such as runs/demo (`posbench train` makes it)")
    rows = [row(run) for run in find_runs(root)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return pd.DataFrame(columns=["experiment", "scheme", "seed", "status", "loss"])
    columns = list(map(str, frame.columns))
    measured = perplexity_columns(columns)
    others = [column for column in columns if column not in measured]
    at = others.index("perplexity") + 1
    frame = frame[[*others[:at], *measured, *others[at:]]]
    return frame.sort_values(["experiment", "scheme", "seed"], ignore_index=True)


def perplexity_columns(columns: Iterable[str]) -> list[str]:
    """Those of `perplexity@<length>/<protocol>`, by protocol and length."""

    def place(column: str) -> tuple[str, int]:
        length, protocol = column.removeprefix("perplexity@").split("/")
        return protocol, int(length)

    return sorted((column for column in columns if column.startswith("perplexity@")), key=place)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain mappings."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def row(run: Run) -> dict[str, Any]:
    """One run as a flat mapping. A manifest that cannot be read makes a row too, with the reason."""
    path = run.path
    try:
        manifest = run.manifest
        status, reason = state_of(run), manifest.reason
        if status == FINISHED:
            _ = run.config  # a run without one is left out by name
    except ConfigError as error:
        return _unreadable(path, str(error))
    m, costs, device = manifest, manifest.costs or Costs(None, None, None), manifest.device
    found = [e for e in evaluations(path) if e.protocol in LOSS_PROTOCOLS]
    final = _final(found)
    loss = final.loss if final else _number(m.loss)
    prints = asdict(m.fingerprints) | {"initial_weights": json.dumps(m.fingerprints.initial_weights)}
    return {
        "experiment": m.experiment,
        "scheme": m.scheme,
        "seed": m.seed,
        "status": status,
        "reason": reason,
        "is_relative": m.is_relative,
        "loss": loss,
        "bits_per_byte": final.bits_per_byte if final else _number(m.bits_per_byte),
        "perplexity": perplexity(loss),
        **{f"perplexity@{e.length}/{e.protocol}": perplexity(e.loss) for e in found if e.protocol != VALIDATION},
        **{name: float(getattr(m, name)) for name in ("num_steps", "tokens", "skipped_steps")},
        **{name: _number(value) for name, value in asdict(costs).items()},
        "device": _word(device.get("name") or device.get("type")),
        "dtype": _word(device.get("dtype")),
        "parameters": sum(m.num_parameters.values()) or None,
        **{f"fingerprint.{name}": prints[name] for name in FINGERPRINTS},
        **{f"version.{name}": version for name, version in m.versions.items()},
        "started": m.started,
        "ended": m.ended,
        "path": str(path),
    }


def _unreadable(path: Path, reason: str) -> dict[str, Any]:
    """The row of a run of which its place alone is known."""
    digits = re.fullmatch(r"seed=([0-9]{1,9})", path.name)
    losses = ("loss", "bits_per_byte", "perplexity")
    counts = ("num_steps", "tokens", "skipped_steps", "tokens_per_second", "train_seconds", "peak_memory_bytes")
    words = ("device", "dtype", "parameters", *(f"fingerprint.{name}" for name in FINGERPRINTS), "started", "ended")
    return {
        "experiment": path.parent.parent.name,
        "scheme": path.parent.name,
        "seed": int(digits[1]) if digits else -1,
        "status": UNREADABLE,
        "reason": reason,
        "is_relative": None,
        **dict.fromkeys((*losses, *counts), math.nan),
        **dict.fromkeys(words),
        "path": str(path),
    }


def _final(found: list[Evaluation]) -> Evaluation | None:
    """The validation loss at the training length; training writes one."""
    return next((e for e in found if e.protocol == VALIDATION), None)


def _word(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
