"""Run folders as a DataFrame: one row per run, also for runs that died or cannot be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import DIED, FINISHED, UNREADABLE, Manifest, Run, find_runs, holds_runs, state_of
from posbench.runs.manifest import Costs
from posbench.runs.readings import Damaged, Reading, Result, perplexity
from posbench.runs.readings import damaged as damaged_result

if TYPE_CHECKING:
    import pandas as pd

FINGERPRINTS = ("data", "tokenizer", "config", "code", "scheme_code", "initial_weights", "batches")
SETTINGS = ("scheme.", "model.", "train.", "device.")  # groups of the configuration whose fields are columns
_COLUMN = re.compile(r"perplexity@([0-9]+)/([a-z0-9_]+)(?:\[(.*)\])?")


def results(folder: str | Path) -> pd.DataFrame:
    """Every run at or under `folder` as a row, also runs that died or cannot be read (see `status` and `reason`).

    Columns: experiment, scheme, seed, status, reason, is_relative (promised), loss (nats/token, on the validation
    split), bits_per_byte, perplexity; diverged (how, in words; None where it did not); initial_loss (before the first
    step); `perplexity@<length>/<protocol>` for each stored evaluation (lengths in tokens; protocols are never mixed),
    and `perplexity@<length>/<protocol>[<words>]` for one under other words of the scheme or on other text
    (`data=<name>`), of which `loss[<words>]` and `bits_per_byte[<words>]` are the losses at the training length;
    num_steps, tokens,
    skipped_steps; training_flops (model FLOPs of all steps); tokens_per_second, train_seconds, peak_memory_bytes;
    device, dtype, parameters;
    `fingerprint.*` (that of the initial weights a JSON object of parts); `version.*`; started, ended;
    damaged (files that are not results of the run, with the command
    that makes each again); path; and the run's settings by their names, such as `train.lr` and `model.d_model` (lists
    as JSON; None where a run has no such setting).

    Losses are recomputed from the stored windows if there are any. What is unknown or damaged is NaN or None.
    Raises: ConfigError if `folder` does not exist.
    """
    import pandas as pd

    root = Path(folder)
    if not holds_runs(root):
        raise ConfigError(
            f"{root} is not a folder: give an experiment's, such as runs/demo (`posbench train` makes it)"
        )
    rows = [row(run) for run in find_runs(root)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return pd.DataFrame(columns=["experiment", "scheme", "seed", "status", "loss"])
    columns = list(map(str, frame.columns))
    measured = perplexity_columns(columns)
    others = [column for column in columns if column not in measured]
    at = others.index("perplexity") + 1
    settings = [column for group in SETTINGS for column in others if column.startswith(group)]
    others = [column for column in others if not column.startswith(SETTINGS)]
    frame = frame[[*others[:at], *measured, *others[at:], *settings]]
    return frame.sort_values(["experiment", "scheme", "seed"], ignore_index=True)


def perplexity_columns(columns: Iterable[str]) -> list[str]:
    """Those of `perplexity@<length>/<protocol>[<words>]`, by protocol, words and length."""

    def place(match: re.Match[str]) -> tuple[str, str, int]:
        return match[2], match[3] or "", int(match[1])

    return [match[0] for match in sorted(filter(None, map(_COLUMN.fullmatch, columns)), key=place)]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain mappings."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def readable_results(run: Run) -> tuple[list[Result], list[Damaged]]:
    """`run.results()` of the protocols that are known here; one that lacks a column of its protocol is damaged."""
    results, damaged = run.results()
    readable = []
    for result in (result for result in results if result.protocol in PROTOCOLS):
        lacking = PROTOCOLS[result.protocol].lacking(result.table.column_names)
        if lacking:
            damaged.append(damaged_result(run, result.reading, f"it lacks the column {lacking!r}"))
        else:
            readable.append(result)
    return readable, damaged


def row(run: Run) -> dict[str, Any]:
    """One run as a flat mapping. One of which something cannot be read makes a row too, with the reason."""
    try:
        manifest, status = run.manifest, state_of(run)
        if status == FINISHED:
            _ = run.config  # a run without one is left out by name
        results, damaged = readable_results(run)
    except ConfigError as error:
        return _unreadable(run.path, str(error))
    losses, initial = _losses(manifest, results, damaged), _initial_loss(run)
    return {
        "experiment": manifest.experiment,
        "scheme": manifest.scheme,
        "seed": manifest.seed,
        "status": status,
        "reason": manifest.reason,
        "is_relative": manifest.is_relative,
        "diverged": _divergence(manifest, status, losses["loss"], initial, bool(damaged)),
        "initial_loss": initial,
        **losses,
        **_facts(manifest),
        "damaged": "\n".join(dict.fromkeys(map(str, damaged))) or None,
        "path": str(run.path),
        **_settings(manifest),
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Those that make the run what it is, by their names in the configuration."""
    named = {name: value for name, value in manifest.identity.items() if name.startswith(SETTINGS)}
    return {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in named.items()}


