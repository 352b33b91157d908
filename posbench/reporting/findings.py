"""Everything a report says, computed once: tables, plots and pages only set it out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posbench.config import ConfigError
from posbench.reporting.evaluations import (
    LENGTH_PROTOCOLS,
    LOSS_PROTOCOLS,
    POSITION,
    RETRIEVAL,
    VALIDATION,
    Evaluation,
    evaluations,
    perplexity,
)
from posbench.reporting.frame import results
from posbench.reporting.joining import Joined, common_seeds, join
from posbench.reporting.published import Comparison, load_published, set_against
from posbench.reporting.statistics import (
    Chain,
    Floats,
    Interval,
    Pair,
    chain,
    compare_all,
    document_error,
    t_interval,
)
from posbench.runs import Run

if TYPE_CHECKING:
    import pandas as pd

    from posbench.config import Config

Key = tuple[str, int]  # scheme, seed


@dataclass(frozen=True)
class Measurement:
    """One scheme by one protocol at one length, over the seeds compared there. Losses in nats/token."""

    scheme: str
    protocol: str
    split: str
    length: int  # tokens
    seeds: tuple[int, ...]
    losses: tuple[float, ...]  # one a seed
    loss: Interval  # mean over seeds, 95 % t interval
    gap: Interval  # to the baseline, paired by seed; NaN without a baseline
    loss_documents: float  # half the 95 % interval that the choice of documents leaves around the mean loss
    gap_documents: float  # ... around the gap, over the same documents
    bits_per_byte: float  # mean over seeds
    targets: int  # tokens scored, each seed
    windows: int
    documents: int

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: the geometric mean over seeds."""
        return perplexity(self.loss.mean)


@dataclass(frozen=True)
class Findings:
    """What the runs of one experiment say."""

    experiment: str
    config: Config  # of one joined run: what all of them share
    frame: pd.DataFrame  # every run, one row each
    joined: Joined
    measurements: list[Measurement]
    pairs: list[Pair]
    chain: Chain
    position: pd.DataFrame  # scheme, length, bucket_start, bucket_end, loss, seeds
    retrieval: pd.DataFrame  # scheme, length, gap, drop, low, high, seeds
    curves: pd.DataFrame  # scheme, seed, tokens, loss: the validation losses while training
    early: pd.DataFrame  # scheme, length, gain, early: nats/token, see `_early_tokens`
    vocab_size: int | None  # of the tokenizer
    measured: dict[str, str]  # scheme -> relative | absolute | unclear | not measured
    against: list[Comparison]
    notes: list[str]

    @property
    def training_length(self) -> int:
        """Tokens of context in training."""
        return self.config.train.context_length

    @property
    def baseline(self) -> str | None:
        return self.joined.baseline

    @property
    def schemes(self) -> list[str]:
        """The compared schemes, best first."""
        return self.chain.order

    def at(self, protocol: str, length: int | None = None) -> dict[str, Measurement]:
        """The measurements of a protocol at a length (default: the training length), by scheme."""
        length = length or self.training_length
        return {m.scheme: m for m in self.measurements if (m.protocol, m.length) == (protocol, length)}

    def lengths(self, protocol: str) -> list[int]:
        return sorted({m.length for m in self.measurements if m.protocol == protocol})


def find(folder: str | Path, baseline: str | None = None, against: str | None = None) -> Findings:
    """Read the runs under `folder`, join those that can be compared, and compute everything a report says of them.

    Arguments: baseline, default the experiment's own; against, the published results to set beside ours, default the experiment's.
    Raises: ConfigError where there is no finished run, an unknown baseline, unknown published results, or a file that cannot be read.
    """
    frame = results(folder)
    if frame.empty:
        raise ConfigError(f"{folder} holds no runs: train some with `posbench train` (or `make reproduce-table`), then report again")
    config = _any_config(frame)
    joined = join(frame, baseline or config.experiment.baseline)
    if baseline and joined.baseline is None:
        raise ConfigError(f"the baseline {baseline!r} has no run to compare with: it must be one of {', '.join(joined.schemes)}")
    config = Run(Path(joined.runs["path"].iloc[0])).config
    found = {(r.scheme, int(r.seed)): evaluations(Path(r.path)) for r in joined.runs.itertuples()}
    notes = [*joined.notes]
    measurements = _measure(found, joined, config.train.context_length, notes)
    pairs = compare_all(_matrix(joined), joined.schemes) if len(joined.schemes) > 1 else []
    ranking = chain(pairs) if pairs else Chain(joined.schemes, [], [], len(joined.seeds))
    published = against or config.experiment.published
    position = _position(found, notes)
    return Findings(
        experiment=", ".join(sorted(set(joined.runs["experiment"]))),
        config=config,
        frame=frame,
        joined=joined,
        measurements=measurements,
        pairs=pairs,
        chain=ranking,
        position=position,
        retrieval=_retrieval(found, notes),
        curves=_curves(joined),
        early=_early_tokens(measurements, position, config.train.context_length),
        vocab_size=Run(Path(joined.runs["path"].iloc[0])).manifest.get("vocab_size"),
        measured=_measured(joined),
        against=set_against(load_published(published), measurements, pairs, config) if published else [],
        notes=notes,
    )


