"""Compare schemes over setups: does a gap hold when everything else changes (`posbench.composition.setups`)?

Each setup gives one gap per seed, paired in weights and batches. Effects are those of a linear model, gap = mean + half
the effect of each factor, fitted by least squares. Errors come from replicated setups only, which have several seeds.
Where all setups have the same seeds (`posbench report --by`), an effect is a difference within each seed instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from posbench.analysis.agreement import finished_runs
from posbench.analysis.cells import measure
from posbench.analysis.comparison import Comparison, baseline_of, damage
from posbench.analysis.onset import decayed_points
from posbench.analysis.options import MARGIN
from posbench.analysis.statistics import Floats, differs, holm, interval_of, student
from posbench.analysis.table import config_of
from posbench.composition.setups import Levels, design
from posbench.config import ConfigError
from posbench.runs import FINISHED

LEVEL = 0.05
# Noise differs between setups. If its standard deviation is anything from 0.02 to 0.14 nats, the pooled variance has
# this share of its degrees of freedom (Satterthwaite 1946).
_SHARE_OF_FREEDOM = 0.65


@dataclass(frozen=True, kw_only=True)
class SetupComparison(Comparison):
    """A comparison over setups: the gap of each scheme to the baseline in each setup."""

    doubt: str = "setups"
    factors: Mapping[str, Levels]
    gaps: pd.DataFrame  # scheme, setup, seed, tokens, gap: a row per setup and seed that both have
    branches: pd.DataFrame  # the same of branches, which end after fewer tokens
    unit: str  # nats per token, or nats per byte if tokenizers differ
    margin: float  # a gap below it counts as none

    @property
    def files(self) -> dict[str, pd.DataFrame]:
        effects = [self.of(scheme).effects for scheme in self.compared]
        return {"setups.csv": self.described, "effects.csv": pd.concat(effects)}

    @property
    def numbers(self) -> list[dict[str, Any]]:
        return [{"scheme": scheme, "baseline": self.baseline, **self.of(scheme).summary} for scheme in self.compared]

    @property
    def compared(self) -> list[str]:
        """Return the schemes with a gap to the baseline."""
        return [scheme for scheme in self.schemes if scheme in set(self.gaps["scheme"])]

    @property
    def levels(self) -> NDArray[np.bool_]:
        """Return which level each setup has of each factor, [setups, factors]."""
        return design(len(self.factors))

    @property
    def described(self) -> pd.DataFrame:
        """Return the gaps, also of branches, with the level that each setup has of each factor."""
        table = pd.concat([self.gaps.assign(is_branch=False), self.branches.assign(is_branch=True)])
        for n, (name, levels) in enumerate(self.factors.items()):
            table[f"setups.{name}"] = [" ".join(levels[int(self.levels[setup, n])]) for setup in table["setup"]]
        return table

    def of(self, scheme: str) -> SetupGaps:
        """Return the gaps of a scheme to the baseline."""
        gaps = self.gaps[self.gaps["scheme"] == scheme]
        by_setup = {int(str(setup)): values.to_numpy(float) for setup, values in gaps.groupby("setup")["gap"]}
        return SetupGaps(scheme, by_setup, self)


@dataclass(frozen=True)
class SetupGaps:
    """The gaps of one scheme to the baseline: {setup: a gap per seed}."""

    scheme: str
    by_setup: Mapping[int, Floats]
    comparison: SetupComparison

    @cached_property
    def means(self) -> Floats:
        """Return the mean gap of each setup, in the order of `by_setup`."""
        return np.array([gaps.mean() for gaps in self.by_setup.values()])

    @property
    def ahead(self) -> int:
        """Return in how many setups the scheme has the lower loss."""
        return int((self.means < 0).sum())

    @property
    def freedom(self) -> int:
        """Return the degrees of freedom of the error: seeds beyond the first of each setup."""
        return sum(len(gaps) - 1 for gaps in self.by_setup.values())

    @property
    def factor(self) -> float:
        """Return the number of standard errors in half a 95 % interval."""
        return student(_SHARE_OF_FREEDOM * self.freedom)

    @property
    def variance(self) -> float:
        """Return the variance of a gap over the seeds of a setup, pooled over replicated setups; NaN without any."""
        if not self.freedom:
            return math.nan
        return sum(float(((gaps - gaps.mean()) ** 2).sum()) for gaps in self.by_setup.values()) / self.freedom

    @property
    def _matrix(self) -> Floats:
        # 1, and -1 or 1 for the first or second level of each factor, [setups, 1 + factors].
        levels = self.comparison.levels[list(self.by_setup)]
        return np.hstack([np.ones((len(levels), 1)), np.where(levels, 1.0, -1.0)])

    def _half(self, weights: Floats) -> float:
        # Return half the 95 % interval of a sum of the setups' means with these weights.
        if not self.freedom:
            return math.nan
        seeds = np.array([len(gaps) for gaps in self.by_setup.values()])
        return self.factor * math.sqrt(self.variance * float((weights**2 / seeds).sum()))

    @property
    def mean(self) -> tuple[float, float]:
        """Return the mean gap over the setups, and half its 95 % interval."""
        weights = np.full(len(self.means), 1 / len(self.means))
        return float(self.means.mean()), self._half(weights)

    @property
    def p(self) -> float:
        """Return the two-sided p of the t-test that the mean gap over these setups is 0; NaN without replicates."""
        mean, half = self.mean
        if not half > 0:
            return math.nan
        return 2 * float(stdtr(_SHARE_OF_FREEDOM * self.freedom, -abs(mean) / half * self.factor))

    @cached_property
    def effects(self) -> pd.DataFrame:
        """Return each factor's effect on the gap: second level minus first, with half its 95 % interval.

        NaN if the setups with a gap do not tell the effect from others.
        """
        matrix = self._matrix
        is_known = np.linalg.matrix_rank(matrix) == matrix.shape[1]
        weights = 2 * np.linalg.pinv(matrix)[1:]  # [factors, setups]
        rows = []
        for name, of_factor in zip(self.comparison.factors, weights, strict=True):
            effect = float(of_factor @ self.means) if is_known else math.nan
            rows.append({"scheme": self.scheme, "factor": name, "effect": effect, "half": self._half(of_factor)})
        return pd.DataFrame(rows)

    @property
    def residual(self) -> float:
        """Return the standard deviation of what the effects leave: seeds and interactions together; NaN if unknown."""
        matrix = self._matrix
        freedom = len(self.means) - matrix.shape[1]
        if freedom < 1:
            return math.nan
        left = self.means - matrix @ (np.linalg.pinv(matrix) @ self.means)
        return math.sqrt(float((left**2).sum()) / freedom)

    @property
    def moved_most_by(self) -> str:
        """Return the factor with the largest effect, or ""."""
        effects = self.effects.dropna(subset="effect").set_index("factor")["effect"].abs()
        return str(effects.idxmax()) if len(effects) else ""

    @property
    def worse_setups(self) -> list[int]:
        """Return the replicated setups in which the scheme is certainly worse by more than the margin."""
        worse = []
        for setup, gaps in self.by_setup.items():
            if len(gaps) > 1:
                low_end = gaps.mean() - self.factor * math.sqrt(self.variance / len(gaps))
                if low_end > self.comparison.margin:
                    worse.append(setup)
        return worse

    @property
    def verdict(self) -> str:
        """Return `better` if the mean gap is below 0 and no setup speaks against it, `worse` above 0, else `open`."""
        mean, _ = self.mean
        if self.p <= LEVEL and mean > 0:
            return "worse"
        return "better" if self.p <= LEVEL and not self.worse_setups else "open"

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures of the first table."""
        mean, half = self.mean
        figures = {"setups": len(self.means), "ahead": self.ahead, "median": float(np.median(self.means))}
        figures |= {"lowest": float(self.means.min()), "highest": float(self.means.max())}
        return figures | {"mean": mean, "half": half, "p": self.p, "residual": self.residual, "verdict": self.verdict}


