"""Count how often the tests and intervals of a report are right, by trials with a known truth: minutes of one core.

    python -m benchmarks.calibration [--trials 1000] [--seed N]

The tests by themselves: the losses of eleven schemes over seeds are a level per scheme plus noise; effects of a seed on
all schemes cancel in every difference. Tests are as in a report: paired t with Holm's correction over all pairs, unless
a sign test contradicts it.

- false difference: all schemes are equal, or three are equal and the others far apart; any equal pair is called
  different.
- false equivalence: one scheme is exactly the margin away from the others; any other scheme is called equal to it.
- power: four clusters, 6 sd apart; the share of pairs from different clusters that are called different.
- intervals over seeds, and over documents: how often they contain the truth. Documents are drawn from the 180 of the
  test split of `data=stdlib`, with their gaps to qk_rope for three trained schemes (documents.csv).

The whole procedure with its choice of learning rates, for the designs of DESIGNS: six schemes, five rates. The packs of
`headline` (five seeds at one rate) and of its old pilots (one seed at each rate) give three things: the mean loss of a
scheme at its best rate, what the other rates cost, and the noise of its runs around the mean of their seed.

- a study (`posbench study`): the share of studies of equal schemes that call the first one better than a baseline, in
  the worst of the nine tables below.
- pairs decided, of 15: the true losses are the means in the packs. In brackets: with twice the noise off the best rate.
- false claims: tables in which six schemes are equal at their best rates; any claim is false. Nine null tables: three
  costs of other rates (none, 0.035 nats for each factor of two, the packs') times three kinds of noise (the packs',
  twice as much off the best rate, three times as much for one scheme). Seeds that split in two: a run ends 0.3 nats
  worse with probability 0.1, 0.3 or 0.5, half as large again off the best rate, or 1 there ("only at one rate").

The worst table is reported, without and with a sign test over seeds, which contradicts a claim if its p is above SIGNS.

A loop (`posbench judge --family`) that tries CANDIDATES schemes against one baseline, for the rules of RULES:

- false claims: no candidate differs from the baseline; any "better" or "worse" in a loop is false. Noise of runs as in
  the packs, normal, Student's t, three times as much for one candidate, or seeds that split in two as above.
- found: the share of candidates called better, if they are better by 1, 2 or 4 standard deviations of the paired
  differences.

A loop that breeds: each new candidate is a variant of the best so far, and its noise on the same seeds correlates with
its parent's. All are as good as the baseline. Then its best winner, if it has one, is tested on eight fresh seeds.

Setups (`posbench judge --setups`): sixteen setups of seven factors, eight of them with a second seed. The gap of a
setup is a mean of 0 plus effects (standard deviation 0.05 nats) plus noise: equal in all setups, or with a standard
deviation from 0.02 to 0.14 by setup, or in which 30 % of runs also begin late and lose 0.3 nats.

- interval of the mean, and of the effects: how often they contain the truth.
- false verdicts: the share of trials that are called better or worse. Without effects.

And the rules that drop a candidate at two seeds, counted in the packs: every pair of schemes, every two seeds. Better
and worse are by the mean over all seeds.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr
from scipy.stats import binom

import posbench
from posbench.analysis.options import MARGIN
from posbench.analysis.search import FIRST_SEEDS
from posbench.analysis.setups import SetupGaps
from posbench.analysis.statistics import LEVEL, beats, document_error, equals, holm, interval
from posbench.analysis.table import curves
from posbench.analysis.verdict import LOOKS
from posbench.composition.setups import design as design_of_setups
from posbench.config.units import count_of

Floats = NDArray[np.float64]
SCHEMES, SEEDS, CANDIDATES = 11, (3, 5, 8), 20
LEFT, RIGHT = np.triu_indices(SCHEMES, 1)
CLUSTERS = np.repeat([0.0, 6.0, 12.0, 18.0], 3)[:SCHEMES]
REFERENCE, LATE = Path("runs/reference"), 0.3  # nats that a run loses if it has not caught on yet
SIGNS = 0.5  # p of the sign test above which too few seeds agree: all of 3 or 4, four of 5 and six of 8 are needed
LEFT6, RIGHT6 = np.triu_indices(6, 1)
EQUAL, THREE_EQUAL = np.zeros(SCHEMES), 1000.0 * np.maximum(0, np.arange(SCHEMES) - 2)


def failing(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw noise in which one scheme fails with one seed of ten and is then 20 sd worse. Tests need not hold here."""
    values = random.normal(size=shape)
    values[..., 0] += 20 * ((random.random(shape[:-1]) < 0.1) - 0.1)
    return values


NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Floats]] = {
    "all alike": lambda random, shape: random.normal(size=shape),
    "one scheme x3": lambda random, shape: random.normal(size=shape) * np.where(np.arange(shape[-1]) == 0, 3, 1),
    "Student's t, 3 degrees": lambda random, shape: random.standard_t(3, size=shape),
    "one fails with 1 seed of 10": failing,
}


def called_different(differences: Floats) -> NDArray[np.bool_]:
    """Return which pairs [trials, pairs] are called different at these rates: differences [trials, seeds, pairs]."""
    over_seeds = np.moveaxis(differences, 1, -1)
    p = np.minimum(beats(0 * over_seeds, [over_seeds]), beats(over_seeds, [0 * over_seeds]))
    return np.array([holm(row) <= LEVEL for row in p])


def called_equal(differences: Floats, margin: float) -> NDArray[np.bool_]:
    """Return which pairs [trials, pairs] a report calls equal, from differences [trials, seeds, pairs]."""
    return np.array([holm(np.array([equals([pair], margin) for pair in trial.T])) <= LEVEL for trial in differences])


def tests(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """Yield (what was counted, noise, number of seeds, rate) for the tests by themselves."""
    for name, noise in NOISES.items():
        for seeds in SEEDS:
            shape = (trials, seeds, SCHEMES)

            def differences(levels: Floats) -> Floats:
                losses = noise(random, shape) + levels  # noqa: B023
                return losses[..., RIGHT] - losses[..., LEFT]

            alike = [
                called_different(differences(levels))[:, levels[LEFT] == levels[RIGHT]].any(1).mean()
                for levels in (EQUAL, THREE_EQUAL)
            ]
            yield "false difference", name, seeds, float(max(alike))
            margins = [np.where(np.arange(SCHEMES) == 0, margin, 0.0) for margin in (0.9, 3.0)]
            wrong = [called_equal(differences(m), m[0])[:, LEFT == 0].any(1).mean() for m in margins]
            yield "false equivalence", name, seeds, float(max(wrong))
            decided = called_different(differences(CLUSTERS))[:, CLUSTERS[LEFT] != CLUSTERS[RIGHT]]
            yield "power", name, seeds, float(decided.mean())
            gaps = noise(random, (trials, seeds, 2))
            ends = [interval(losses[:, 0] - losses[:, 1]) for losses in gaps]
            yield "interval over seeds", name, seeds, float(np.mean([low <= 0 <= high for _, low, high in ends]))


@dataclass(frozen=True)
class Design:
    """A design of the search and its test: how many seeds each learning rate gets, and the rule that decides a pair."""

    name: str
    searched: int  # seeds at each of the five rates
    narrowed: int  # seeds at the two best rates, after the first `searched`
    seeds: int  # seeds that the test reads
    is_new: bool  # True: the union test on the searched seeds; False: fresh seeds at the best rate, with an allowance

    @property
    def runs(self) -> int:
        """Return the number of runs of six schemes."""
        searched = 5 * self.searched + 2 * max(0, self.narrowed - self.searched)
        return 6 * (searched + (0 if self.is_new else self.seeds))


DESIGNS = (
    Design("5 rates x 1 pilot, 5 seeds, allowance", 1, 1, 5, False),
    Design("5 rates x 2 pilots, best 2 to 4, 5 seeds, allowance", 2, 4, 5, False),
    Design("5 rates x 2 seeds, best 2 to 5, union test", 2, 5, 5, True),
    Design("5 rates x 2 seeds, best 2 to 8, union test", 2, 8, 8, True),
)
MINUTES = 8.0  # core-minutes of a run of the headline


@dataclass(frozen=True)
class World:
    """The truth of a simulated table: losses [schemes, rates], and the noise of a run at each of them."""

    levels: Floats  # [schemes, rates], nats
    spread: Floats  # [schemes, rates], nats: standard deviation of the noise
    late: Floats  # [schemes, rates]: probability that a run ends LATE nats worse

    def draw(self, random: np.random.Generator, trials: int, seeds: int, pool: Floats) -> Floats:
        """Return losses of runs [trials, schemes, rates, seeds]; noise is a residual of the packs' runs."""
        shape = (trials, *self.levels.shape, seeds)
        noise = random.choice(pool, shape) * self.spread[..., None] + LATE * (
            random.random(shape) < self.late[..., None]
        )
        return self.levels[..., None] + noise


def packs() -> tuple[Floats, Floats, Floats]:
    """Return the headline's levels [schemes, rates], each scheme's spread [schemes, 1], and residuals with sd 1."""
    losses = posbench.results(REFERENCE / "headline.zip").pivot(index="seed", columns="scheme", values="loss")
    pilots = pd.concat(posbench.results(path) for path in sorted(REFERENCE.glob("headline-tune/lr=*.zip")))
    at_rates = pilots.drop_duplicates(["scheme", "train.lr"]).pivot(index="scheme", columns="train.lr", values="loss")
    at_rates = at_rates.loc[losses.columns].dropna(axis=1)
    residual = losses.sub(losses.mean(axis=1), axis=0)
    residual = (residual - residual.mean()).to_numpy() * (5 * 6 / 4 / 5) ** 0.5
    spread = residual.std(0)
    costs = at_rates.sub(at_rates.min(axis=1), axis=0).to_numpy()
    return losses.mean().to_numpy()[:, None] + costs, spread[:, None], (residual / spread).ravel()


def worlds(levels: Floats, spread: Floats) -> dict[str, list[World]]:
    """Return the simulated worlds by what is counted in them: decided pairs, or false claims."""
    costs, never = levels - levels.min(1, keepdims=True), np.zeros_like(levels)
    steps = np.abs(np.arange(5) - costs.argmin(1)[:, None])
    alike, off_best = spread * np.ones(5), 1.0 + (costs > 0)
    noises = [alike, alike * off_best, alike * np.where(np.arange(6) == 0, 3, 1)[:, None]]
    curves = [never, 0.035 * steps, costs]
    return {
        "decided": [World(levels, alike, never), World(levels, alike * off_best, never)],
        "false": [World(curve, noise, never) for curve in curves for noise in noises],
        **{
            f"false, {share:.0%} late": [World(curve, alike, share * np.where(costs > 0, 1.5, 1.0)) for curve in curves]
            for share in (0.1, 0.3, 0.5)
        },
        **{
            f"false, {share:.0%} late, all off the best rate": [
                World(curve, alike, np.where(costs > 0, 1.0, share)) for curve in curves[:2]
            ]
            for share in (0.1, 0.3)
        },
    }


def decided(design: Design, world: World, trials: int, random: np.random.Generator, pool: Floats) -> Floats:
    """Return which claims `a beats b` are made, [2, trials, schemes, schemes]: without, and with the sign test."""
    most = max(design.narrowed, design.seeds if design.is_new else 0)
    runs = world.draw(random, trials, most, pool)
    kept = runs[..., : design.searched].mean(-1).argsort(-1)[..., :2]  # [trials, schemes, 2]
    runs = np.take_along_axis(runs, kept[..., None], 2)
    order = runs[..., : design.narrowed].mean(-1).argsort(-1)
    if design.is_new:
        runs = np.take_along_axis(runs, order[..., None], 2)[..., : design.seeds]
    else:
        best = np.take_along_axis(kept, order, 2)[..., :1]
        runs = np.take_along_axis(world.draw(random, trials, design.seeds, pool), best[..., None], 2)
    claims = np.zeros((2, trials, 6, 6), bool)
    at_best = runs[:, :, 0]
    differences = [runs[:, RIGHT6, rate] - at_best[:, LEFT6] for rate in range(runs.shape[2])]
    reverse = [runs[:, LEFT6, rate] - at_best[:, RIGHT6] for rate in range(runs.shape[2])]
    sd = differences[0].std(-1, ddof=1)
    allowed = np.zeros(trials) if design.is_new else 2 * np.median(sd, 1) / math.sqrt(design.narrowed)
    zero = np.zeros(1) + allowed[:, None, None]
    p = np.minimum(beats(zero, differences), beats(zero, reverse))
    is_decided = np.array([holm(row) <= LEVEL for row in p])
    agree = np.min([_agrees(d) for d in differences], 0), np.min([_agrees(d) for d in reverse], 0)
    forward = differences[0].mean(-1) > 0
    for signs in (False, True):
        for is_left, left, right, consistent in (
            (forward, LEFT6, RIGHT6, agree[0]),
            (~forward, RIGHT6, LEFT6, agree[1]),
        ):
            claims[int(signs)][:, left, right] = is_decided & is_left & (consistent | (not signs))
    return claims


def _agrees(differences: Floats) -> NDArray[np.bool_]:
    """Return whether the sign test over seeds, the last axis, has a p-value of at most SIGNS."""
    more = (differences > 0).sum(-1)
    return 2 * binom.sf(np.maximum(more, differences.shape[-1] - more) - 1, differences.shape[-1], 0.5) <= SIGNS


def procedure(trials: int, random: np.random.Generator) -> Iterator[list[str]]:
    """Yield the rows of a table of designs: their costs, decided pairs, and the % of tables with a false claim."""
    levels, spread, pool = packs()
    counted = worlds(levels, spread)
    yield ["design, six schemes", "runs", "core-hours", *(f"{name}: without / with sign test" for name in counted)]
    for design in DESIGNS:
        row = [design.name, str(design.runs), f"{design.runs * MINUTES / 60:.1f}"]
        for name, tables in counted.items():
            claims = [decided(design, world, trials, random, pool) for world in tables]  # [2, trials, 6, 6] each
            if name == "decided":
                pairs = np.array([made.sum((2, 3)).mean(1) for made in claims]).T
                row.append(" / ".join(f"{usual:.1f} ({wild:.1f})" for usual, wild in pairs))
            else:
                worst = np.max([made.any((2, 3)).mean(1) for made in claims], axis=0)
                row.append(" / ".join(f"{100 * wrong:.1f}" for wrong in worst))
        yield row


def studies(trials: int, random: np.random.Generator) -> Iterator[list[str]]:
    """Yield the rows of a table of seeds: the % of studies of equal schemes that call theirs better, by baselines."""
    levels, spread, pool = packs()
    tables = worlds(levels, spread)
    counts = (1, 2, 5)
    kinds = {"": tables["false"], ", 30% late": tables["false, 30% late"]}
    yield ["seeds", *(f"{count_of(count, 'baseline')}{kind}" for kind in kinds for count in counts)]
    for seeds in SEEDS:
        row = [str(seeds)]
        for kind in kinds.values():
            rates = [better_of_equals(world, seeds, trials, random, pool, counts) for world in kind]
            row += [f"{100 * rate:.1f}" for rate in np.max(rates, axis=0)]
        yield row


def better_of_equals(
    world: World, seeds: int, trials: int, random: np.random.Generator, pool: Floats, counts: Sequence[int]
) -> list[float]:
    """Return the share of trials in which the first scheme is called better than any of so many others."""
    runs = world.draw(random, trials, seeds, pool)
    kept = runs[..., :FIRST_SEEDS].mean(-1).argsort(-1)[..., :2]
    runs = np.take_along_axis(runs, kept[..., None], 2)
    runs = np.take_along_axis(runs, runs.mean(-1).argsort(-1)[..., None], 2)  # [trials, schemes, 2, seeds], best first
    rates = []
    for count in counts:
        own, others = runs[:, :1], runs[:, 1 : 1 + count]
        p_better = beats(own[:, :, 0], [others[:, :, 0], others[:, :, 1]])
        p_worse = beats(others[:, :, 0], [own[:, :, 0], own[:, :, 1]])
        is_decided = np.array([holm(row) <= LEVEL for row in np.minimum(p_better, p_worse)])
        is_ahead = own[:, :, 0].mean(-1) < others[:, :, 0].mean(-1)
        rates.append(float((is_decided & is_ahead).any(1).mean()))
    return rates


@dataclass(frozen=True)
class Rule:
    """A rule by which a loop tests a candidate: at which numbers of seeds, and for how many tests it corrects."""

    name: str
    looks: tuple[int, ...]
    size: int  # p-values are multiplied by it
    drops: bool  # whether candidates that are worse by more than MARGIN with both first seeds are dropped


RULES = (
    Rule("a test at each number of seeds from 3 to 8", (3, 4, 5, 6, 7, 8), 1, False),
    Rule("tests at 5 and 8 seeds, --family 1", LOOKS, len(LOOKS), True),
    Rule(f"tests at 5 and 8 seeds, --family {CANDIDATES}", LOOKS, len(LOOKS) * CANDIDATES, True),
)


def closer_than_margin(gaps: Floats) -> Floats:
    """Return the p-value of the claim that the mean over the last axis is closer to 0 than the margin."""
    seeds = gaps.shape[-1]
    room = MARGIN - np.abs(gaps.mean(-1))
    # Draws of a pool of losses may give the same gap with every seed.
    with np.errstate(divide="ignore"):
        return stdtr(seeds - 1, -room / (gaps.std(-1, ddof=1) / math.sqrt(seeds)))


def looked_at(gaps: Floats, rule: Rule) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Floats]:
    """Return which candidates are called better, which worse, and the seeds trained, [trials, candidates] each.

    Arguments: gaps [trials, candidates, seeds], each candidate's losses minus the baseline's, in nats.
    """
    first = (gaps[..., :FIRST_SEEDS] > MARGIN).all(-1) & rule.drops
    is_open, seeds = ~first, np.full(first.shape, float(FIRST_SEEDS))
    better, worse = np.zeros_like(first), np.zeros_like(first)
    for look in rule.looks:
        seeds[is_open] = look
        seen, zero = gaps[..., :look], np.zeros(look)
        # A candidate that is better by less than the margin is decided, and no winner.
        is_small = closer_than_margin(seen) * rule.size <= LEVEL
        is_decided = np.zeros_like(first)
        for claimed, p in ((better, beats(zero + seen, [zero])), (worse, beats(zero, [seen]))):
            is_claimed = is_open & (p * rule.size <= LEVEL)
            is_decided |= is_claimed
            claimed |= is_claimed & ~is_small
        is_open = is_open & ~is_decided
    return better, worse, seeds


