"""Everything a report says, computed once: tables, plots and pages only set it out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols import POSITION, PROTOCOLS, VALIDATION
from posbench.reporting.chains import Chain, chain
from posbench.reporting.changes import with_changes
from posbench.reporting.costs import Cost, EqualCompute, caches_of, costs, equal_compute
from posbench.reporting.families import check_family, family_of, published_links
from posbench.reporting.frame import records, results
from posbench.reporting.gathering import OWN, Key, gather
from posbench.reporting.joining import Joined, join
from posbench.reporting.measure import Measurement, measure
from posbench.reporting.ngrams import NgramLine, ngram_lines
from posbench.reporting.palette import Look, facts_of, looks, with_variants
from posbench.reporting.probes import early_tokens, probe
from posbench.reporting.published import Comparison, load_published, set_against
from posbench.reporting.rates import OwnRates, own_rates
from posbench.reporting.relativity import measure_relativity
from posbench.reporting.spikes import Gradients, gradients
from posbench.reporting.statistics import MARGIN, Floats, Pair, compare_all
from posbench.reporting.texts import OtherText, measure_texts
from posbench.reporting.variants import Variant, measure_variants
from posbench.runs import Run, run_at

ORDERS = ("loss", "name", "given")  # of rows: best first, by name, as `only` names them
if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from posbench.config import Config

_VALIDATION_ROW = "validation"  # the kind of a row of metrics.jsonl


@dataclass(frozen=True)
class Findings:
    """What the runs of one experiment say."""

    experiment: str
    config: Config  # of one joined run: what all of them share
    vocab_size: int  # of the tokenizer
    frame: pd.DataFrame  # every run, one row each
    joined: Joined
    measurements: list[Measurement]
    variants: list[Variant]  # schemes under other words, which have measurements by length
    texts: list[OtherText]  # that the runs were not trained on, with measurements of their own
    ngrams: list[NgramLine]  # beside the schemes, where they are stored
    pairs: list[Pair]
    chain: Chain
    family: str  # of pairs that were corrected together: see `families`
    links: list[tuple[str, str, str]]  # of the published chain: better, sign, worse
    runs: dict[Key, Run]  # the compared runs, by scheme and seed
    probes: dict[str, pd.DataFrame]  # protocol -> figures of groups of windows: see `probes.probe`
    early: pd.DataFrame  # scheme, length, gain, early and their doubts: see `probes.early_tokens`
    costs: dict[str, Cost]  # by scheme
    equal_compute: EqualCompute | None  # None where there is nothing to tell apart: see `costs.equal_compute`
    curves: pd.DataFrame  # scheme, seed, tokens, loss: the validation losses while training
    gradients: list[Gradients]  # of the runs that logged their largest norms
    rates: OwnRates | None  # None where no learning rate of a scheme's own was tried
    looks: dict[str, Look]  # scheme, or a variant's row -> how it is drawn
    measured: dict[str, str]  # scheme -> relative | absolute | unclear | not measured
    against: list[Comparison]
    notes: list[str]
    schemes: list[str]  # the compared ones in the order of rows, best first by default: see `in_order`

    @property
    def training_length(self) -> int:
        """Tokens of context in training."""
        return self.config.train.context_length

    @property
    def baseline(self) -> str | None:
        return self.joined.baseline

    @property
    def best(self) -> str:
        """The scheme with the lowest loss."""
        return self.chain.order[0]

    @property
    def rows(self) -> list[str]:
        """The compared schemes, each with its rows under other words below it: of tables by length."""
        return [row for s in self.schemes for row in (s, *(v.row for v in self.variants if v.scheme == s))]

    def at(self, protocol: str, length: int | None = None) -> dict[str, Measurement]:
        """The measurements of a protocol at a length (default: the training length), by scheme."""
        length = length or self.training_length
        return {m.scheme: m for m in self.measurements if (m.protocol, m.length) == (protocol, length)}

    def lengths(self, protocol: str) -> list[int]:
        return sorted({m.length for m in self.measurements if m.protocol == protocol})


def find(
    folder: str | Path,
    baseline: str | None = None,
    against: str | None = None,
    family: str = "all",
    margin: float = MARGIN,
    only: Sequence[str] = (),
    order: str = "loss",
) -> Findings:
    """Read the runs under `folder`, join those that can be compared, and compute everything a report says of them.

    Arguments: baseline, default the experiment's own; against, the published results to set beside ours, default the
    experiment's; family, the pairs that are corrected together; margin of equivalence in nats/token; only, schemes, as
    if there were no others, all by default; order of the rows: `ORDERS`.
    Raises: ConfigError where no run is finished, where the baseline, publication, family, a scheme or the order is
    unknown, or a file cannot be read.
    """
    check_order(order, only)
    check_family(family)
    if not 0 < margin < math.inf:
        raise ConfigError(f"--margin {margin} must be above 0: it is a difference in nats per token, such as {MARGIN}")
    published = load_published(against) if against else None
    frame = results(folder)
    if frame.empty:
        raise ConfigError(
            f"{folder} contains no runs: train some with `posbench train -m experiment=demo`, then report"
        )
    everything = frame
    frame = _of_schemes(frame, only)
    joined = join(frame, baseline or _any_config(frame).experiment.baseline)
    if baseline and joined.baseline is None:
        raise ConfigError(
            f"the baseline {baseline!r} has no run to compare with: choose one of {', '.join(joined.schemes)}"
        )
    runs = {(row["scheme"], row["seed"]): run_at(row["path"]) for row in records(joined.runs)}
    example = next(iter(runs.values()))
    config, notes = example.config, [*joined.notes, *_damaged(frame)]
    aside = sorted(set(everything["scheme"]) - set(frame["scheme"]))
    if aside:
        notes.append(
            f"Left out by --schemes: {', '.join(aside)}. Corrections for many comparisons count the pairs of the "
            "schemes that are shown, so the choice should have been made before the results were seen."
        )
    if published is None and config.experiment.published:
        published = load_published(config.experiment.published)
    gathered = gather(runs, notes)
    found, under = gathered[OWN]
    measurements = with_changes(measure(found, joined, config.train.context_length, notes), config.train.context_length)
    variants, read_under = measure_variants(under, found, joined, measurements, config.train.context_length, notes)
    schemes, seeds, losses = _matrix(joined, measurements)

    def test(losses: Floats, schemes: list[str]) -> list[Pair]:
        return compare_all(losses, schemes, family_of(family, schemes, joined.baseline, published), margin)

    pairs = test(losses, schemes)
    ranked = chain(pairs) if pairs else Chain(schemes, [], [], seeds)
    configs = {scheme: run.config.scheme for (scheme, seed), run in runs.items() if seed == joined.seeds[0]}
    curves = _curves(runs, notes)
    probed = [protocol for protocol in PROTOCOLS.values() if protocol.groups]
    frames = {protocol.name: probe(found, protocol, joined.baseline, notes) for protocol in probed}
    return Findings(
        experiment=", ".join(sorted(set(joined.runs["experiment"]))),
        config=config,
        vocab_size=example.manifest.vocab_size,
        frame=frame,
        joined=joined,
        runs=runs,
        measurements=[*measurements, *read_under],
        variants=variants,
        texts=measure_texts(gathered, joined, config.train.context_length, notes),
        ngrams=ngram_lines(measurements, runs, joined.baseline, config, notes),
        pairs=pairs,
        chain=ranked,
        family=family,
        links=published_links(published, schemes) if published else [],
        probes=frames,
        early=early_tokens(measurements, frames[POSITION.name], found, config.train.context_length),
        costs=costs(joined, caches_of(runs)),
        equal_compute=equal_compute(joined, curves),
        curves=curves,
        gradients=gradients(runs),
        rates=own_rates(Path(folder), joined, config, test, notes),
        looks=with_variants(
            looks({scheme: facts_of(config) for scheme, config in configs.items()}),
            {variant.row: (variant.scheme, variant.under) for variant in variants},
        ),
        measured={scheme: measure_relativity(config) for scheme, config in configs.items()},
        against=set_against(published, measurements, pairs, config) if published else [],
        notes=notes,
        schemes=in_order(ranked.order, order, only),
    )


def check_order(order: str, only: Sequence[str]) -> None:
    """Raises: ConfigError for an order of rows that is not known, or needs --schemes."""
    if order not in ORDERS:
        raise ConfigError(f"--order {order!r} is not known (known: {', '.join(ORDERS)})")
    if order == "given" and not only:
        raise ConfigError("--order given needs the order: --schemes nope,qk_rope,vo_rope")


def in_order(ranked: Sequence[str], order: str, given: Sequence[str]) -> list[str]:
    """The schemes, which come best first, in the order of rows that was asked for."""
    if order == "name":
        return sorted(ranked)
    return [scheme for scheme in given if scheme in ranked] if order == "given" else list(ranked)


def _of_schemes(frame: pd.DataFrame, only: Sequence[str]) -> pd.DataFrame:
    """The runs of these schemes, of all where there are none. Raises: ConfigError for a scheme without a run."""
    known = sorted(set(frame["scheme"]))
    for scheme in only:
        if scheme not in known:
            raise ConfigError(
                f"--schemes: {scheme!r} has no runs here{nearest(scheme, known)} ({', '.join(known)} have)"
            )
    return frame[frame["scheme"].isin([*only])].reset_index(drop=True) if only else frame


def _any_config(frame: pd.DataFrame) -> Config:
    """The configuration of the first run that has one, for the experiment's own words."""
    failure = ConfigError("no run has a configuration")
    for path in frame["path"]:
        try:
            return run_at(path).config
        except ConfigError as error:
            failure = error
    raise failure


