"""Say what the results of a model that was not trained here show: how far it reads, in a few figures with intervals.

Each scored length is compared with half of it, on the same targets. With 16 windows or more, the loss does not rise if
the upper end of the 95 % interval over documents is at most RISE nats; it rises if the lower end is above 0; otherwise
it is open. With fewer windows, it rises if the lower end is above RISE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.statistics import document_error
from posbench.evaluation.protocols import MECHANISM
from posbench.evaluation.protocols.mechanism import scores
from posbench.evaluation.protocols.order import REACH, Order
from posbench.runs import Run
from posbench.runs.results import Result

RISE = 0.02  # nats/token against half the length; less counts as no rise
ENOUGH_WINDOWS = 16
FLAT, RISES, OPEN, TOO_FEW = "does not rise", "rises", "open", "too few windows"
_SCHEMA = 1


@dataclass(frozen=True)
class Difference:
    """A mean difference of losses on the same targets, nats/token, and half its 95 % interval over documents."""

    nats: float
    half: float | None  # None: too few documents


@dataclass(frozen=True)
class Step(Difference):
    """The loss at a length minus the loss at half of it."""

    length: int
    windows: int

    @property
    def verdict(self) -> str:
        """Return FLAT, RISES, OPEN or TOO_FEW."""
        if self.half is None:
            return TOO_FEW
        if self.windows < ENOUGH_WINDOWS:
            return RISES if self.nats - self.half > RISE else TOO_FEW
        if self.nats + self.half <= RISE:
            return FLAT
        if self.nats - self.half > 0:
            return RISES
        return OPEN


@dataclass(frozen=True)
class Choice:
    """The option with the lowest loss at a length, among those that were scored there."""

    length: int
    best: str  # "" is the model as it is
    options: Sequence[str]
    difference: Difference  # see `rescaling` and `base` of the card


@dataclass(frozen=True)
class Head:
    """An attention head, and the share of its attention that makes it a head of this kind."""

    head: str  # layer.head
    share: float


@dataclass(frozen=True)
class Card:
    """The results of one model in a few figures. A field is None if it was not scored."""

    name: str
    path: str
    trained_length: int
    longest: int | None  # tokens that the model can read; None: no limit
    is_instructed: bool
    has_rotations: bool
    has_bos: bool  # whether BOS was put before each window
    steps: Sequence[Step]
    # A model with a sliding window never gets worse and never reads far, so the card also says how far back order
    # counts.
    order_back: int | None  # tokens back up to which order counts
    order_longest: int | None  # the farthest distance that was scored
    rescaling: Choice | None  # its difference is to the model as it is at `reference`
    reference: int | None  # the longest scored length within the training length
    base: Choice | None  # its difference is the best's to the model as it is, at the same length
    heads: dict[str, Head] | None
    schema: int = _SCHEMA
    is_length_known: bool = True  # False: config.json does not say `trained_length`, which is the longest asked for

    @property
    def flat_up_to(self) -> int | None:
        """Return the longest length up to which the loss does not rise at any scored length, or None."""
        longest = None
        for step in self.steps:
            if step.verdict != FLAT:
                break
            longest = step.length
        return longest

    @property
    def missing(self) -> dict[str, str]:
        """Return {what was not scored: the command that scores it}."""
        command, T = f"posbench eval {self.path}", self.trained_length
        commands = {}
        if not self.steps:
            commands["loss by length"] = f"{command} --length {T // 2},{T},{2 * T}"
        if self.order_back is None:
            commands["order"] = f"{command} --protocol order"
        reads_beyond = self.longest is None or self.longest >= 2 * T
        if self.rescaling is None and self.has_rotations and reads_beyond:
            commands["rescaling"] = f"{command} --length {T},{2 * T} --under rescale=pi,ntk,yarn"
        if self.base is None and self.has_rotations:
            commands["base"] = f"{command} --length {T} --under base=1e4,1e6"
        if self.heads is None:
            commands["heads"] = f"{command} --protocol mechanism"
        return commands

    def as_json(self) -> dict[str, Any]:
        """Return the card for scripts."""
        steps = [asdict(step) | {"verdict": step.verdict} for step in self.steps]
        return asdict(self) | {"steps": steps, "flat_up_to": self.flat_up_to, "missing": self.missing}


def card_of(run: Run) -> Card | None:
    """Return the card of a subject, or None if it has no results."""
    # Results on the run's own text; `run.results` also returns what is damaged.
    results = [result for result in run.results()[0] if result.key.data is None]
    subject = run.manifest.subject
    if not results or subject is None:
        return None
    T = run.config.train.context_length
    losses = _on_the_same_targets([result for result in results if result.protocol == "fixed"])
    as_it_is = _as_it_is(losses)
    up_to_trained = [length for length in as_it_is if length <= T]
    reference = max(up_to_trained, default=None)
    back, farthest = None, None  # None: order was not scored
    order = _nearest(results, Order.name, T)
    if order is not None:
        back, farthest = order_reach(order.windows)
    heads = None  # not scored
    mechanism = _nearest(results, MECHANISM.name, T)
    if mechanism is not None:
        heads = _heads(mechanism.windows)
    return Card(
        name=run.manifest.scheme,
        path=subject["path"],
        trained_length=T,
        is_length_known=bool(subject.get("length", T)),
        longest=subject.get("longest"),
        is_instructed=bool(subject.get("is_instructed")),
        has_rotations=bool(subject.get("rotations")),
        has_bos=any(map(_has_bos, losses.values())),
        steps=_steps(as_it_is),
        order_back=back,
        order_longest=farthest,
        rescaling=_rescaling(losses, as_it_is.get(reference or 0)),  # no result has length 0
        reference=reference,
        # The model as it is is one of the candidates; the length is within its training length if one was scored there.
        base=_choice(losses, "base", includes_unchanged=True, at_most=T),
        heads=heads,
    )


def _nearest(results: Sequence[Result], protocol: str, length: int) -> Result | None:
    """Return the protocol's result without options whose length is nearest to `length`, or None."""
    without_options = [result for result in results if result.protocol == protocol and not result.key.under]
    return min(without_options, key=lambda result: abs(result.length - length), default=None)