def loops(trials: int, random: np.random.Generator) -> Iterator[list[str]]:
    """Yield the rows of a table of rules: % of loops with a false claim by noise, seeds trained, % found by size."""
    _, spread, pool = packs()
    scale = float(np.median(spread))
    noises: dict[str, Callable[[tuple[int, ...]], Floats]] = {
        "the packs'": lambda shape: scale * random.choice(pool, shape),
        "normal": lambda shape: scale * random.normal(size=shape),
        "t, 3 degrees": lambda shape: scale * random.standard_t(3, size=shape),
        "one x3": lambda shape: scale * random.normal(size=shape) * np.where(np.arange(shape[1]) == 1, 3, 1)[:, None],
        **{
            f"{share:.0%} late": lambda shape, share=share: (  # type: ignore[misc]
                scale * random.choice(pool, shape) + LATE * (random.random(shape) < share)
            )
            for share in (0.1, 0.3, 0.5)
        },
    }
    sizes = (1, 2, 4)
    yield [f"rule, {CANDIDATES} candidates", *noises, "better only, the packs'", "seeds", *(f"{n} sd" for n in sizes)]
    drawn = {name: noise((trials, CANDIDATES + 1, max(LOOKS))) for name, noise in noises.items()}
    gaps = {name: losses[:, 1:] - losses[:, :1] for name, losses in drawn.items()}
    for rule in RULES:
        claims = {name: looked_at(of_noise, rule) for name, of_noise in gaps.items()}
        false = [(better | worse).any(1).mean() for better, worse, _ in claims.values()]
        better, _, seeds = claims["the packs'"]
        usual = gaps["the packs'"]
        shares = [looked_at(usual - size * usual.std(), rule)[0].mean() for size in sizes]
        yield [
            rule.name,
            *(f"{100 * share:.1f}" for share in (*false, better.any(1).mean())),
            f"{seeds.sum(1).mean():.0f}",
            *(f"{100 * share:.0f}" for share in shares),
        ]