def _losses(manifest: Manifest, results: list[Result], damaged: list[Damaged]) -> dict[str, float]:
    """The final validation's figures, and a perplexity for each reading by length."""
    final = next((r for r in results if PROTOCOLS[r.protocol].is_loss_table and not r.reading.under), None)
    empty = [each.reading for each in damaged if each.reading.protocol in PROTOCOLS]
    lost = any(PROTOCOLS[reading.protocol].is_loss_table and not reading.under for reading in empty)
    loss = final.loss if final else math.nan if lost else _number(manifest.loss)
    bits_per_byte = final.bits_per_byte if final else math.nan if lost else _number(manifest.bits_per_byte)
    by_length = [result for result in results if PROTOCOLS[result.protocol].is_by_length]
    others = [result for result in results if PROTOCOLS[result.protocol].is_loss_table and result.reading.under]
    return {
        "loss": loss,
        "bits_per_byte": bits_per_byte,
        "perplexity": perplexity(loss),
        **{_column(result.reading): perplexity(result.loss) for result in by_length},
        **{_column(reading): math.nan for reading in empty if PROTOCOLS[reading.protocol].is_by_length},
        **{f"loss[{' '.join(result.reading.under)}]": result.loss for result in others},
        **{f"bits_per_byte[{' '.join(result.reading.under)}]": result.bits_per_byte for result in others},
    }


def _initial_loss(run: Run) -> float:
    """NaN where it is not known."""
    try:
        return _number(run.initial_loss)
    except (ConfigError, OSError):
        return math.nan


def _divergence(manifest: Manifest, status: str, loss: float, initial: float, is_damaged: bool) -> str | None:
    """How a run diverged: it died of numbers that were not finite, or ended with a higher loss than it began with."""
    if status == DIED:
        return f"died: {manifest.reason}"
    if status != FINISHED or (math.isnan(loss) and is_damaged):
        return None
    if not math.isfinite(loss):
        return f"its final loss is {loss}"
    return f"its final loss of {loss:.3f} is above the {initial:.3f} that it began with" if loss > initial else None


def _column(reading: Reading) -> str:
    words = f"[{' '.join(reading.under)}]" if reading.under else ""
    return f"perplexity@{reading.length}/{reading.protocol}{words}"


def _facts(manifest: Manifest) -> dict[str, Any]:
    """What the manifest says of the run's size, cost, machine and fingerprints."""
    costs, device = manifest.costs or Costs(None, None, None), manifest.device
    prints = asdict(manifest.fingerprints)
    prints["initial_weights"] = json.dumps(manifest.fingerprints.initial_weights, sort_keys=True)
    return {
        **{name: float(getattr(manifest, name)) for name in ("num_steps", "tokens", "skipped_steps")},
        "epochs": _number(manifest.epochs),
        "training_flops": _number(manifest.training_flops),
        **{name: _number(value) for name, value in asdict(costs).items()},
        "device": _word(device.get("name") or device.get("type")),
        "dtype": _word(device.get("dtype")),
        "parameters": sum(manifest.num_parameters.values()) or None,
        **{f"fingerprint.{name}": prints[name] for name in FINGERPRINTS},
        **{f"version.{name}": version for name, version in manifest.versions.items()},
        "started": manifest.started,
        "ended": manifest.ended,
    }


def _unreadable(path: Path, reason: str) -> dict[str, Any]:
    """The row of a run of which its place alone is known."""
    digits = re.fullmatch(r"seed=([0-9]{1,9})", path.name)
    losses = ("initial_loss", "loss", "bits_per_byte", "perplexity")
    counts = ("num_steps", "tokens", "skipped_steps", "epochs", "training_flops")
    costs = [field.name for field in fields(Costs)]
    words = (
        "diverged",
        "device",
        "dtype",
        "parameters",
        *(f"fingerprint.{name}" for name in FINGERPRINTS),
        "started",
        "ended",
        "damaged",
    )
    return {
        "experiment": path.parent.parent.name,
        "scheme": path.parent.name,
        "seed": int(digits[1]) if digits else -1,
        "status": UNREADABLE,
        "reason": reason,
        "is_relative": None,
        **dict.fromkeys((*losses, *counts, *costs), math.nan),
        **dict.fromkeys(words),
        "path": str(path),
    }


def _word(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
