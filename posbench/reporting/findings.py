"""Everything a report says, computed once: tables, plots and pages only set it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posbench.config import ConfigError
from posbench.reporting import probes
from posbench.reporting.evaluations import VALIDATION, evaluations
from posbench.reporting.frame import records, results
from posbench.reporting.joining import Joined, join
from posbench.reporting.measure import Measurement, measure
from posbench.reporting.published import Comparison, load_published, set_against
from posbench.reporting.relativity import measure_relativity
from posbench.reporting.statistics import Chain, Floats, Pair, chain, compare_all
from posbench.runs import Run, read_metrics

if TYPE_CHECKING:
    import pandas as pd

    from posbench.config import Config


@dataclass(frozen=True)
class Findings:
    """What the runs of one experiment say."""

    experiment: str
    config: Config  # of one joined run: what all of them share
    vocab_size: int  # of the tokenizer
    frame: pd.DataFrame  # every run, one row each
    joined: Joined
    measurements: list[Measurement]
    pairs: list[Pair]
    chain: Chain
    position: pd.DataFrame  # scheme, length, bucket_start, bucket_end, loss, low, high, seeds
    retrieval: pd.DataFrame  # scheme, length, gap, drop, by_order and their intervals: see `probes.retrieval`
    early: pd.DataFrame  # scheme, length, gain, early and their doubts: see `probes.early_tokens`
    curves: pd.DataFrame  # scheme, seed, tokens, loss: the validation losses while training
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

    Arguments: baseline, default the experiment's own; against, the published results to set beside ours, default the
    experiment's. Raises: ConfigError where there is no finished run, an unknown baseline or publication, or a file that
    cannot be read.
    """
    published = load_published(against) if against else None
    frame = results(folder)
    if frame.empty:
        raise ConfigError(f"{folder} holds no runs: train some with `posbench train -m experiment=demo`, then report")
    joined = join(frame, baseline or _any_config(frame).experiment.baseline)
    if baseline and joined.baseline is None:
        raise ConfigError(
            f"the baseline {baseline!r} has no run to compare with: take one of {', '.join(joined.schemes)}"
        )
    runs = records(joined.runs)
    example = Run(Path(runs[0]["path"]))
    config, notes = example.config, list(joined.notes)
    if published is None and config.experiment.published:
        published = load_published(config.experiment.published)
    found = {(run["scheme"], run["seed"]): evaluations(Path(run["path"])) for run in runs}
    measurements = measure(found, joined, config.train.context_length, notes)
    schemes, seeds, losses = _matrix(joined, measurements)
    pairs = compare_all(losses, schemes)
    position = probes.position(found, notes)
    return Findings(
        experiment=", ".join(sorted({run["experiment"] for run in runs})),
        config=config,
        vocab_size=example.manifest.vocab_size,
        frame=frame,
        joined=joined,
        measurements=measurements,
        pairs=pairs,
        chain=chain(pairs) if pairs else Chain(schemes, [], [], seeds),
        position=position,
        retrieval=probes.retrieval(found, notes),
        early=probes.early_tokens(measurements, position, config.train.context_length),
        curves=_curves(joined, notes),
        measured={run["scheme"]: _measured(Path(run["path"])) for run in runs if run["seed"] == joined.seeds[0]},
        against=set_against(published, measurements, pairs, config) if published else [],
        notes=notes,
    )


def _any_config(frame: pd.DataFrame) -> Config:
    """The configuration of the first run that has one, for the experiment's own words."""
    failure = ConfigError("no run has a configuration")
    for path in frame["path"]:
        try:
            return Run(Path(path)).config
        except ConfigError as error:
            failure = error
    raise failure


def _matrix(joined: Joined, measurements: list[Measurement]) -> tuple[list[str], int, Floats]:
    """The schemes, the number of seeds, and the validation losses [seeds, schemes], nats/token, that are ranked.

    They are those of the loss table, of the same windows; where no run stored its windows, those of the manifests.
    """
    stored = [m for m in measurements if m.protocol == VALIDATION]
    if stored:
        return [m.scheme for m in stored], len(stored[0].seeds), np.array([m.losses for m in stored]).T
    table = joined.runs.pivot(index="seed", columns="scheme", values="loss")
    return joined.schemes, len(joined.seeds), np.asarray(table.loc[joined.seeds, joined.schemes], dtype=np.float64)


def _curves(joined: Joined, notes: list[str]) -> pd.DataFrame:
    """Validation losses while training, all of the same first tokens of the split.

    The last loss of a run is of more of the split and stands at the step of the one before it, so it is not among them.
    """
    import pandas as pd

    columns = ["scheme", "seed", "tokens", "loss"]
    frames = [pd.DataFrame(columns=columns)]
    for run in records(joined.runs):
        try:
            rows = read_metrics(Path(run["path"]) / "metrics.jsonl")
            points = [(float(row["tokens"]), float(row["loss"])) for row in rows if row.get("kind") == "validation"]
            if not np.isfinite(points).all():
                raise ValueError("a loss or a count of tokens is not finite")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            where = f"{run['scheme']} seed {run['seed']}"
            why = error if isinstance(error, ValueError) else "a validation without tokens or loss"
            notes.append(f"The loss curve of {where} is not shown: its metrics.jsonl cannot be read ({why}).")
            continue
        kept = pd.DataFrame(points, columns=["tokens", "loss"]).drop_duplicates("tokens", keep="first")
        frames.append(kept.assign(scheme=run["scheme"], seed=run["seed"])[columns])
    return pd.concat([f for f in frames if not f.empty] or frames, ignore_index=True)


def _measured(path: Path) -> str:
    """Is the scheme of this run relative, measured and not promised?"""
    return measure_relativity(Run(path).config.scheme)
