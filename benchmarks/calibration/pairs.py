"""How often each rule of testing is wrong, and what it finds: trials with a known truth.

Eleven schemes, whose losses over seeds are a level each plus noise (what a seed does to all schemes drops out of every
difference, so there is none). Rules are those of `posbench.reporting.moderation`, corrected by `holm` as in a report.

- Differences: some schemes are equal and the others far apart (or 2 sd apart); how many trials tell any equal pair
  apart. The noisy schemes are among the equal ones, where they do the most harm.
- Equivalence: one scheme lies exactly the margin away from the ten others, which are equal; how many trials find it
  equal to any.
- Power: four clusters 6 sd apart; what share of the pairs of different clusters is decided.

Noise is in units of its standard deviation, on which nothing here depends but the margins: 0.01 nats/token, the margin
of a report, is 0.3 sd at 0.2M tokens and 0.9 sd at 1M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from posbench.reporting.moderation import Floats, Variances, moderated, own, plain
from posbench.reporting.statistics import LEVEL, holm

SCHEMES = 11
SEEDS = (3, 5, 8)
RULES: dict[str, Callable[[Floats, int], Variances]] = {"plain": plain, "moderated": moderated, "own": own}
LEFT, RIGHT = np.triu_indices(SCHEMES, 1)
CLUSTERS = np.repeat([0.0, 6.0, 12.0, 18.0], 3)[:SCHEMES]
MARGINS = (0.3, 0.9, 3.0, 10.0, 30.0)  # sd of a scheme's noise

Shape = tuple[int, int, int]  # trials, seeds, schemes
Noise = Callable[[np.random.Generator, Shape], Floats]


def normal(random: np.random.Generator, shape: Shape) -> Floats:
    return random.normal(size=shape)


def student(random: np.random.Generator, shape: Shape) -> Floats:
    """Student's t with 3 degrees of freedom."""
    return random.standard_t(3, size=shape)


def families(random: np.random.Generator, shape: Shape) -> Floats:
    """Three families; schemes of one family have 90 % of their variance in common."""
    trials, seeds, schemes = shape
    common = random.normal(size=(trials, seeds, 3))[..., np.arange(schemes) % 3]
    return np.sqrt(0.9) * common + np.sqrt(0.1) * random.normal(size=shape)


def kin(random: np.random.Generator, shape: Shape) -> Floats:
    """Two schemes by themselves, and nine that have 90 % of their variance in common."""
    is_kin = np.arange(shape[2]) >= 2
    common = random.normal(size=(*shape[:2], 1))
    return np.sqrt(0.9) * common * is_kin + np.sqrt(np.where(is_kin, 0.1, 1.0)) * random.normal(size=shape)


def failing(often: float) -> Noise:
    """One scheme fails to learn something with a share of its seeds, and is then 20 sd worse. Promised by no rule."""

    def noise(random: np.random.Generator, shape: Shape) -> Floats:
        values = random.normal(size=shape)
        values[..., 0] += 20 * ((random.random(shape[:2]) < often) - often)
        return values

    return noise


def noisy(times: float, count: int = 1, noise: Noise = normal) -> Noise:
    """The first `count` schemes so many times as noisy as the others."""
    scale = np.where(np.arange(SCHEMES) < count, times, 1.0)
    return lambda random, shape: noise(random, shape) * scale


NOISES: dict[str, Noise] = {
    "all alike": normal,
    "one scheme x2": noisy(2),
    "one x3": noisy(3),
    "one x9": noisy(9),
    "two x2": noisy(2, 2),
    "two x4": noisy(4, 2),
    "half of them x3": noisy(3, 5),
    "t3": student,
    "t3, one x5": noisy(5, noise=student),
    "three families": families,
    "three families, one x3": noisy(3, noise=families),
    "nine kin, two strangers": kin,
    "one fails with 1 seed of 10": failing(0.1),
    "one fails with 3 seeds of 10": failing(0.3),
}