Losses = dict[tuple[int, tuple[str, ...]], Result]  # length and options -> result


def _on_the_same_targets(results: Sequence[Result]) -> Losses:
    """Return the results that share one anchor and agree on BOS, so that their losses are of the same targets."""
    by_targets: dict[tuple[int, bool], Losses] = {}
    for result in results:
        kind = (result.key.anchor, _has_bos(result))
        by_targets.setdefault(kind, {})[result.length, result.key.under] = result
    # Of several groups the one with the most results; between equal ones, the one with the longer anchor.
    largest = max(by_targets, key=lambda kind: (len(by_targets[kind]), kind), default=None)
    if largest is None:
        return {}
    return by_targets[largest]


def _has_bos(result: Result) -> bool:
    return bool(result.header["settings"].get("bos"))


def _as_it_is(losses: Losses) -> dict[int, Result]:
    return {length: result for (length, options), result in losses.items() if not options}


def gaps(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the loss of each model minus the first one's, at each length at which both read the same windows.

    Arguments: runs, by the name of the model. Returns: columns scheme, length, gap and half, nats/token.
    """
    results = {}
    for name, run in runs.items():
        fixed = [r for r in run.results()[0] if r.protocol == "fixed" and r.key.data is None]
        results[name] = _as_it_is(_on_the_same_targets(fixed))
    # The names of the models: the first is the one that the others are compared with.
    first, *other_names = results
    rows = []
    for name in other_names:
        for length in sorted(results[name].keys() & results[first].keys()):
            model, baseline = results[name][length], results[first][length]
            if model.windows_digest == baseline.windows_digest:  # the same text, tokenizer and number format
                gap = difference(model.windows, baseline.windows)
                half = np.nan if gap.half is None else gap.half
                rows.append((name, length, gap.nats, half))
    return pd.DataFrame(rows, columns=["scheme", "length", "gap", "half"])


def difference(first: pd.DataFrame, second: pd.DataFrame) -> Difference:
    """Return the mean loss in `first` minus that in `second`, which have the same targets, with its interval.

    Arguments: results of `fixed`, a row per window and document.
    """
    # With `targets` too, rows of different targets do not match.
    place = ["document", "start", "targets"]
    both = first.merge(second, on=place, suffixes=("", "_other"), validate="one_to_one")
    both["apart"] = both["nll"] - both["nll_other"]
    sums = both.groupby("document")[["apart", "targets"]].sum()
    mean = float(sums["apart"].sum() / sums["targets"].sum())
    half = float(document_error(sums["apart"].to_numpy()[None], sums["targets"].to_numpy())[0])
    return Difference(mean, None if np.isnan(half) else half)


def _steps(as_it_is: dict[int, Result]) -> list[Step]:
    # Arguments: as_it_is, length -> result without options, on the same targets.
    steps = []
    for length in sorted(as_it_is):
        # Only lengths of which half was scored too.
        if length % 2 == 0 and length // 2 in as_it_is:
            windows = as_it_is[length].windows
            at_half_length = as_it_is[length // 2]
            change = difference(windows, at_half_length.windows)
            num_windows = min(int(result.header["windows"]) for result in (as_it_is[length], at_half_length))
            steps.append(Step(change.nats, change.half, length, num_windows))
    return steps


def order_reach(windows: pd.DataFrame) -> tuple[int, int]:
    """Return how far back the order of tokens counts, and the farthest distance that was scored, in tokens.

    Arguments: windows, a result of `order`, a row per document and bucket of distances.
    """
    reach, counts = 0, True
    farthest = int(windows["bucket_end"].max()) - 1  # the end is not in the bucket
    for end in sorted(set(windows["bucket_end"])):
        bucket = windows[windows["bucket_end"] == end]
        sums = bucket.groupby("document")[["targets", "nll", "shuffled_nll"]].sum()
        lost = (sums["shuffled_nll"] - sums["nll"]).to_numpy()
        targets = sums["targets"].to_numpy()
        low_end = lost.sum() / targets.sum() - document_error(lost[None], targets)[0]
        # It counts only if all shorter distances are worth REACH too, at the lower end of their intervals.
        counts = counts and bool(low_end >= REACH)
        if counts:
            reach = int(end) - 1
    return reach, farthest


def _choice(losses: Losses, name: str, includes_unchanged: bool, at_most: int | None) -> Choice | None:
    """Return the best value of the option `name` at the longest scored length, of `at_most` tokens if there is one.

    Arguments: includes_unchanged, whether the model as it is may be best too, if it was scored at this length.
    """
    at_length: dict[int, dict[str, Result]] = {}  # length -> option, such as `base=1e6` -> its result
    for (length, options), result in losses.items():
        # Only results with one option; it may be for one type of layer, such as `full_attention.base=1e6`.
        if len(options) == 1 and options[0].partition("=")[0].endswith(name):
            at_length.setdefault(length, {})[options[0]] = result
    within = [length for length in at_length if at_most is None or length <= at_most]
    length = max(within or at_length, default=0)
    if not length:
        return None
    by_option, as_it_is = at_length[length], losses.get((length, ()))
    if includes_unchanged and as_it_is is not None:
        by_option = {"": as_it_is} | by_option
    best = min(by_option, key=lambda option: by_option[option].loss)
    # The difference is to the model as it is; it stays 0 if that was not scored at this length.
    change = Difference(0.0, 0.0)
    if as_it_is is not None:
        change = difference(by_option[best].windows, as_it_is.windows)
    return Choice(length, best, list(by_option), change)


def _rescaling(losses: Losses, reference: Result | None) -> Choice | None:
    """Return the best rescaling at the longest length, with its difference to the model as it is at `reference`."""
    choice = _choice(losses, "rescale", includes_unchanged=False, at_most=None)
    if choice is None or reference is None:
        return None
    change = difference(losses[choice.length, (choice.best,)].windows, reference.windows)
    return replace(choice, difference=change)


def _heads(windows: pd.DataFrame) -> dict[str, Head]:
    """Return the previous-token head and the induction head: of each kind, the head with the largest share."""
    heads = {}
    for name, by_head in scores(windows).items():
        # The card names no head for attention to the first token.
        if name != "first_token" and len(by_head):
            layer, head = by_head.index[int(by_head.to_numpy().argmax())]
            heads[name] = Head(f"{layer}.{head}", float(by_head.max()))
    return heads
