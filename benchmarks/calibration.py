"""How often the tests and intervals of a report are right: trials with a known truth. A minute of one core.

    python -m benchmarks.calibration [--trials 1000] [--seed N]

Eleven schemes, whose losses over seeds are a level each plus noise; what a seed does to all schemes drops out of every
difference. Tests are those of a report: paired t with Holm's correction over all pairs.

- false difference: all schemes are equal, or three are equal and the others far apart; any equal pair told apart.
- false equivalence: one scheme lies exactly the margin away from the others; any found equal to it.
- power: four clusters 6 sd apart; the share of pairs of different clusters that is decided.
- intervals over seeds, and over documents: how often they hold the truth. Documents are drawn from the 180 of the test
  split of `data=stdlib`, with their gaps to qk_rope of three trained schemes (documents.csv).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from posbench.reporting.statistics import LEVEL, document_error, holm, interval

Floats = NDArray[np.float64]
SCHEMES, SEEDS = 11, (3, 5, 8)
LEFT, RIGHT = np.triu_indices(SCHEMES, 1)
CLUSTERS = np.repeat([0.0, 6.0, 12.0, 18.0], 3)[:SCHEMES]
EQUAL, THREE_EQUAL = np.zeros(SCHEMES), 1000.0 * np.maximum(0, np.arange(SCHEMES) - 2)


def failing(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """One scheme fails with one seed of ten, and is then 20 sd worse. No test is promised to hold here."""
    values = random.normal(size=shape)
    values[..., 0] += 20 * ((random.random(shape[:-1]) < 0.1) - 0.1)
    return values


NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Floats]] = {
    "all alike": lambda random, shape: random.normal(size=shape),
    "one scheme x3": lambda random, shape: random.normal(size=shape) * np.where(np.arange(shape[-1]) == 0, 3, 1),
    "Student's t, 3 degrees": lambda random, shape: random.standard_t(3, size=shape),
    "one fails with 1 seed of 10": failing,
}


def p_values(differences: Floats, margin: float | None = None) -> Floats:
    """Of differences [trials, seeds, pairs]: of none, or of the margin or more. The same formulas as in a report."""
    seeds = differences.shape[1]
    mean, error = differences.mean(1), differences.std(1, ddof=1) / np.sqrt(seeds)
    if margin is None:
        return np.asarray(2 * stdtr(seeds - 1, -np.abs(mean) / error))
    return np.asarray(stdtr(seeds - 1, (np.abs(mean) - margin) / error))


def tests(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """What was counted, the noise, the seeds, the rate."""
    for name, noise in NOISES.items():
        for seeds in SEEDS:
            shape = (trials, seeds, SCHEMES)

            def decided(levels: Floats, margin: float | None = None) -> Floats:
                losses = noise(random, shape) + levels  # noqa: B023
                return np.array([holm(p) <= LEVEL for p in p_values(losses[..., RIGHT] - losses[..., LEFT], margin)])

            alike = [decided(levels)[:, levels[LEFT] == levels[RIGHT]].any(1).mean() for levels in (EQUAL, THREE_EQUAL)]
            yield "false difference", name, seeds, float(max(alike))
            margins = [np.where(np.arange(SCHEMES) == 0, margin, 0.0) for margin in (0.9, 3.0)]
            wrong = [decided(levels, levels[0])[:, LEFT == 0].any(1).mean() for levels in margins]
            yield "false equivalence", name, seeds, float(max(wrong))
            yield "power", name, seeds, float(decided(CLUSTERS)[:, CLUSTERS[LEFT] != CLUSTERS[RIGHT]].mean())
            gaps = noise(random, (trials, seeds, 2))
            ends = [interval(each[:, 0] - each[:, 1]) for each in gaps]
            yield "interval over seeds", name, seeds, float(np.mean([low <= 0 <= high for _, low, high in ends]))


def documents(trials: int, random: np.random.Generator) -> Iterator[tuple[str, str, int, float]]:
    """... of intervals over documents, by how many there are."""
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
    for counted in (tests(options.trials, random), documents(options.trials // 3, random)):
        for what, noise, number, rate in counted:
            print(f"{what} | {noise} | {number} | {100 * rate:.1f}")


if __name__ == "__main__":
    main()
