"""Read what the runs measured from run folders and packs, as a summary and a tidy table.

    posbench.results("runs/demo")               a row per run: its losses, costs, fingerprints and settings
    posbench.results("runs/demo", tidy=True)    a row per scored window and metric, with the run's settings

A tidy row has the sum of a metric over a window's targets, and the number of targets. So the figure of any group of
rows is `value.sum() / count.sum()`: a token-weighted mean, never a mean of means.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS, VALIDATION, EvalProtocol, protocol_of
from posbench.runs import FINISHED, UNREADABLE, Manifest, Run, find_runs, run_at, state_of
from posbench.runs.fingerprints import comparable_fingerprint
from posbench.runs.results import Result, perplexity
from posbench.runs.run import initial_loss

_OF_MUON = ("muon_share", "own_matrices")  # columns of what Muon records; those of other optimizers are optimizer.*
SETTINGS = ("model.", "train.", "scheme.", "device.", "data.")  # groups of the configuration whose fields are columns
FINGERPRINTS = ("data", "tokenizer", "config", "code", "initial_weights", "batches")

# Meaning and unit of every column of the tidy table, the summary and a report's CSV files.
_FILE = Path(__file__).with_name("columns.yaml")
_ENTRIES = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
COLUMNS: dict[str, tuple[str, str]] = {name: (meaning, unit) for name, (meaning, unit) in _ENTRIES.items()}
for _protocol in PROTOCOLS.values():
    COLUMNS |= _protocol.columns


def results(*places: str | Path, tidy: bool = False) -> pd.DataFrame:
    """Return a table with a row per run in these folders or packs (zip files), also if it died or cannot be read.

    `posbench.analysis.table.COLUMNS` explains every column.
    Arguments: tidy, True for a row per scored window and metric of finished runs, with the run's settings.
    Raises: ConfigError if a folder or pack does not exist.
    """
    summary, rows = read(places)
    if not tidy:
        return summary
    # As categories, because each row repeats them.
    settings = summary.reindex(columns=["tokens", "parameters", *settings_of(summary)]).astype("category")
    return rows.join(settings, on="run").drop(columns="run")


def read(places: Iterable[str | Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the summary (a row per run) and the tidy table (a row per scored window and metric).

    The column `run` of the tidy table is the run's index in the summary. Raises: ConfigError if a folder or pack does
    not exist.
    """
    runs: list[Run] = []
    for place in map(Path, places):
        runs_here = find_runs(place)
        if not runs_here and not place.is_dir():
            raise ConfigError(f"{place} is not a folder of runs: give an experiment's, such as runs/demo")
        runs += runs_here
    rows = _Rows()
    summary = pd.DataFrame([_summary(number, run, rows) for number, run in enumerate(runs)])
    if summary.empty:
        return pd.DataFrame(columns=["experiment", "scheme", "seed", "status", "loss"]), rows.frame()
    settings = settings_of(summary)  # the last columns
    measured = [column for column in summary if column not in settings]
    return summary[[*measured, *settings]], rows.frame()


def settings_of(summary: pd.DataFrame) -> list[str]:
    """Return the names of the summary's columns that hold settings of the runs, such as `train.lr`."""
    return [column for column in map(str, summary.columns) if column.startswith(SETTINGS)]


