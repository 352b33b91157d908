"""Run folders as a DataFrame: one row a run, whatever became of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.reporting.evaluations import LOSS_PROTOCOLS, VALIDATION, Evaluation, evaluations, perplexity
from posbench.runs import FINISHED, UNREADABLE, Run, find_runs, state_of

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
    m: dict[str, Any] = {}
    try:
        m, status = run.manifest, state_of(run)
        if status == FINISHED:
            _ = run.config  # a run without one is left out by name
    except ConfigError as error:
        status, m = UNREADABLE, {**m, "reason": str(error)}
    costs, device, parameters = (_mapping(m, key) for key in ("costs", "device", "num_parameters"))
    found = [e for e in evaluations(path) if e.protocol in LOSS_PROTOCOLS]
    final = _final(found)
    loss = final.loss if final else _number(m.get("loss"))
    return {
        "experiment": str(m.get("experiment", path.parent.parent.name)),
        "scheme": str(m.get("scheme", path.parent.name)),
        "seed": _seed(m.get("seed"), path),
        "status": status,
        "reason": _word(m.get("reason")),
        "is_relative": m.get("is_relative") if isinstance(m.get("is_relative"), bool) else None,
        "loss": loss,
        "bits_per_byte": final.bits_per_byte if final else _number(m.get("bits_per_byte")),
        "perplexity": perplexity(loss),
        **{f"perplexity@{e.length}/{e.protocol}": perplexity(e.loss) for e in found if e.protocol != VALIDATION},
        **{name: _number(m.get(name)) for name in ("num_steps", "tokens", "skipped_steps")},
        **{name: _number(costs.get(name)) for name in ("tokens_per_second", "train_seconds", "peak_memory_bytes")},
        "device": _word(device.get("name") or device.get("type")),
        "dtype": _word(device.get("dtype")),
        "parameters": sum(v for v in parameters.values() if _is_whole(v)) or None,
        **{f"fingerprint.{name}": _word(_mapping(m, "fingerprints").get(name)) for name in FINGERPRINTS},
        **{f"version.{name}": _word(version) for name, version in _mapping(m, "versions").items()},
        "started": _word(m.get("started")),
        "ended": _word(m.get("ended")),
        "path": str(path),
    }


def _final(found: list[Evaluation]) -> Evaluation | None:
    """The validation loss at the training length; training writes one."""
    return next((e for e in found if e.protocol == VALIDATION), None)


def _mapping(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    value = manifest.get(key)
    return value if isinstance(value, dict) else {}


def _word(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float) or _is_whole(value) else math.nan


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def _seed(value: Any, path: Path) -> int:
    if _is_whole(value):
        return int(value)
    digits = re.fullmatch(r"seed=([0-9]{1,9})", path.name)
    return int(digits[1]) if digits else -1