def _damaged(frame: pd.DataFrame) -> list[str]:
    """A note for each file that is not a result of the run it lies in."""
    return [f"{line}." for line in dict.fromkeys(frame["damaged"].dropna().str.cat(sep="\n").splitlines())]


def _matrix(joined: Joined, measurements: list[Measurement]) -> tuple[list[str], int, Floats]:
    """The schemes, the number of seeds, and the validation losses [seeds, schemes], nats/token, that are ranked.

    They are those of the loss table, of the same windows; where no run stored its windows, those of the manifests.
    """
    stored = [m for m in measurements if m.protocol == VALIDATION.name]
    if stored:
        return [m.scheme for m in stored], len(stored[0].seeds), np.array([m.losses for m in stored]).T
    table = joined.runs.pivot(index="seed", columns="scheme", values="loss")
    return joined.schemes, len(joined.seeds), np.asarray(table.loc[joined.seeds, joined.schemes], dtype=np.float64)


def _curves(runs: dict[Key, Run], notes: list[str]) -> pd.DataFrame:
    """Validation losses while training, all of the same first tokens of the split.

    The last loss of a run is of more of the split and stands at the step of the one before it, so it is not among them.
    """
    import pandas as pd

    columns = ["scheme", "seed", "tokens", "loss"]
    frames = [pd.DataFrame(columns=columns)]
    for (scheme, seed), run in runs.items():
        try:
            points = _validations(run)
        except (ConfigError, ValueError, TypeError, OverflowError) as error:
            notes.append(
                f"The loss curve of {scheme} seed {seed} is not shown: its metrics.jsonl cannot be read ({error})."
            )
            continue
        frames.append(points.drop_duplicates("tokens", keep="first").assign(scheme=scheme, seed=seed)[columns])
    return pd.concat([f for f in frames if not f.empty] or frames, ignore_index=True)


def _validations(run: Run) -> pd.DataFrame:
    """Tokens trained on and validation loss. Raises: ConfigError or ValueError where the metrics do not hold them."""
    metrics = run.metrics
    if metrics.empty:
        return metrics.reindex(columns=["tokens", "loss"])
    if not {"kind", "tokens", "loss"} <= set(metrics):
        raise ValueError("a validation without tokens or loss")
    points = metrics.loc[metrics["kind"] == _VALIDATION_ROW, ["tokens", "loss"]].astype(float)
    if not np.isfinite(points.to_numpy()).all():
        raise ValueError("a loss or a count of tokens is not finite")
    return points