def bred(trials: int, random: np.random.Generator) -> Iterator[list[str]]:
    """Yield the rows of a table of loops that breed: % with a false "better", and % whose winner is confirmed too."""
    _, spread, pool = packs()
    shape, scale = (trials, max(LOOKS)), float(np.median(spread))
    # Fresh seeds know nothing of the search, so of equal schemes a confirmation lets the same share pass, whatever was
    # bred. It is small, so it is counted in more draws than there are loops.
    many = (50 * trials, max(LOOKS))
    unseen = scale * (random.choice(pool, many) - random.choice(pool, many))
    passing = (beats(unseen, [np.zeros(max(LOOKS))]) <= LEVEL).mean()
    yield ["bred candidates, --family", "correlation with the parent", "% called better", "% confirmed"]
    for candidates in (CANDIDATES, 10 * CANDIDATES):
        for correlation in (0.5, 0.8, 0.95):
            baseline, parent = scale * random.choice(pool, shape), scale * random.choice(pool, shape)
            gaps = np.empty((trials, candidates, max(LOOKS)))
            for n in range(candidates):
                fresh = scale * random.choice(pool, shape)
                child = correlation * parent + math.sqrt(1 - correlation**2) * fresh
                gaps[:, n] = child - baseline
                is_better = child.mean(1) < parent.mean(1)
                parent = np.where(is_better[:, None], child, parent)
            rule = Rule("bred", LOOKS, len(LOOKS) * candidates, True)
            has_winner = looked_at(gaps, rule)[0].any(1).mean()
            shares = [f"{100 * share:.1f}" for share in (has_winner, passing * has_winner)]
            yield [str(candidates), f"{correlation:g}", *shares]