def with_defaults(summary: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the summary with the text "default" where a run does not record a column, because it did not differ."""
    return summary.assign(**{c: summary[c].astype(object).fillna("default") for c in columns})


def check_columns(summary: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise ConfigError for a column that these runs do not have. The message lists the settings that differ."""
    known = ["experiment", "tokens", "parameters", "dtype", *settings_of(summary)]
    for column in columns:
        if column not in known or summary[column].isna().all():
            # Settings of schemes differ anyway, so they are no help.
            known = [c for c in known if not c.startswith("scheme.")]
            varied = [c for c in known if summary[c].astype(str).nunique(dropna=False) > 1]
            differ = ", ".join(varied) or "nothing but the scheme and the seed"
            raise ConfigError(f"--by {column!r} is not a column of these runs; they differ in {differ}")


class _Rows:
    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []  # values shared by all rows of one result and metric
        self.columns: dict[str, list[Any]] = {name: [] for name in ("document", "first", "last", "value", "count")}

    def add(self, key: dict[str, Any], **columns: Any) -> None:
        self.keys.append(key | {"size": len(columns["value"])})
        for name, values in columns.items():
            self.columns[name].append(values)

    def frame(self) -> pd.DataFrame:
        names = ["run", "experiment", "scheme", "seed", "protocol", "length", "under", "text", "at_step", "anchor"]
        names += ["windows_digest"]
        keys = pd.DataFrame(self.keys, columns=[*names, "metric", "size"])
        for name in ("experiment", "scheme", "protocol", "under", "text", "metric"):
            keys[name] = keys[name].astype("category")
        # Keys are repeated at the end, so that millions of rows are never dicts.
        repeated = keys.iloc[np.repeat(np.arange(len(keys)), keys.pop("size").astype(int))].reset_index(drop=True)
        for name, parts in self.columns.items():
            repeated[name] = np.concatenate(parts or [np.empty(0)])
        return repeated


def _summary(number: int, run: Run, rows: _Rows) -> dict[str, Any]:
    """Return the summary's row of a run, and append its scores to `rows`. Arguments: number, of the run in the summary.

    The row of a run that cannot be read has the status UNREADABLE and little else.
    """
    try:
        manifest, status, logged = run.manifest, state_of(run), run.logged
        stored: Sequence[Result] = ()
        damaged: Sequence[Any] = ()
        # Scores of unfinished runs are not read.
        if status == FINISHED:
            stored, damaged = run.results()
    except ConfigError as error:
        return _unreadable(run, str(error))
    _add_results(number, manifest, stored, rows)
    final = _final(manifest, stored)
    first_loss = _number(initial_loss(logged))
    loss, bits_per_byte = _number(manifest.loss), _number(manifest.bits_per_byte)
    # A stored result counts more than the manifest's last validation.
    if final:
        loss, bits_per_byte = final.loss, final.bits_per_byte
    # A continued run begins with trained weights, so a loss above its first one is no divergence.
    initial = math.nan if manifest.continued else first_loss
    row = {
        "experiment": manifest.experiment,
        "scheme": manifest.scheme,
        "seed": manifest.seed,
        "status": status,
        "reason": manifest.reason,
        "diverged": _divergence(manifest, status, loss, initial),
        "loss": loss,
        "initial_loss": first_loss,
        "bits_per_byte": bits_per_byte,
        "perplexity": perplexity(loss),
    }
    row |= _answered(final) | _trained(manifest, logged)
    # Results of a task say which accuracy chance gives, and from which on it counts as learnt: the same in each result.
    for result in stored:
        if "learnt" in result.header:
            row |= {"chance": result.header["chance"], "goal": result.header["learnt"]}
            break
    row |= _origin(manifest)
    row["damaged"] = "\n".join(map(str, damaged)) or None
    row["path"] = str(run.path)
    for name in FINGERPRINTS:
        row[f"fingerprint.{name}"] = _plain(getattr(manifest.fingerprints, name))
    row["fingerprint.config"] = comparable_fingerprint(manifest.identity)
    row["own_rate"] = manifest.identity.get("scheme.own_lr", False)
    for name, version in manifest.versions.items():
        row[f"version.{name}"] = version
    return row | _settings(manifest)


def _final(manifest: Manifest, stored: Sequence[Result]) -> Result | None:
    """Return the result that gives a run its loss: the validation as trained, or None without one.

    For a subject it is the result at the longest length up to its training length.
    """
    if not manifest.subject:
        for result in stored:
            if result.protocol == VALIDATION.name and not result.key.under:
                return result
        return None
    # A subject was never validated; beyond its training length, its loss says nothing about it as trained.
    longest = manifest.identity["train.context_length"]
    up_to_trained = []
    for result in stored:
        protocol = protocol_of(result)
        if protocol and protocol.is_by_length and not result.key.under and result.length <= longest:
            up_to_trained.append(result)
    return max(up_to_trained, key=lambda result: result.length, default=None)


def _answered(final: Result | None) -> dict[str, float]:
    """Return the share of right answers and of problems with only right answers, or {} if this is no task."""
    if final is None or "right" not in final.table.column_names:
        return {}
    right, answers = final.windows["right"], final.windows["targets"]
    return {"accuracy": right.sum() / answers.sum(), "exact": (right == answers).mean()}


def _trained(manifest: Manifest, logged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns about a run's training: onsets, tokens, size, optimizer and costs."""
    row: dict[str, Any] = {}
    if not manifest.continued:  # an onset in a continued run is not comparable
        for protocol in PROTOCOLS.values():
            row |= protocol.of_training(logged)
    row["is_relative"] = manifest.is_relative
    if manifest.continued:
        row |= {"continues": manifest.continued["name"], "tokens_before": manifest.continued["tokens"]}
    for name in ("tokens", "num_steps", "skipped_steps"):
        row[name] = getattr(manifest, name)
    row["epochs"] = _number(manifest.epochs)
    row["parameters"] = sum(manifest.num_parameters.values())
    for name, value in (manifest.optimizer or {}).items():
        if name in _OF_MUON:
            row[name] = value
        elif name != "dtype":  # Muon's; the column of this name is the number format of training
            row[f"optimizer.{name}"] = _plain(value)
    row["training_flops"] = _number(manifest.training_flops)
    row["cache_per_token"] = _number(manifest.cache_per_token)
    if manifest.costs:
        row |= {name: _number(value) for name, value in asdict(manifest.costs).items()}
    return row


def _origin(manifest: Manifest) -> dict[str, Any]:
    device = manifest.device
    return {
        "device": str(device.get("name") or device.get("type")),
        "dtype": str(device.get("dtype")),
        "started": manifest.started,
        "ended": manifest.ended,
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    settings = {name: _plain(value) for name, value in manifest.identity.items() if name.startswith(SETTINGS)}
    settings.setdefault("train.optimizer", "adamw")  # recorded only if it is another one
    settings.pop("scheme.own_lr", None)  # the column `own_rate` has it
    return settings


def _unreadable(run: Run, reason: str) -> dict[str, Any]:
    # The folders of the run still tell experiment, scheme and seed: <experiment>/<scheme>/seed=<n>.
    seed = re.fullmatch(r"seed=([0-9]+)", run.path.name)
    experiment, scheme = "", ""
    if len(run.path.parts) > 2:
        experiment, scheme = run.path.parts[-3:-1]
    return {
        "experiment": experiment,
        "scheme": scheme,
        "seed": int(seed[1]) if seed else -1,
        "status": UNREADABLE,
        "reason": reason,
        "diverged": None,
        "loss": math.nan,
        "path": str(run.path),
    }


def _add_results(number: int, manifest: Manifest, stored: Iterable[Result], rows: _Rows) -> None:
    for result in stored:
        # A protocol that is not registered here, or whose scores are not compared between schemes, has no rows.
        protocol, result_key = protocol_of(result), result.key
        if protocol is None or not protocol.is_compared:
            continue
        columns: Any = {name: result.table[name].to_numpy() for name in result.table.column_names}
        # A row without targets has no mean.
        has_targets = columns[protocol.count_column] > 0
        columns = {name: x[has_targets] for name, x in columns.items()}
        # The step has a column of its own; 0 means the last step.
        options = [option for option in result_key.options if not option.startswith("step=")]
        key = {
            "run": number,
            "experiment": manifest.experiment,
            "scheme": manifest.scheme,
            "seed": manifest.seed,
            "protocol": result_key.protocol,
            "length": result_key.length,
            "at_step": result_key.step or 0,
            "windows_digest": result.windows_digest,
            "under": " ".join(options),
            "text": result_key.data or "",
            "anchor": result_key.anchor,
        }
        first, last = _ranges(protocol, columns)
        for metric, value, count in protocol.metrics(columns):
            counted = count > 0  # a row may have none of the targets of a metric, such as copyable ones
            rows.add(
                key | {"metric": metric},
                document=columns[protocol.text_column][counted],
                first=first[counted],
                last=last[counted],
                value=value[counted],
                count=count[counted],
            )


def _ranges(protocol: EvalProtocol, columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the first and last position or distance of each row, both in its range."""
    if "bucket_start" in columns:
        return columns["bucket_start"], columns["bucket_end"] - 1  # the end is not in the range
    # Rows of whole windows have no range.
    zeros = np.zeros(len(columns[protocol.count_column]), np.int64)
    return zeros, zeros


def _divergence(manifest: Manifest, status: str, loss: float, initial: float) -> str | None:
    """Return how a run diverged, as text, or None. Arguments: initial, the loss it began with; NaN: unknown."""
    if status == "died":
        return f"died: {manifest.reason}"
    if loss > initial:
        return f"its final loss of {loss:.3f} is above the {initial:.3f} that it began with"
    return None


def config_of(path: str) -> dict[str, Any]:
    """Return the configuration of the run at `path` as nested dicts. Raises: ConfigError if it cannot be read."""
    try:
        return _parsed(run_at(path).content("config.yaml"))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}/config.yaml cannot be read ({error}): leave the run out with --schemes") from error


@lru_cache(maxsize=1024)  # keyed by the content, so that a changed file is read again
def _parsed(content: bytes) -> dict[str, Any]:
    return dict(yaml.safe_load(content))


def _plain(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value, sort_keys=True)
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def where(table: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Return the rows of a table in which the columns have the values passed here; None allows any value."""
    for column, value in equal.items():
        table = table if value is None else table[table[column] == value]
    return table


def curves(paths: Iterable[str], kind: str, figures: Sequence[str]) -> pd.DataFrame:
    """Return what runs logged during training: columns path, step, tokens and `figures`.

    Arguments: kind, of lines of metrics.jsonl, such as `validation`.
    """
    rows = []
    for path in paths:
        # If a step was logged twice, its first line counts: reversed, because a later entry of a dict replaces others.
        rows_by_step = {row["step"]: row for row in reversed(run_at(path).logged) if row["kind"] == kind}
        rows += [{"path": path, **rows_by_step[step]} for step in sorted(rows_by_step)]
    numbers = ["step", "tokens", *figures]
    return pd.DataFrame(rows, columns=["path", *numbers]).astype(dict.fromkeys(numbers, float))