def equal_among(count: int, apart: float) -> Floats:
    """Levels of which the first `count` are equal and the others `apart` sd from their neighbours."""
    return apart * np.maximum(0.0, np.arange(SCHEMES) - (count - 1.0))


TRUTHS = {
    "one pair": equal_among(2, 1000),
    "three": equal_among(3, 1000),
    "five": equal_among(5, 1000),
    "all": equal_among(SCHEMES, 0),
    "three, others 2 sd apart": equal_among(3, 2),
    "five, others 2 sd apart": equal_among(5, 2),
}


@dataclass(frozen=True)
class Cell:
    """One rate: what was counted, under which noise and truth."""

    what: str  # false difference | false equivalence | power
    noise: str
    truth: str
    seeds: int
    rule: str
    rate: float


def cells(trials: int, seed: int) -> Iterator[Cell]:
    """All of them. Rules are compared on the same trials."""
    random = np.random.default_rng(seed)
    for seeds in SEEDS:
        shape = (trials, seeds, SCHEMES)
        for name, noise in NOISES.items():
            for truth, levels in TRUTHS.items():
                p = _tests(noise(random, shape) + levels)
                is_equal = levels[LEFT] == levels[RIGHT]
                for rule, (used, mean) in p.items():
                    decided = holm(used.p_values(mean, seeds)) <= LEVEL
                    yield Cell("false difference", name, truth, seeds, rule, decided[:, is_equal].any(1).mean())
            for margin in MARGINS:
                levels = np.where(np.arange(SCHEMES) == 0, margin, 0.0)
                for rule, (used, mean) in _tests(noise(random, shape) + levels).items():
                    equal = holm(used.p_equivalence(mean, seeds, margin)) <= LEVEL
                    rate = equal[:, LEFT == 0].any(1).mean()
                    yield Cell("false equivalence", name, f"margin {margin:g} sd", seeds, rule, rate)
            for rule, (used, mean) in _tests(noise(random, shape) + CLUSTERS).items():
                decided = holm(used.p_values(mean, seeds)) <= LEVEL
                rate = decided[:, CLUSTERS[LEFT] != CLUSTERS[RIGHT]].mean()
                yield Cell("power", name, "clusters 6 sd apart", seeds, rule, rate)


def _tests(losses: Floats) -> dict[str, tuple[Variances, Floats]]:
    """By rule: what the tests of losses [trials, seeds, schemes] divide by, and mean differences [trials, pairs]."""
    differences = losses[..., RIGHT] - losses[..., LEFT]
    variances, mean = differences.var(axis=1, ddof=1), differences.mean(axis=1)
    return {name: (rule(variances, losses.shape[1] - 1), mean) for name, rule in RULES.items()}


def markdown(found: list[Cell]) -> str:
    """A table for each thing counted: a row a noise, a column for seeds and rule; of several truths the worst."""
    titles = {
        "false difference": "Any false difference, % of trials, worst of the truths",
        "false equivalence": "Any false equivalence, % of trials, worst of the margins",
        "power": "Power, % of unequal pairs decided",
    }
    lines: list[str] = []
    for what, title in titles.items():
        rates: dict[tuple[str, int, str], float] = {}
        for cell in found:
            if cell.what == what:
                key = (cell.noise, cell.seeds, cell.rule)
                rates[key] = max(cell.rate, rates.get(key, 0.0))
        columns = [(seeds, rule) for seeds in SEEDS for rule in RULES]
        lines += [f"| {title} | " + " | ".join(f"{seeds} seeds, {rule}" for seeds, rule in columns) + " |"]
        lines += ["|---|" + "--:|" * len(columns)]
        for noise in NOISES:
            figures = [f"{100 * rates[noise, *column]:.{0 if what == 'power' else 1}f}" for column in columns]
            lines.append(f"| {noise} | " + " | ".join(figures) + " |")
        lines.append("")
    return "\n".join(lines)
