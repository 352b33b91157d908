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

The whole procedure with its choice of learning rates: six schemes are equal at each of three rates. Half and twice the
best rate lose 0, 0.035, 0.05, 0.07 or 0.1 nats, and the worst of these cases is reported: losses about as large as the
noise of a pilot mislead most. The mean of some pilot seeds chooses each scheme's rate (0 pilots: it is known), and new
seeds are scored at it. The noise of a run is a residual of the runs in runs/reference. In two-point mixtures a run is
also LATE nats worse with some probability, which is half as large again at the rates next to the best, or is 1 there
("at one rate"). If runs of one scheme split like this, fewer than five seeds decide nothing.

- false decision: any pair is called different; also counted without the rules for pilots and splits.
- intervals over seeds for a loss, and for the gap of two schemes at one rate: how often they contain the truth.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

import posbench
from posbench.reporting.options import MARGIN
from posbench.reporting.statistics import (
    ALLOWED,
    ENOUGH_SEEDS,
    LEVEL,
    SIGNS,
    document_error,
    holm,
    interval,
    sign_test,
)

Floats = NDArray[np.float64]
SCHEMES, SEEDS = 11, (3, 5, 8)
LEFT, RIGHT = np.triu_indices(SCHEMES, 1)
CLUSTERS = np.repeat([0.0, 6.0, 12.0, 18.0], 3)[:SCHEMES]
REFERENCE, LATE = Path("runs/reference"), 0.3  # nats that a run loses if it has not caught on yet
COSTS = (0.0, 0.035, 0.05, 0.07, 0.1)  # nats lost at half and at twice the best rate
PAIRS = list(combinations(range(6), 2))
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


def p_values(differences: Floats, margin: float | None = None, allowed: Floats | float = 0.0) -> Floats:
    """Return a report's p values [trials, pairs] of differences [trials, seeds, pairs].

    They test a difference of at most `allowed`, or, with a margin, a difference of the margin or more.
    """
    seeds = differences.shape[1]
    mean, error = differences.mean(1), differences.std(1, ddof=1) / np.sqrt(seeds)
    if margin is None:
        return np.minimum(1, 2 * stdtr(seeds - 1, (allowed - np.abs(mean)) / np.maximum(error, 1e-12)))
    return np.asarray(stdtr(seeds - 1, (np.abs(mean) - margin) / error))


def called_different(differences: Floats, pilots: int = 0) -> NDArray[np.bool_]:
    """Return which pairs [trials, pairs] a report calls different, from differences [trials, seeds, pairs]."""
    agree = np.apply_along_axis(sign_test, 1, differences) <= SIGNS
    spread = np.median(differences.std(1, ddof=1), axis=1)
    spread *= ALLOWED / np.sqrt(pilots) if pilots else 0
    return np.array([holm(p) <= LEVEL for p in p_values(differences, allowed=spread[:, None])]) & agree


