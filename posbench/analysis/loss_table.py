"""Compare the losses of runs that another trainer trained, from a table (`posbench judge losses.csv`).

scheme,seed,loss            needed: a row per run; `inf` for a run that diverged
tokens                      a row per run and number of tokens: the last is compared, the others make a curve
lr                          a row per run and learning rate: each scheme is compared at the best of its rates
text, metric                names, the same in all rows
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import SeedComparison, by_level
from posbench.analysis.statistics import FEWEST_SEEDS, compare, pairs_of
from posbench.config import ConfigError, nearest
from posbench.config.units import count_of
from posbench.runs import FINISHED

NEEDED, OPTIONAL = ("scheme", "seed", "loss"), ("tokens", "lr", "text", "metric")
RUN = ["scheme", "seed", "lr"]
_LOSS = re.compile("loss|nll|entropy", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LossTable(SeedComparison):
    """A comparison of losses that a table lists. What the table does not tell is not known."""

    curve: pd.DataFrame  # all rows of the compared runs: scheme, seed, tokens, loss
    lrs: list[str]  # of all runs; [] if the table does not say, or each scheme is at the best of several

    @property
    def config(self) -> dict[str, Any]:
        return {}

    @property
    def rates(self) -> list[str]:
        return self.lrs

    @property
    def ends(self) -> pd.DataFrame:
        return self.runs

    @property
    def training_length(self) -> int:
        return 0

    @property
    def is_at_best_rates(self) -> bool:
        return self.second is not None

    @property
    def scope(self) -> str:
        return "at best rates of the table" if self.is_at_best_rates else "at the rates of the table"

    @property
    def unknown(self) -> str:
        """Return what the table does not tell, as text."""
        rates = "" if self.is_at_best_rates else ", and whether rates were searched"
        return f"whether seeds share batches and first weights{rates}"

    @property
    def files(self) -> dict[str, pd.DataFrame]:
        return {"pairs.csv": self.pairs, "runs.csv": self.runs}

    def logged(self, kind: str, figures: Any) -> pd.DataFrame:
        return self.curve if kind == "validation" else self.curve.head(0)

    @property
    def beyond(self) -> pd.DataFrame:
        return self.cells


def refuse_options(options: Any, names: Sequence[str]) -> None:
    """Raise ConfigError if one of these options is set, which a table cannot serve."""
    for name in names:
        if getattr(options, name):
            raise ConfigError(f"--{name} is for runs that posbench trained: a table of losses lacks what it needs")


def compare_table(file: Path, baseline: str | None, margin: float, size: int = 0) -> LossTable:
    """Return the comparison of the losses in `file`.

    Arguments: baseline, by default the scheme of the first row; margin, nats per token below which losses count as
    equal; size, the number of planned tests, if it is larger than the number of pairs.
    Raises: ConfigError, with the line, if the table cannot be used.
    """
    rows = read_losses(file)
    first, last = str(rows["scheme"].iloc[0]), rows["tokens"].max()
    final = rows[rows["tokens"] == last]
    _check_all_end(rows, final, file)
    final, second, lrs = _at_best_rates(final, file)
    died = final[np.isinf(final["loss"])]
    failed: dict[str, dict[int, str]] = {}
    for scheme, seed in zip(died["scheme"], died["seed"], strict=True):
        failed.setdefault(str(scheme), {})[int(seed)] = "its loss is infinite"
    runs = final[np.isfinite(final["loss"])]
    losses = by_level(runs.pivot(index="seed", columns="scheme", values="loss").sort_index())
    baseline = baseline or first
    if baseline not in losses:
        hint = nearest(baseline, losses.columns)
        raise ConfigError(f"{file} has no finite loss of the baseline {baseline!r}{hint}")
    left_out = []
    for scheme in losses:
        shared = losses[[scheme, baseline]].dropna()
        alone = losses[scheme].dropna().index.difference(shared.index)
        left_out += [f"{scheme} seed {seed}: {baseline} has no such seed" for seed in alone]
        if len(shared) < FEWEST_SEEDS and scheme not in failed:
            raise ConfigError(
                f"{file}: {scheme} and {baseline} share {count_of(len(shared), 'seed')}, a test needs {FEWEST_SEEDS}"
            )
    undecided = pairs_of(failed, losses)
    return LossTable(
        runs=_as_runs(runs, file),
        schemes=list(losses.columns),
        wanted_baseline=baseline,
        cells=pd.DataFrame(),
        holes={},
        left_out=left_out,
        notes=[],
        values=losses,
        second=second,
        margin=margin,
        pairs=compare(losses, second, margin, size=size, undecided=undecided),
        search=None,
        planned_tests=size,
        primary=(),
        failed=failed,
        undecided=undecided,
        split_in_two=[],
        late_at_best=[],
        long_range_order=None,
        curve=rows[rows.set_index(RUN).index.isin(runs.set_index(RUN).index) & np.isfinite(rows["loss"])],
        lrs=lrs,
    )


def _as_runs(runs: pd.DataFrame, file: Path) -> pd.DataFrame:
    # Return the columns that a report reads.
    named = runs.rename(columns={"lr": "train.lr"})
    return named.assign(experiment=file.stem, path=str(file), status=FINISHED, diverged=None)


def _check_all_end(rows: pd.DataFrame, final: pd.DataFrame, file: Path) -> None:
    # Raise ConfigError for a run that ends before the others.
    ended = final.set_index(RUN).index
    early = rows[~rows.set_index(RUN).index.isin(ended)]
    if len(early):
        run = early.iloc[-1]
        raise ConfigError(
            f"{file}: {run['scheme']} seed {run['seed']} ends at {run['tokens']:g} tokens, others at "
            f"{rows['tokens'].max():g}: give all runs the same"
        )


def _at_best_rates(final: pd.DataFrame, file: Path) -> tuple[pd.DataFrame, pd.DataFrame | None, list[str]]:
    """Return the runs at each scheme's best rate, the losses at its second (None: one rate each), and the rates."""
    tried = final.groupby("scheme", sort=False)["lr"].nunique()
    if tried.max() < 2:
        return final, None, [f"{rate:g}" for rate in sorted(set(final["lr"]) - {0.0})]
    parts, second = [], dict[str, pd.Series]()
    for scheme, runs in final.groupby("scheme", sort=False):
        losses = runs.pivot(index="seed", columns="lr", values="loss")
        # Rates are compared over the seeds that all of them have.
        means = losses.dropna().mean().sort_values(kind="stable")
        if len(means) < 2 or means.isna().any():
            raise ConfigError(
                f"{file}: {scheme} has {count_of(len(means), 'lr')} with common seeds, and others have {tried.max()}: "
                "give every scheme two or more, with the same seeds, or keep one each"
            )
        best, other = means.index[:2]
        if losses[[best, other]].dropna(how="all").isna().any(axis=None):
            raise ConfigError(f"{file}: {scheme} has different seeds at lr {best:g} and {other:g}: give both the same")
        parts.append(runs[runs["lr"] == best])
        second[str(scheme)] = losses[other]
    return pd.concat(parts), pd.DataFrame(second), []