def drops() -> Iterator[list[str]]:
    """Yield the rows of a table of rules that drop at two seeds: % of pairs dropped, by how they end with all seeds."""
    gaps = []  # at a quarter of the tokens and at the end, of two seeds; with all seeds
    for name in ("headline", "demo_cpu", "ladder_s", "ladder_m"):
        runs = posbench.results(REFERENCE / name)
        logged = curves(runs["path"], "validation", ["loss"]).merge(runs[["path", "scheme", "seed"]], on="path")
        quarter = {
            key: np.interp(run["tokens"].max() / 4, run["tokens"], run["loss"])
            for key, run in logged.groupby(["scheme", "seed"])
        }
        early, final = pd.Series(quarter).unstack(0), runs.pivot(index="seed", columns="scheme", values="loss")
        for a, b in permutations(final, 2):
            at_quarter, at_end = early[a] - early[b], final[a] - final[b]
            for pair in combinations(final.index, 2):
                of_pair = at_end.loc[list(pair)]
                gaps.append((at_quarter.loc[list(pair)].mean(), of_pair.mean(), of_pair.min(), at_end.mean()))
    early_mean, mean, least, true = np.array(gaps).T
    rules = {f"mean above {gap} at a quarter of the tokens": early_mean > gap for gap in (0.1, 0.2)}
    rules |= {"mean above 0.2 at the end": mean > 0.2, f"both seeds above {MARGIN} at the end": least > MARGIN}
    ends = {"better by 0.05 or more": true <= -0.05, "better by less": (true < 0) & (true > -0.05)}
    ends |= {"worse by less than 0.05": (true > 0) & (true < 0.05), "worse by more": true >= 0.05}
    yield ["dropped at two seeds, %", *(f"{name} ({chosen.sum()})" for name, chosen in ends.items())]
    for name, dropped in rules.items():
        yield [name, *(f"{100 * dropped[chosen].mean():.1f}" for chosen in ends.values())]


