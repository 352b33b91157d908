"""Experiments that differ in size or tokens alone, beside each other: how each gap changes with both.

Each experiment is a point: the ends of runs whose learning rate had come down, of one size and one budget. Gaps are
taken within an experiment, between runs of the same seed, so only gaps are compared between points and never levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from posbench.config import ConfigError
from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.families import published_links
from posbench.reporting.findings import Findings, find
from posbench.reporting.measure import Measurement, task_of
from posbench.reporting.palette import Look
from posbench.reporting.published import load_published
from posbench.reporting.statistics import MARGIN, NOTHING, Interval, Pair, t_interval

_SIZE = ("name", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
_TRAIN = ("tokens", "num_steps", "trunk_tokens", "lr")  # a rate is chosen for a size: the report shows it
MAY_DIFFER = frozenset({*(f"model.{name}" for name in _SIZE), *(f"train.{name}" for name in _TRAIN)})


@dataclass(frozen=True)
class Point:
    """One experiment: one size, one budget."""

    findings: Findings
    parameters: int  # of the baseline's model
    tokens: int  # of a run

    @property
    def name(self) -> str:
        return self.findings.experiment

    @property
    def lr(self) -> float:
        """The shared learning rate."""
        return self.findings.config.train.lr

    @cached_property
    def losses(self) -> dict[str, Measurement]:
        """Of the validation split, by scheme."""
        return self.findings.at(VALIDATION.name)

    def gaps(self, scheme: str) -> dict[int, float]:
        """Seed -> gap to the baseline, nats/token; empty where the scheme has none."""
        base, ours = self.losses.get(self.findings.baseline or ""), self.losses.get(scheme)
        if base is None or ours is None:
            return {}
        return dict(zip(ours.seeds, np.array(ours.losses) - np.array(base.losses), strict=True))


@dataclass(frozen=True)
class Trend:
    """Points by size, then by tokens. `schemes` are those of any point, by their mean gap."""

    points: list[Point]
    baseline: str
    schemes: list[str]
    links: list[tuple[str, str, str]]  # of the published chain among the schemes
    looks: dict[str, Look]
    notes: list[str]

    def sizes(self) -> dict[int, list[Point]]:
        """Parameters -> its points, by tokens."""
        sizes: dict[int, list[Point]] = {}
        for point in self.points:
            sizes.setdefault(point.parameters, []).append(point)
        return sizes

    def longest(self) -> list[Point]:
        """The point of the most tokens of each size."""
        return [points[-1] for points in self.sizes().values()]


def find_trend(
    folders: Sequence[str | Path],
    baseline: str | None = None,
    against: str | None = None,
    family: str = "all",
    margin: float = MARGIN,
) -> Trend:
    """Read every experiment as its own report does, and join them.

    Raises: ConfigError as `find`; where a field other than size, tokens and learning rate differs, and names it; where
    two are of the same size and tokens.
    """
    every = [find(folder, baseline, against, family, margin) for folder in folders]
    bases = {findings.baseline for findings in every}
    if len(bases) > 1 or None in bases:
        known = ", ".join(f"{f.experiment}: {f.baseline or 'none'}" for f in every)
        raise ConfigError(f"these experiments have no baseline in common ({known}): name one with --baseline")
    base = str(bases.pop())
    for findings in every[1:]:
        _check(every[0], findings)
    points = sorted((_point(findings, base) for findings in every), key=lambda point: (point.parameters, point.tokens))
    for one, other in pairwise(points):
        if (one.parameters, one.tokens) == (other.parameters, other.tokens):
            raise ConfigError(f"{one.name} and {other.name} have the same size and tokens: give only one of them")

    def mean_gap(scheme: str) -> float:
        gaps = [gap for point in points for gap in point.gaps(scheme).values()]
        return float(np.mean(gaps)) if gaps else math.inf

    schemes = sorted({scheme for point in points for scheme in point.losses}, key=lambda s: (mean_gap(s), s))
    published = against or next((f.config.experiment.published for f in every if f.config.experiment.published), None)
    return Trend(
        points=points,
        baseline=base,
        schemes=schemes,
        links=published_links(load_published(published), schemes) if published else [],
        looks={scheme: look for point in points for scheme, look in point.findings.looks.items()},
        notes=_notes(points),
    )


def _point(findings: Findings, baseline: str) -> Point:
    run = next(run for (scheme, _), run in findings.runs.items() if scheme == baseline)
    return Point(findings, sum(run.manifest.num_parameters.values()), run.manifest.tokens)


def _check(one: Findings, other: Findings) -> None:
    """Raises: ConfigError naming the first fields in which two experiments differ and may not."""
    here, there = _held_fixed(one), _held_fixed(other)
    differing = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    if differing:
        values = [f"{key} ({here.get(key)}; {there.get(key)})" for key in differing[:3]]
        values += ["..."] * bool(differing[3:])
        raise ConfigError(
            f"{one.experiment} and {other.experiment} cannot be in one trend: they differ in {', '.join(values)}. "
            "Only size (model.*), tokens and learning rate may differ"
        )


def _held_fixed(findings: Findings) -> dict[str, Any]:
    """What must be the same: settings, text, tokenizer and scored windows."""
    run = next(iter(findings.runs.values()))
    identity = {
        key: value
        for key, value in run.manifest.identity.items()
        if key not in MAY_DIFFER and not key.startswith("scheme.") and key not in ("seed", "device.compiled")
    }
    prints = run.manifest.fingerprints
    facts: dict[str, Any] = {**identity, "the text": prints.data, "the tokenizer": prints.tokenizer}
    scored = next(iter(findings.at(VALIDATION.name).values()), None)
    if scored is not None:
        facts["train.validation_tokens"] = scored.targets
        facts["the validation windows"] = sha256(repr(task_of(scored.results[0])[1]).encode()).hexdigest()[:8]
    return facts


def _notes(points: list[Point]) -> list[str]:
    """How the points differ besides size, tokens and learning rate."""
    notes = []
    codes = {str(point.findings.joined.runs["fingerprint.code"].iloc[0]) for point in points}
    if len(codes) > 1:
        notes.append(f"The experiments were trained with {len(codes)} versions of the shared code.")
    if points[0].findings.config.train.schedule == "constant":
        notes.append("train.schedule=constant: the learning rate of these runs did not decay.")
    return notes


def doubling_of_tokens(points: list[Point], scheme: str) -> Interval:
    """Change of the gap with each doubling of the tokens, nats/token: a least-squares slope a seed, its interval."""
    return _slope(points, [point.tokens for point in points], scheme)


def doubling_of_size(points: list[Point], scheme: str) -> Interval:
    """... of the parameters."""
    return _slope(points, [point.parameters for point in points], scheme)


def _slope(points: list[Point], amounts: list[int], scheme: str) -> Interval:
    """Over the seeds that all points have; NOTHING below two points or without such a seed."""
    gaps = [point.gaps(scheme) for point in points]
    seeds = sorted(set.intersection(*map(set, gaps))) if gaps else []
    if len(points) < 2 or not seeds:
        return NOTHING
    x = np.log2(np.array(amounts, dtype=np.float64))
    y = np.array([[of[seed] for seed in seeds] for of in gaps])  # [points, seeds]
    x -= x.mean()
    return t_interval(x @ y / (x @ x))


def link_verdict(findings: Findings, better: str, sign: str, worse: str) -> tuple[str, Interval]:
    """Whether a link of the published chain is confirmed, contradicted or open, and worse - better with its interval.

    ">": confirmed if `better` is significantly better, contradicted if `worse` is or both are equal within the margin.
    "~": confirmed if both are equal within the margin, contradicted if one is significantly better and they are not.
    Untested pairs (one seed) have their verdict in brackets: the sign of the difference alone.
    """
    pair = next((p for p in findings.pairs if {p.left, p.right} == {better, worse}), None)
    if pair is None:
        return "", NOTHING
    interval = pair.interval if pair.left == better else _negative(pair.interval)
    return _verdict(pair, pair.left == better, sign), interval


def _verdict(pair: Pair, is_as_published: bool, sign: str) -> str:
    if not pair.is_tested:
        return ("(confirmed)" if is_as_published else "(contradicted)") if sign in (">", ",") else "(open)"
    if sign in (">", ","):
        is_confirmed, is_contradicted = pair.is_decided and is_as_published, pair.is_decided or pair.is_equivalent
    else:
        is_confirmed, is_contradicted = pair.is_equivalent, pair.is_decided
    return "confirmed" if is_confirmed else "contradicted" if is_contradicted else "open"


def _negative(interval: Interval) -> Interval:
    return Interval(-interval.mean, -interval.high, -interval.low)