def has_setups(summary: pd.DataFrame) -> bool:
    """Return whether the experiment of the first finished run has factors."""
    finished = summary[summary["status"] == FINISHED]
    return len(finished) > 0 and bool(_experiment(finished).get("setups"))


def _experiment(runs: pd.DataFrame) -> dict[str, Any]:
    return config_of(str(runs["path"].iloc[0])).get("experiment") or {}


def compare_setups(
    summary: pd.DataFrame, rows: pd.DataFrame, baseline: str | None = None, margin: float = MARGIN
) -> SetupComparison:
    """Return the comparison of an experiment's runs over its setups.

    Arguments: summary, a row per run; rows, the tidy table; margin, nats below which a gap counts as none.
    Raises: ConfigError if no run is finished, or a setup's runs differ in more than their scheme.
    """
    runs, left_out = finished_runs(summary)
    factors: Mapping[str, Levels] = _experiment(runs)["setups"]
    num_setups = len(design(len(factors)))
    runs = runs.assign(setup=runs["seed"] % num_setups)
    is_per_byte = runs["fingerprint.tokenizer"].nunique() > 1
    wanted = baseline or baseline_of(runs)
    if wanted not in set(runs["scheme"]):
        raise ConfigError(
            f"the baseline {wanted!r} has no finished run here: choose one of {', '.join(sorted(set(runs['scheme'])))}"
        )
    _check_pairs(runs)
    points = decayed_points(runs)
    if is_per_byte:
        # Branches are validated on the same windows as their run, so a token has the same number of bytes.
        per_byte = runs["bits_per_byte"].astype(float) * math.log(2) / runs["loss"].astype(float)
        factors_of_runs = runs.assign(per_byte=per_byte)[["scheme", "seed", "per_byte"]]
        points = points.merge(factors_of_runs, on=["scheme", "seed"])
        points["loss"] *= points["per_byte"]
    losses = points.pivot(index=["seed", "tokens"], columns="scheme", values="loss")
    gaps = losses.sub(losses[wanted], axis=0).drop(columns=wanted)
    table = gaps.reset_index().melt(["seed", "tokens"], var_name="scheme", value_name="gap").dropna()
    table.insert(0, "setup", table["seed"] % num_setups)
    is_final = table["tokens"] == table["seed"].map(runs.groupby("seed")["tokens"].max())
    by_seed = runs.pivot(index="seed", columns="scheme", values="loss")
    schemes = [*table[is_final].groupby("scheme")["gap"].mean().sort_values().index, wanted]
    return SetupComparison(
        runs=runs,
        schemes=schemes,
        wanted_baseline=wanted,
        cells=measure(rows.head(0), runs, wanted, 0, [], {}),
        holes={},
        left_out=[*left_out, *_missing(by_seed)],
        notes=damage(summary),
        factors=factors,
        gaps=table[is_final],
        branches=table[~is_final],
        unit="nats per byte" if is_per_byte else "nats per token",
        margin=margin,
    )