def over_setups(trials: int, random: np.random.Generator) -> Iterator[list[str]]:
    """Yield noise, coverage of the intervals of the mean and of effects, and the share of false verdicts."""
    levels = design_of_setups(7)
    any_design: Any = SimpleNamespace(levels=levels, factors=dict.fromkeys("abcdefg"), margin=MARGIN)
    setups = len(levels)

    def noise(kind: str) -> Floats:
        sd = 0.05 if kind == "equal" else np.repeat(random.uniform(0.02, 0.14, (setups, 1)), 2, axis=1)
        late = 0.3 * (random.random((2, setups, 2)) < 0.3) if "late" in kind else np.zeros((2, setups, 2))
        return random.normal(size=(setups, 2)) * sd + late[0] - late[1]

    def measured(gaps: Floats) -> SetupGaps:
        seeds = np.where(random.permutation(setups) < setups // 2, 2, 1)
        return SetupGaps("a", {n: gaps[n, : seeds[n]] for n in range(setups)}, any_design)

    for kind in ("equal", "0.02 to 0.14 by setup", "0.02 to 0.14, 30 % late"):
        of_mean, of_effects, wrong = [], [], []
        for _ in range(trials):
            effects = random.normal(0, 0.05, 7)
            gaps = measured(noise(kind) + (np.where(levels, 0.5, -0.5) @ effects)[:, None])
            mean, half = gaps.mean
            of_mean.append(abs(mean) <= half)
            of_effects.append((np.abs(gaps.effects["effect"] - effects) <= gaps.effects["half"]).mean())
            wrong.append(measured(noise(kind)).verdict != "open")
        shares = (np.mean(of_mean), np.mean(of_effects), np.mean(wrong))
        yield [kind, *(f"{share:.3f}" for share in shares)]


def documents(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """Yield (what was counted, gaps, number of documents, rate) for intervals over documents."""
    with (Path(__file__).parent / "documents.csv").open(encoding="utf-8") as file:
        table = np.array([list(map(float, row)) for row in list(csv.reader(file))[1:]])
    for count in (16, 60, 120):
        hits = []
        for n in range(trials):
            places = random.integers(0, len(table), count)
            targets, gaps = table[places, 0], table[:, 1 + n % 3]
            truth = float(np.average(gaps, weights=table[:, 0]))
            half = document_error((gaps[places] * targets)[None], targets)[0]
            off = abs(float(np.average(gaps[places], weights=targets)) - truth)
            hits += [off <= half] if np.isfinite(half) else []
        yield "interval over documents", "gaps of trained schemes", count, float(np.mean(hits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20261123)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    print("counted | noise | seeds or documents | % of trials\n:-- | :-- | --: | --:")
    n = options.trials
    for counted in (tests(n, random), documents(n // 3, random)):
        for quantity, noise, number, rate in counted:
            print(f"{quantity} | {noise} | {number} | {100 * rate:.1f}")
    print()
    for table in (
        procedure(n, random),
        loops(10 * n, np.random.default_rng(options.seed)),
        bred(20 * n, np.random.default_rng(options.seed)),
        drops(),
        over_setups(n, np.random.default_rng(options.seed)),
        studies(4 * n, np.random.default_rng(options.seed)),
    ):
        for row in table:
            print(" | ".join(row), flush=True)
        print()


if __name__ == "__main__":
    main()