def tests(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """Yield (what was counted, noise, number of seeds, rate) for the tests by themselves."""
    for name, noise in NOISES.items():
        for seeds in SEEDS:
            shape = (trials, seeds, SCHEMES)

            def decided(levels: Floats, margin: float | None = None) -> Floats:
                losses = noise(random, shape) + levels  # noqa: B023
                differences = losses[..., RIGHT] - losses[..., LEFT]
                if margin is None:
                    return called_different(differences)
                return np.array([holm(p) <= LEVEL for p in p_values(differences, margin)])

            alike = [decided(levels)[:, levels[LEFT] == levels[RIGHT]].any(1).mean() for levels in (EQUAL, THREE_EQUAL)]
            yield "false difference", name, seeds, float(max(alike))
            margins = [np.where(np.arange(SCHEMES) == 0, margin, 0.0) for margin in (0.9, 3.0)]
            wrong = [decided(levels, levels[0])[:, LEFT == 0].any(1).mean() for levels in margins]
            yield "false equivalence", name, seeds, float(max(wrong))
            yield "power", name, seeds, float(decided(CLUSTERS)[:, CLUSTERS[LEFT] != CLUSTERS[RIGHT]].mean())
            gaps = noise(random, (trials, seeds, 2))
            ends = [interval(losses[:, 0] - losses[:, 1]) for losses in gaps]
            yield "interval over seeds", name, seeds, float(np.mean([low <= 0 <= high for _, low, high in ends]))


def residuals() -> Floats:
    """Return the losses of demo and ladder_m without the means of seeds and schemes, pooled, nats."""
    pooled = []
    for name in ("demo_cpu", "ladder_m"):
        losses = posbench.results(REFERENCE / f"{name}.zip").pivot(index="seed", columns="scheme", values="loss")
        residual = losses.sub(losses.mean(axis=1), axis=0)
        residual -= residual.mean()
        seeds, schemes = losses.shape
        pooled.append(residual.to_numpy().ravel() * (seeds * schemes / (seeds - 1) / (schemes - 1)) ** 0.5)
    return np.concatenate(pooled)


def middle(losses: Floats) -> NDArray[np.int64]:
    """Return the index that `best_rate` would choose along the last axis."""
    near = losses <= losses.min(-1, keepdims=True) + MARGIN
    count = near.cumsum(-1)
    return (near & (count == (count[..., -1:] + 1) // 2)).argmax(-1)


def procedure(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """Yield (what was counted, noise, number of seeds, rate) for the whole procedure."""
    pool = residuals()
    for share, share_off_best in ((0.0, 0.0), (0.1, 0.15), (0.3, 0.45), (0.5, 0.75), (0.1, 1.0)):
        name = f"two points, {share:.0%} late{' at one rate' * (share_off_best == 1)}" if share else "residuals of runs"
        late = np.array([share_off_best, share, share_off_best])

        def runs(shape: tuple[int, ...], rate: NDArray[np.int64]) -> tuple[Floats, NDArray[np.bool_]]:
            is_late = random.random(shape) < late[rate]  # noqa: B023
            return random.choice(pool, shape) + LATE * is_late, is_late

        def mistakes(cost: float, pilots: int, seeds: int) -> list[float]:
            """Return the share of tables with a false difference, with and without the rules for pilots and splits."""
            curve, chosen = np.array([cost, 0, cost]), np.ones((trials, 6), np.int64)
            if pilots:
                losses, _ = runs((trials, pilots, 6, 3), np.arange(3))
                chosen = middle(curve + losses.mean(1))  # [trials, schemes]
            losses, is_late = runs((trials, seeds, 6), chosen[:, None])
            losses += curve[chosen][:, None]
            differences = np.stack([losses[..., b] - losses[..., a] for a, b in PAIRS], -1)
            splits = (is_late.any(1) & ~is_late.all(1)).any(-1)
            wrong = called_different(differences, pilots).any(1) & ~(splits & (seeds < ENOUGH_SEEDS))
            return [float(wrong.mean()), float(called_different(differences).any(1).mean())]

        for seeds in SEEDS:
            for pilots in (0, 1, 3):
                worst = np.max([mistakes(cost, pilots, seeds) for cost in (COSTS if pilots else COSTS[:1])], axis=0)
                yield f"false decision, {pilots} pilots", name, seeds, worst[0]
                yield f"... with neither allowance nor need of {ENOUGH_SEEDS}", name, seeds, worst[1]
            two, _ = runs((trials, seeds, 2), np.ones(2, np.int64))
            for name_of_value, values in (("loss", two[..., 0] - share * LATE), ("gap", two[..., 0] - two[..., 1])):
                ends = [interval(losses) for losses in values]
                yield (
                    f"interval of a {name_of_value}",
                    name,
                    seeds,
                    float(np.mean([low <= 0 <= high for _, low, high in ends])),
                )


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
    for counted in (tests(n, random), documents(n // 3, random), procedure(n, random)):
        for quantity, noise, number, rate in counted:
            print(f"{quantity} | {noise} | {number} | {100 * rate:.1f}")


if __name__ == "__main__":
    main()