def _any_config(frame: pd.DataFrame) -> Config:
    """The configuration of the first run that has one, for the experiment's own words."""
    for path in frame["path"]:
        try:
            return Run(Path(path)).config
        except ConfigError as error:
            failure = error
    raise failure


def _matrix(joined: Joined) -> Floats:
    """Validation losses [seeds, schemes], nats/token, in the order of `joined.seeds` and `joined.schemes`."""
    table = joined.runs.pivot(index="seed", columns="scheme", values="loss")
    return np.asarray(table.loc[joined.seeds, joined.schemes], dtype=np.float64)


def _measure(found: dict[Key, list[Evaluation]], joined: Joined, training_length: int, notes: list[str]) -> list[Measurement]:
    made: list[Measurement] = []
    for protocol in LOSS_PROTOCOLS:
        for length in sorted({e.length for es in found.values() for e in es if e.protocol == protocol}):
            if protocol == VALIDATION and length != training_length:
                continue
            same = _same_task(found, protocol, length, notes)
            made += _measure_place(same, joined, notes)
    return made


def _same_task(found: dict[Key, list[Evaluation]], protocol: str, length: int, notes: list[str]) -> dict[Key, Evaluation]:
    """The evaluations by one protocol at one length that scored the same windows: the most frequent kind. Others are noted."""
    there = {key: e for key, es in found.items() for e in es if (e.protocol, e.length) == (protocol, length)}
    task, count = Counter(e.task for e in there.values()).most_common(1)[0]
    same = {key: e for key, e in there.items() if e.task == task}
    if count < len(there):
        others = ", ".join(f"{scheme} seed {seed}" for scheme, seed in there if (scheme, seed) not in same)
        notes.append(f"{protocol} at {length}: left out {others}, which scored other windows than the rest; run `posbench eval --again` on them.")
    return same


def _measure_place(there: dict[Key, Evaluation], joined: Joined, notes: list[str]) -> list[Measurement]:
    """Every scheme by one protocol at one length. Seeds are those that all schemes evaluated here share."""
    has: dict[str, set[int]] = {}
    for scheme, seed in there:
        has.setdefault(scheme, set()).add(seed)
    schemes, seeds = common_seeds(has, joined.baseline or "")
    first = there[schemes[0], seeds[0]]
    where = f"{first.protocol} at {first.length}"
    if set(schemes) != set(has) or any(set(seeds) != s for s in has.values()):
        notes.append(f"{where}: only seeds {', '.join(map(str, seeds))} of {', '.join(schemes)} are compared; the others lack this evaluation.")
    losses = {s: np.array([there[s, seed].loss for seed in seeds]) for s in schemes}
    documents = sorted(first.windows["document"].unique())
    targets = first.windows.groupby("document")["targets"].sum().loc[documents].to_numpy(dtype=np.float64)
    nll = {s: np.mean([_by_document(there[s, seed], documents) for seed in seeds], axis=0) for s in schemes}
    base = joined.baseline if joined.baseline in schemes else None
    stacked = np.stack([*nll.values(), *(nll[s] - nll[base] for s in schemes if base)])
    error = document_error(stacked, targets)
    nothing = Interval(math.nan, math.nan, math.nan)
    return [
        Measurement(
            scheme=s,
            protocol=first.protocol,
            split=str(first.header.get("split", "unknown")),
            length=first.length,
            seeds=tuple(seeds),
            losses=tuple(losses[s].tolist()),
            loss=t_interval(losses[s]),
            gap=t_interval(losses[s] - losses[base]) if base else nothing,
            loss_documents=float(error[n]),
            gap_documents=float(error[len(schemes) + n]) if base else math.nan,
            bits_per_byte=float(np.mean([there[s, seed].bits_per_byte for seed in seeds])),
            targets=int(targets.sum()),
            windows=len(first.windows),
            documents=len(documents),
        )
        for n, s in enumerate(schemes)
    ]


