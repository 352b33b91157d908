"""Our results beside the published: the data, the gaps, the orders, and what can be said of where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fabricate import World, fabricate
from scipy import stats

from posbench.config import ConfigError
from posbench.reporting.findings import Findings, find
from posbench.reporting.published import SETUP, Comparison, load_published, published_names, set_against
from posbench.reporting.sections.against import against
from posbench.reporting.statistics import compare_all

KEXUE = {
    "qk_rope": 2.712,
    "qkvo_rope": 2.719,
    "k_rope": 2.769,
    "vo_rope": 2.770,
    "qkv_rope": 2.783,
    "nope": 2.795,
    "o_rope": 2.841,
    "q_rope": 2.851,
    "v_rope": 2.856,
}


def test_the_published_there_are() -> None:
    assert set(published_names()) >= {"gu-2025", "haviv-2022", "dape-v2", "drope", "p-rope", "kexue-10907"}
    for name in published_names():
        published = load_published(name)
        assert published.name == name and published.source.startswith("https://")
        assert set(published.setup) <= set(SETUP)
        for m in published.measurements:
            assert len(m.losses) > 1 and all(value > 0 for value in m.values.values())


def test_kexue_as_printed() -> None:
    (measurement,) = load_published("kexue-10862").measurements
    assert measurement.values == KEXUE
    gaps = {scheme: round(loss - KEXUE["qk_rope"], 3) for scheme, loss in measurement.losses.items()}
    assert list(gaps.values()) == [0, 0.007, 0.057, 0.058, 0.071, 0.083, 0.129, 0.139, 0.144]


def test_a_perplexity_is_compared_by_its_logarithm() -> None:
    published = load_published("alibi-wikitext103").measurements[1]
    assert published.losses["alibi"] == pytest.approx(math.log(18.73))
    assert published.ratio == pytest.approx(1012 / 512)


def test_of_ranks_the_higher_is_better_and_no_gap_is_shown(findings: Findings) -> None:
    (comparison,) = beside(findings, "kazemnejad-2023")
    assert [row.scheme for row in comparison.rows] == ["nope", "alibi", "qk_rope"]  # from their best
    assert all(math.isnan(row.their_gap) for row in comparison.rows)
    ours = {row.scheme: row.ours.loss.mean for row in comparison.rows}
    assert comparison.tau == pytest.approx(stats.kendalltau([1, 2, 3], list(ours.values())).statistic)
    section = against(findings, comparison)
    assert "The published figure is not a loss" in section.words[0] and section.tables[0].rows[0][1] == "–"
    assert section.tables[0].rows[0][3] == "0.690"


def test_an_unknown_one_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'kexue' is not known; did you mean 'kexue-10"):
        load_published("kexue")


def beside(findings: Findings, name: str) -> list[Comparison]:
    return set_against(load_published(name), findings.measurements, findings.pairs, findings.config)


def test_gaps_and_the_agreement_of_orders(findings: Findings) -> None:
    (found,) = findings.against  # the demo's own choice is kexue-10862
    assert [row.scheme for row in found.rows] == ["qk_rope", "qkvo_rope", "nope"]  # alibi is not published there
    ours = {row.scheme: row.ours.loss.mean for row in found.rows}
    theirs = [KEXUE[row.scheme] for row in found.rows]
    assert found.tau == pytest.approx(stats.kendalltau(theirs, list(ours.values())).statistic)
    each = [stats.kendalltau(theirs, [row.ours.losses[n] for row in found.rows]).statistic for n in range(4)]
    assert found.taus == pytest.approx(each)
    for row in found.rows:
        assert row.our_gap.mean == pytest.approx(ours[row.scheme] - ours["qk_rope"])
        assert row.their_gap == pytest.approx(KEXUE[row.scheme] - KEXUE["qk_rope"])


def test_a_pair_that_stands_the_other_way_round_is_named_and_judged(
    tmp_path: Path, world: Callable[..., World]
) -> None:
    effects = {"qk_rope": 0.0, "k_rope": 0.2, "nope": 0.1, "qkvo_rope": -0.0001}
    found = find(fabricate(tmp_path, world(effects, seeds=(0, 1, 2, 3)))).against[0]
    pairs = {(d.better, d.worse): d for d in found.disagreements}
    sure = pairs["k_rope", "nope"]
    assert sure.their_difference == pytest.approx(0.026)
    assert sure.pair.difference == pytest.approx(0.1, abs=0.01) and sure.pair.is_decided
    if ("qk_rope", "qkvo_rope") in pairs:
        assert not pairs["qk_rope", "qkvo_rope"].pair.is_decided


@pytest.mark.parametrize(("gap", "listed"), [(0.0, False), (0.00004, False), (0.0002, True)])
def test_a_tie_is_no_reversal(findings: Findings, gap: float, listed: bool) -> None:
    """nope is published behind qk_rope: here it stands in front by `gap`."""
    of_seed = np.array([3.0, 3.1])
    pairs = compare_all(np.stack([of_seed - gap, of_seed], axis=1), ["nope", "qk_rope"])
    ours = [m for m in findings.measurements if m.scheme in ("nope", "qk_rope")]
    (found,) = set_against(load_published("kexue-10862"), ours, pairs, findings.config)
    assert [(d.better, d.worse) for d in found.disagreements] == [("qk_rope", "nope")] * listed


def test_an_order_of_few_schemes_has_no_tau(findings: Findings, tmp_path: Path, world: Callable[..., World]) -> None:
    said = " ".join(against(findings, findings.against[0]).words)
    assert "tau of the two orders needs at least 4 schemes; there are 3." in said
    effects = {"qk_rope": 0.0, "k_rope": 0.2, "nope": 0.1, "v_rope": 0.3}
    four = find(fabricate(tmp_path, world(effects, seeds=(0, 1))))
    words = " ".join(against(four, four.against[0]).words)
    assert "orders: 0.67 over 4 schemes (p = 0.33 for unrelated orders; by seed 0.67 to 0.67)." in words


def test_lengths_are_matched_in_training_lengths_and_by_protocol(findings: Findings) -> None:
    found = beside(findings, "alibi-wikitext103")  # ours: trained at 256, evaluated to 2048
    assert [c.where for c in found] == [
        "validation at 256 tokens",
        "nonoverlapping at 512 tokens",
        "nonoverlapping at 2048 tokens",
        "",
        "",
        "",
    ]
    assert [row.scheme for row in found[1].rows] == ["alibi", "qk_rope"]


def test_another_baseline_where_theirs_lacks_ours(findings: Findings) -> None:
    found, *larger = beside(findings, "haviv-2022")
    assert found.baseline == "nope" and found.measurement.what.startswith("125M parameters, perplexity")
    assert len(larger) == 3
    assert found.rows[0].their_gap == pytest.approx(math.log(19.94 / 22.15))


def test_two_schemes_beyond_the_training_length(findings: Findings) -> None:
    found = beside(findings, "rove")
    assert [c.where.split(" at ")[-1] for c in found] == ["512 tokens", "1024 tokens", "2048 tokens", ""]
    assert all(abs(c.tau) == 1 for c in found[:3])