def _check_pairs(runs: pd.DataFrame) -> None:
    # Runs of one seed have one setup, one text and the same batches.
    for seed, of_seed in runs.groupby("seed"):
        for column in ("fingerprint.config", "fingerprint.data", "fingerprint.batches"):
            if of_seed[column].nunique() > 1:
                names = ", ".join(of_seed["scheme"])
                raise ConfigError(
                    f"the runs of seed {seed} ({names}) differ in more than their scheme: train them again"
                )


def _missing(by_seed: pd.DataFrame) -> Sequence[str]:
    # A pair without one of its runs is left out, and never filled in.
    lines = []
    for seed, of_seed in by_seed.iterrows():
        for scheme in of_seed.index[of_seed.isna()]:
            lines.append(f"{scheme} seed {seed}: no finished run, so its setup has no gap")
    return lines


def paired_effects(
    groups: Mapping[Sequence[str], pd.DataFrame], factors: Sequence[str], pairs: Iterable[tuple[str, str]]
) -> pd.DataFrame:
    """Return how each factor changes the gap of each pair of schemes, paired by seed, a row per pair and factor.

    Columns: factor, left, right, seeds, first_gap, second_gap (loss of `right` minus `left`, mean over the groups with
    that level), difference (first minus second gap) and its 95 % interval, and p, two-sided, with Holm's correction,
    NaN with fewer than FEWEST_SEEDS seeds.
    Arguments: groups, {a level of each factor: losses, a row per seed and a column per scheme}, all combinations of two
    levels; the first group has the first levels.
    """
    first_levels = next(iter(groups))
    rows = []
    for left, right in pairs:
        gaps = pd.concat([losses[right] - losses[left] for losses in groups.values()], axis=1).dropna()
        for n, factor in enumerate(factors):
            is_first = np.array([levels[n] == first_levels[n] for levels in groups])
            first, second = gaps.loc[:, is_first].mean(axis=1), gaps.loc[:, ~is_first].mean(axis=1)
            differences = (first - second).to_numpy(float)
            row = {"factor": factor, "left": left, "right": right, "seeds": len(gaps)}
            row |= {"first_gap": float(first.mean()), "second_gap": float(second.mean())}
            rows.append(row | interval_of("difference", differences) | {"p": differs(differences)})
    columns = ["factor", "left", "right", "seeds", "first_gap", "second_gap", "difference"]
    table = pd.DataFrame(rows, columns=[*columns, "difference_low", "difference_high", "p"])
    return table.assign(p=holm(table["p"], len(table)))