def _by_document(evaluation: Evaluation, documents: list[int]) -> Floats:
    """Summed nll of each document, nats."""
    return np.asarray(evaluation.windows.groupby("document")["nll"].sum().loc[documents], dtype=np.float64)


def _position(found: dict[Key, list[Evaluation]], notes: list[str]) -> pd.DataFrame:
    """Loss by position in the window: token-weighted in each run, then the mean over a scheme's runs."""
    return _probe(found, POSITION, ["bucket_start", "bucket_end"], lambda sums: sums["nll"] / sums["targets"], "loss", notes)


def _retrieval(found: dict[Key, list[Evaluation]], notes: list[str]) -> pd.DataFrame:
    """By how much the second copy of a passage is easier than the first, nats/token, against the gap in tokens."""
    return _probe(found, RETRIEVAL, ["gap"], lambda sums: (sums["first_nll"] - sums["second_nll"]) / sums["targets"], "drop", notes)


def _probe(found, protocol, by, score, name, notes):  # type: ignore[no-untyped-def]
    import pandas as pd

    rows = []
    for length in sorted({e.length for es in found.values() for e in es if e.protocol == protocol}):
        values: dict[tuple, list[float]] = {}
        for (scheme, _), e in sorted(_same_task(found, protocol, length, notes).items()):
            for key, value in score(e.windows.groupby(by).sum(numeric_only=True)).items():
                values.setdefault((scheme, *(key if isinstance(key, tuple) else (key,))), []).append(float(value))
        for (scheme, *keys), each in values.items():
            interval = t_interval(np.array(each))
            rows.append({"scheme": scheme, "length": length, **dict(zip(by, keys, strict=True)), name: interval.mean, "low": interval.low, "high": interval.high, "seeds": len(each)})  # fmt: skip
    return pd.DataFrame(rows, columns=["scheme", "length", *by, name, "low", "high", "seeds"])


def _early_tokens(measurements: list[Measurement], position: pd.DataFrame, training_length: int) -> pd.DataFrame:
    """How much of the gain of longer non-overlapping windows is only that fewer tokens stand near a window's start.

    With T the training length, `gain` is the loss at T less that at a longer length L. If no token gained from more than T
    tokens of context, the tokens behind T would each have the loss at the end of a T-token window, l_end, and the gain
    would be `early` = (1 - T / L) (loss_T - l_end). The last bucket below T stands for l_end; it is a little above it, so `early` is
    a lower bound.
    """
    import pandas as pd

    losses = {(m.scheme, m.length): m.loss.mean for m in measurements if m.protocol == "nonoverlapping"}
    rows = []
    inside = position[(position["bucket_end"] <= training_length) & (position["length"] >= training_length)]
    for scheme, part in inside.groupby("scheme"):
        end = part.sort_values(["bucket_end", "length"])["loss"].iloc[-1]
        at_training = losses.get((str(scheme), training_length))
        longer = sorted(n for s, n in losses if s == scheme and n > training_length)
        for length in longer if at_training is not None else []:
            early = (1 - training_length / length) * (at_training - end)
            rows.append({"scheme": scheme, "length": length, "gain": at_training - losses[str(scheme), length], "early": early})
    return pd.DataFrame(rows, columns=["scheme", "length", "gain", "early"])


def _curves(joined: Joined) -> pd.DataFrame:
    """Validation losses while training, each of the same first tokens of the split (the last, of the whole split, is not among them)."""
    import pandas as pd

    frames = []
    for row in joined.runs.itertuples():
        metrics = Run(Path(row.path)).metrics
        if not metrics.empty and "kind" in metrics:
            kept = metrics[metrics["kind"] == "validation"].drop_duplicates("tokens", keep="first")
            frames.append(kept[["tokens", "loss"]].assign(scheme=row.scheme, seed=row.seed))
    columns = ["scheme", "seed", "tokens", "loss"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)


def _measured(joined: Joined) -> dict[str, str]:
    """What each scheme is, as measured on a small float64 decoder with random weights, not as it promises."""
    from posbench.reporting.relativity import measure_relativity

    first = joined.runs.drop_duplicates("scheme")
    return {row.scheme: measure_relativity(Run(Path(row.path)).config.scheme) for row in first.itertuples()}


__all__ = ["LENGTH_PROTOCOLS", "Findings", "Measurement", "find"]
