"""Experiments that differ in size or tokens alone: the trend of each gap, and which published links stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fabricate import World, change_fingerprints, fabricate
from rich.console import Console

from posbench.composition import compose
from posbench.config import ConfigError
from posbench.reporting import trend_report
from posbench.reporting.ngrams import NgramLine
from posbench.reporting.rates import OwnRates
from posbench.reporting.sections.next_runs import settings
from posbench.reporting.sections.trend import trend_sections
from posbench.reporting.statistics import Interval
from posbench.reporting.trend import (
    Point,
    Trend,
    doubling_of_size,
    doubling_of_tokens,
    find_trend,
    link_verdict,
)
from posbench.runs import find_runs

Make = Callable[..., World]
# name -> parameters, tokens, learning rate, and the planted gaps of nope and k_rope to qk_rope
POINTS = {
    "small-1M": (200_000, 1_000_000, 5e-3, 0.20, 0.030),
    "small": (200_000, 4_000_000, 5e-3, 0.16, 0.030),
    "large-4M": (800_000, 4_000_000, 3e-3, 0.10, -0.030),
    "large": (800_000, 16_000_000, 3e-3, 0.06, -0.030),
}


def place(
    root: Path, world: Make, name: str, seeds: tuple[int, ...] = (0, 1, 2), documents: int = 12, probes: bool = True
) -> Path:
    """An experiment of one point, as its runs would be; without `probes` the losses alone."""
    parameters, tokens, lr, nope, k = POINTS[name]
    words = ("model=tiny", "experiment=demo", "train.context_length=256", f"train.lr={lr}")
    effects = {"qk_rope": 0.0, "nope": nope, "k_rope": k, "qkvo_rope": 0.0001}
    options = {
        "documents": documents,
        "seeds": seeds,
        "noise_sd": 0.0005,
        "seed_sd": 0.0,
        "lengths": (256, 512) if probes else (),
        "probes": probes,
    }
    folder = fabricate(root, world(effects, experiment=name, overrides=words, **options))
    identity = {"train.tokens": tokens, "train.lr": lr, "model.d_model": parameters // 1000, "train.beta2": 0.95}
    for run in find_runs(folder):
        run.update_manifest(identity=identity, tokens=tokens, num_parameters={"body": parameters, "embedding": 0})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("trend")
    return [place(root, World, name, probes=False) for name in POINTS]


@pytest.fixture(scope="module")
def losses_alone(folders: list[Path]) -> Path:
    return folders[0]


@pytest.fixture(scope="module")
def trend(folders: list[Path]) -> Trend:
    return find_trend([folders[2], folders[0], folders[3], folders[1]], against="kexue-10862")


def test_points_stand_by_size_and_then_by_tokens(trend: Trend) -> None:
    assert [point.name for point in trend.points] == list(POINTS)
    assert list(trend.sizes()) == [200_000, 800_000] and [p.name for p in trend.longest()] == ["small", "large"]
    assert trend.schemes[-1] == "nope" and trend.baseline == "qk_rope"


def test_the_trend_of_a_gap_is_what_was_planted(trend: Trend) -> None:
    small, large = trend.sizes().values()
    tokens = doubling_of_tokens(small, "nope")
    assert tokens.mean == pytest.approx(-0.02, abs=0.002) and tokens.low < -0.02 < tokens.high  # of 4: two
    assert doubling_of_tokens(large, "k_rope").mean == pytest.approx(0, abs=0.002)
    size = doubling_of_size(trend.longest(), "nope")
    assert size.mean == pytest.approx(-0.05, abs=0.002) and size.low < -0.05 < size.high
    assert math.isnan(doubling_of_tokens(small[:1], "nope").mean)


@dataclass(frozen=True)
class Planted(Point):
    """A point whose gaps are given."""

    by_seed: dict[int, float]

    def gaps(self, scheme: str) -> dict[int, float]:
        return self.by_seed


def test_a_slope_is_a_line_through_each_seed_and_its_interval_that_of_their_mean(trend: Trend) -> None:
    findings = trend.points[0].findings
    gaps = [{0: 0.5, 1: 0.3, 2: 9.0}, {0: 0.3, 1: 0.2}, {0: 0.25, 1: 0.05, 3: 9.0}]
    points = [Planted(findings, 1, tokens, of) for tokens, of in zip((1000, 2000, 8000), gaps, strict=True)]
    slopes = [np.polyfit([0, 1, 3], [of[seed] for of in gaps], 1)[0] for seed in (0, 1)]
    found = doubling_of_tokens(points, "any")
    assert found.mean == pytest.approx(np.mean(slopes))
    assert found.half_width == pytest.approx(12.7062 * abs(slopes[0] - slopes[1]) / 2, rel=1e-4)  # t of 1 degree


def test_links_stand_fall_or_are_open(trend: Trend) -> None:
    small, large = trend.points[1].findings, trend.points[3].findings
    verdict, interval = link_verdict(small, "qkvo_rope", ">", "k_rope")
    assert verdict == "confirmed" and interval.mean == pytest.approx(0.03, abs=0.002) and interval.low < interval.high
    verdict, interval = link_verdict(large, "qkvo_rope", ">", "k_rope")
    assert (
        verdict == "contradicted" and interval.mean == pytest.approx(-0.03, abs=0.002) and interval.low < interval.high
    )
    assert link_verdict(small, "qk_rope", "~", "qkvo_rope")[0] == "confirmed"  # equal within the margin
    assert link_verdict(small, "qk_rope", ">", "qkvo_rope")[0] == "contradicted"  # ... which is no difference
    assert link_verdict(small, "qk_rope", "~", "nope")[0] == "contradicted"
    assert link_verdict(small, "qk_rope", ">", "alibi")[0] == ""


def test_one_seed_has_signs_and_no_verdicts(tmp_path: Path, world: Make) -> None:
    every = [place(tmp_path, world, name, seeds=(0,), probes=False) for name in ("small-1M", "small")]
    trend = find_trend(every, against="kexue-10862")
    assert link_verdict(trend.points[0].findings, "k_rope", ">", "nope")[0] == "(confirmed)"
    assert link_verdict(trend.points[0].findings, "nope", ">", "k_rope")[0] == "(contradicted)"
    compared, *others = trend_sections(trend, [])
    tables = {table.title: table for section in (compared, *others) for table in section.tables}
    assert tables["What is compared"].rows[0][-1] == "not tested"
    assert compared.words[-1] == "No other learning rate was tried (`posbench tune`), so gaps may be due to the rate."
    rates = OwnRates(5e-3, {"nope": {5e-3: 3.0}})
    points = [replace(trend.points[0], findings=replace(trend.points[0].findings, rates=rates)), trend.points[1]]
    words = trend_sections(replace(trend, points=points), [])[0].words
    assert words[-1].endswith("only in small-1M; in the others gaps may be due to the rate.")
    assert "±" not in "".join(cell for row in tables["Gap to qk_rope, nats/token"].rows for cell in row)
    assert tables["Gap to qk_rope, nats/token"].foot == [
        ["loss of qk_rope", *(f"{point.losses['qk_rope'].loss.mean:.3f}" for point in trend.points)]
    ]


def test_ngram_models_stand_below_the_gaps_and_are_left_open_where_a_point_has_none(trend: Trend) -> None:
    first, *others = trend.points
    loss, gap = Interval(3.05, 2.9, 3.2), Interval(-0.5, -0.6, -0.4)
    line = NgramLine(3, (0, 1), (3.0, 3.1), loss, gap, 1.5, 1e6, 1000, (), (), ())
    points = [Point(replace(first.findings, ngrams=[line]), first.parameters, first.tokens), *others]
    (gaps, *_) = trend_sections(replace(trend, points=points), [])[1].tables
    assert gaps.foot[1] == ["Kneser-Ney 3", "-0.50 ± 0.10", *["–"] * len(others)]


@pytest.mark.parametrize(
    "identity, fingerprints, says",
    [
        ({"train.beta2": 0.99}, {}, r"train\.beta2 \(0\.95; 0\.99\)"),
        ({}, {"data": "0ther"}, r"the text \(da7a; 0ther\)"),
        ({}, {"tokenizer": "0ther"}, r"the tokenizer \(70ce; 0ther\)"),
    ],
)
def test_what_differs_in_more_than_size_and_tokens_is_refused_by_name(
    losses_alone: Path,
    tmp_path: Path,
    world: Make,
    identity: dict[str, float],
    fingerprints: dict[str, str],
    says: str,
) -> None:
    other = place(tmp_path, world, "small", seeds=(0,), probes=False)
    for run in find_runs(other):
        run.update_manifest(identity={**run.manifest.identity, **identity})
        change_fingerprints(run, **fingerprints)
    with pytest.raises(ConfigError, match=f"small-1M and small cannot be in one trend: they differ in {says}"):
        find_trend([losses_alone, other])


def test_two_points_of_one_size_and_tokens_are_refused(losses_alone: Path) -> None:
    with pytest.raises(ConfigError, match="small-1M and small-1M have the same size and tokens"):
        find_trend([losses_alone, losses_alone])


def test_other_windows_are_refused(losses_alone: Path, tmp_path: Path, world: Make) -> None:
    other = place(tmp_path, world, "small", seeds=(0,), documents=13, probes=False)
    with pytest.raises(ConfigError, match=r"differ in train\.validation_tokens \(\d+; \d+\), the validation windows"):
        find_trend([losses_alone, other])


@pytest.mark.slow
def test_the_report_of_a_trend(tmp_path: Path, world: Make) -> None:
    folders = [place(tmp_path, world, name) for name in POINTS]
    with (tmp_path / "terminal.txt").open("w") as file:
        paths = trend_report(folders, output=tmp_path / "out", console=Console(file=file, width=140))
    names = {path.name for path in paths}
    assert {"trend.csv", "links.csv", "report.md", "report.html", "gaps-by-tokens.svg", "gaps-by-size.png"} <= names
    frame = pd.read_csv(tmp_path / "out" / "trend.csv")
    assert len(frame) == 16 and frame.groupby("experiment")["gap"].max().round(2).to_dict() == {
        name: values[3] for name, values in POINTS.items()
    }
    terminal, page = (tmp_path / "terminal.txt").read_text(), (tmp_path / "out" / "report.html").read_text()
    for text in ("Trend of the gap", "The published chain", "Reach, tokens", "Loss at 512 minus that at 256 tokens"):
        assert text in terminal and text in page, text


def test_more_seeds_of_a_branch_are_trained_by_its_trunk() -> None:
    trunk = compose(["experiment=ladder_s"])
    branch = compose(["experiment=ladder_s", "train.lr=1e-3", *trunk.branch_words()[0]])
    assert branch.train.is_branch and settings(branch) == ["experiment=ladder_s", "train.lr=0.001"]
