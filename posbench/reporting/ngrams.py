"""n-gram models beside the schemes: what a model of the last few tokens loses on the same batches and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from posbench.config import Config
from posbench.evaluation.ngrams import ORDERS
from posbench.evaluation.protocols import NGRAM, VALIDATION
from posbench.reporting.gathering import Key
from posbench.reporting.measure import Measurement
from posbench.reporting.statistics import Interval, t_interval
from posbench.runs import Run


@dataclass(frozen=True)
class NgramLosses:
    """What n-gram models lose on the validation windows of a seed."""

    losses: Mapping[int, float]  # order -> nats/token
    tokens: int  # trained on
    targets: int
    bytes: int

    def bits_per_byte(self, order: int) -> float:
        return self.losses[order] * self.targets / math.log(2) / self.bytes


@dataclass(frozen=True)
class NgramLine:
    """A Kneser-Ney model of one order, over the seeds of the loss table. Losses in nats/token."""

    order: int
    seeds: tuple[int, ...]
    losses: tuple[float, ...]  # one a seed
    loss: Interval  # mean over seeds, 95% t interval
    gap: Interval  # to the baseline, paired by seed; NaN without a baseline
    bits_per_byte: float  # mean over seeds
    tokens: float  # trained on, each once; mean over seeds
    targets: int  # scored
    better: tuple[str, ...]  # schemes whose models are better than it: their whole 95% interval over seeds is
    worse: tuple[str, ...]  # ... and worse
    open: tuple[str, ...]  # the others; with one seed there are none

    @property
    def name(self) -> str:
        return f"Kneser-Ney {self.order}"


def ngram_lines(
    measurements: list[Measurement], runs: Mapping[Key, Run], baseline: str | None, config: Config, notes: list[str]
) -> list[NgramLine]:
    """A line an order where every seed of the loss table has its record; else none, and `notes` say why."""
    table = [m for m in measurements if m.protocol == VALIDATION.name]
    limit = config.evaluation.ngram_tokens
    if not table or not limit:
        return []
    tokens = max(run.manifest.tokens for run in runs.values())
    if tokens > limit:
        notes.append(
            f"No n-gram lines: the runs read {tokens:,} tokens, and these are made up to "
            f"evaluation.ngram_tokens={limit:,}."
        )
        return []
    records = _records(table[0], runs)
    lacking = [str(seed) for seed in table[0].seeds if seed not in records]
    if lacking:
        notes.append(
            f"No n-gram lines: no losses of n-gram models are stored for seed{'s' * (len(lacking) > 1)} "
            f"{', '.join(lacking)}; `posbench eval` on the run folders makes them."
        )
        return []
    return [_line(order, records, table, baseline) for order in ORDERS]


def _records(of_scheme: Measurement, runs: Mapping[Key, Run]) -> dict[int, NgramLosses]:
    """The losses of each seed, which one of its runs holds for all its schemes."""
    records: dict[int, NgramLosses] = {}
    for seed in of_scheme.seeds:
        batches = runs[of_scheme.scheme, seed].manifest.fingerprints.batches
        for run in (run for (_, number), run in runs.items() if number == seed):
            if any(reading.protocol == NGRAM.name for reading in run.evaluated()):
                for result in (each for each in run.results()[0] if each.protocol == NGRAM.name):
                    if result.header["batches"] == batches:
                        sums = result.windows.groupby(NGRAM.columns[0])[["nll", "targets", "bytes"]].sum()
                        losses = {int(str(order)): float(row.nll / row.targets) for order, row in sums.iterrows()}
                        counts = (int(sums["targets"].iloc[0]), int(sums["bytes"].iloc[0]))
                        records[seed] = NgramLosses(losses, int(result.header["tokens"]), *counts)
    return records


def _line(order: int, records: Mapping[int, NgramLosses], table: list[Measurement], baseline: str | None) -> NgramLine:
    of_seeds = list(records.values())
    losses = np.array([record.losses[order] for record in of_seeds])
    best_first = sorted(table, key=lambda m: m.loss.mean)
    gaps = {m.scheme: t_interval(losses - np.array(m.losses)) for m in best_first}
    signs = {scheme: _sign(gap) for scheme, gap in gaps.items()}
    better, worse, undecided = (tuple(s for s, sign in signs.items() if sign == which) for which in (1, -1, 0))
    return NgramLine(
        order=order,
        seeds=tuple(records),
        losses=tuple(losses.tolist()),
        loss=t_interval(losses),
        gap=gaps[baseline] if baseline in gaps else Interval(math.nan, math.nan, math.nan),
        bits_per_byte=float(np.mean([record.bits_per_byte(order) for record in of_seeds])),
        tokens=float(np.mean([record.tokens for record in of_seeds])),
        targets=of_seeds[0].targets,
        better=better,
        worse=worse,
        open=undecided,
    )


def _sign(gap: Interval) -> int:
    """1 where all of the interval lies above 0, -1 where all lies below, else 0; of one value its own sign."""
    low, high = (gap.mean, gap.mean) if math.isnan(gap.low) else (gap.low, gap.high)
    return 1 if low > 0 else -1 if high < 0 else 0