# ---------------------------------------------------------------- reading


def read_losses(file: Path) -> pd.DataFrame:
    """Return the table's rows: scheme, seed, loss (nats), tokens and lr (0 if not there).

    Raises: ConfigError in one line, with the number of the line in the file.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        # pandas skips blank lines, and an error names the line in the file.
        lines = {number: line for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
        separator = max(",;\t", key=next(iter(lines.values()), "").count)
        frame = pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, index_col=False)
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        raise ConfigError(f"{file} cannot be read as comma-separated text ({' '.join(str(error).split())})") from error
    frame.columns = frame.columns.str.strip()
    # A field may have several lines; then rows are counted.
    frame.index = pd.Index([*lines][1:] if len(lines) == len(frame) + 1 else range(2, len(frame) + 2))
    for name in NEEDED:
        if name not in frame:
            names = ", ".join(map(str, frame.columns[:6])) + (" ..." if len(frame.columns) > 6 else "")
            raise ConfigError(
                f"{file} has no column {name} ({count_of(len(frame.columns), 'column')}: {names}): a row per run, with "
                f"{', '.join(NEEDED)}, and {', '.join(OPTIONAL)} if you have them"
            )
    if frame.empty:
        raise ConfigError(f"{file} has no row below its header")
    rows = pd.DataFrame({"scheme": frame["scheme"].str.strip(), "tokens": 0.0, "lr": 0.0})
    for name in ("seed", "loss", "tokens", "lr"):
        if name in frame:
            rows[name] = _numbers(frame[name], file)
    _refuse(rows["scheme"] == "", "has no scheme", file)
    _refuse(rows["seed"] % 1 != 0, "has a seed that is not a whole number", file)
    for name in ("text", "metric"):
        rows[name] = frame.get(name, "")
        values = sorted(set(rows[name]))
        if len(values) > 1:
            raise ConfigError(f"{file}: the column {name} has {', '.join(values[:4])}: give each a table of its own")
    metric = str(rows["metric"].iloc[0])
    if metric and not _LOSS.search(metric):
        raise ConfigError(f"{file}: the metric {metric} is not a loss in nats: of a perplexity, give the logarithm")
    rows["seed"] = rows["seed"].astype(int)
    _refuse(rows.duplicated([*RUN, "tokens"]), "repeats a scheme and seed: keep one of the rows", file)
    return rows.reset_index(drop=True)


def _numbers(column: pd.Series, file: Path) -> pd.Series:
    numbers = pd.to_numeric(column, errors="coerce")
    for line, number, text in zip(column.index, numbers, column, strict=True):
        if np.isnan(number):
            raise ConfigError(
                f"{file}, line {line}: {column.name} is {text!r}, which is not a number (inf: a run that diverged)"
            )
    return numbers


def _refuse(is_wrong: pd.Series, problem: str, file: Path) -> None:
    if is_wrong.any():
        raise ConfigError(f"{file}, line {is_wrong[is_wrong].index[0]} {problem}")
