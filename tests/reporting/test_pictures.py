"""Pictures: the same look a scheme everywhere, names that do not overlap, and what must be marked."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from fabricate import PUBLISHED_ORDER, T
from hypothesis import given
from hypothesis import strategies as st

from posbench.composition import compose
from posbench.reporting.drawing import (
    LEAST_SPAN,
    log_numbers,
    new_figure,
    png,
    short,
    stand_clear,
    style,
    svg,
    tokens_text,
)
from posbench.reporting.findings import Findings
from posbench.reporting.palette import DASHDOT, DASHED, SOLID, Facts, facts_of, looks
from posbench.reporting.plots import by_length, by_position, draw_all, gaps


@cache
def shipped(*names: str) -> dict[str, Facts]:
    """What schemes of conf/scheme are."""
    return {name: facts_of(compose([f"scheme={name}", "model=tiny"]).scheme) for name in names or PUBLISHED_ORDER}


def test_a_scheme_looks_the_same_whatever_stands_beside_it() -> None:
    strangers = {"aaa": Facts("kerple", frozenset({"bias"}), True), "zzz": Facts("gone", frozenset(), None)}
    alone, together = looks(shipped("vo_rope", "alibi")), looks({**strangers, **shipped()})
    assert {name: together[name] for name in alone} == alone
    assert looks({"aaa": strangers["aaa"]})["aaa"] == together["aaa"]


def test_a_look_says_what_a_scheme_is() -> None:
    look = looks({**shipped(), "t5": Facts("t5", frozenset({"bias"}), True)})
    for name, facts in shipped().items():
        assert (look[name].line == SOLID) == facts.is_relative
    assert look["t5"].line == SOLID and look["sinusoidal"].line == DASHDOT and look["q_rope"].line == DASHED


SITES = [frozenset(sites) for n in range(7) for sites in combinations(("embed", "q", "k", "v", "o", "bias"), n)]


@given(st.lists(st.tuples(st.sampled_from(SITES), st.sampled_from([True, False, None])), max_size=40))
def test_two_schemes_never_share_colour_line_and_marker(strangers: list[tuple[frozenset[str], bool | None]]) -> None:
    schemes = {f"stranger{n}": Facts("plug-in", *facts) for n, facts in enumerate(strangers)}
    together = looks({**shipped(), **schemes})
    assert len(set(together.values())) == len(together)


def test_looks_are_told_apart_without_full_colour_vision() -> None:
    """Two schemes whose colours come close under deuteranopia or protanopia differ in their line as well."""
    every = looks(shipped())
    for one, other in combinations(PUBLISHED_ORDER, 2):
        a, b = every[one], every[other]
        assert a.marker != b.marker
        if a.line == b.line:
            assert min(seen_distance(a.colour, b.colour, kind) for kind in SEEN) > 15, (one, other)


SEEN = {  # Vienot, Brettel, Mollon 1999, in linear RGB
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
}


def seen_distance(one: str, other: str, kind: str) -> float:
    """Distance in CIELAB as such an eye sees it."""
    return float(np.linalg.norm(_lab(SEEN[kind] @ _linear(one)) - _lab(SEEN[kind] @ _linear(other))))


def _linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = np.clip(matrix @ linear / np.array([0.9505, 1.0, 1.089]), 0, None)
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.floats(0.5, 8))
def test_names_stand_clear_and_in_order(wanted: list[float], room: float) -> None:
    placed = stand_clear(np.array(wanted), room, 0.0, 100.0)
    order = np.argsort(wanted, kind="stable")
    assert all(b - a >= room - 1e-6 for a, b in pairwise(placed[order]))
    assert placed.min() >= -room / 2 - 1e-6 and placed.max() <= 100 + room / 2 + 1e-6
    if all(b - a >= room for a, b in pairwise(sorted(wanted))):
        assert placed == pytest.approx(np.array(wanted), abs=1e-6)


def test_names_at_line_ends_do_not_overlap(findings: Findings) -> None:
    with style():
        figure = by_length(findings, "fixed")
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text() in findings.schemes]
    assert len(boxes) == len(findings.schemes)
    for one, other in combinations(boxes, 2):
        assert one.y1 <= other.y0 + 0.5 or other.y1 <= one.y0 + 0.5
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)  # none is cut off


def test_perplexity_stands_on_log_scales_with_the_training_length_marked(findings: Findings) -> None:
    with style():
        (axes,) = by_length(findings, "fixed").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert any(set(line.get_xdata()) == {T} for line in axes.get_lines())
    assert f"trained at {T}" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "values", [(350.9, 351.1), (350, 360), (99, 103), (18, 19.5), (100, 520), (0.8, 40), (90, 4e5)]
)
def test_every_tick_says_its_number_and_no_two_the_same(values: tuple[float, float]) -> None:
    with style():
        figure, (axes,) = new_figure(4.1)
        axes.plot([1, 2], values)
        log_numbers(axes)
        figure.draw_without_rendering()
    shown = {tick.get_text(): y for tick, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    assert 3 <= len(shown) == len(axes.get_yticks()) <= 20
    assert all(float(text.replace(",", "")) == pytest.approx(y, rel=1e-9) for text, y in shown.items())
    assert len({len(text.partition(".")[2]) for text in shown}) == 1 or values[0] < 1


def test_what_hardly_differs_does_not_fill_the_picture() -> None:
    _, (axes,) = new_figure(4.1)
    axes.plot([1, 2], [351.0, 351.2])
    log_numbers(axes)
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(LEAST_SPAN) and low * high == pytest.approx(351.0 * 351.2, rel=1e-4)


def test_what_is_drawn_is_what_was_measured(findings: Findings) -> None:
    with style():
        (axes,) = by_length(findings, "fixed").axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    for scheme in findings.schemes:
        x, y = lines[scheme].get_data()
        assert [findings.at("fixed", int(n))[scheme].perplexity for n in x] == pytest.approx(list(y))


def test_lines_that_lie_on_each_other_are_told_apart_by_their_gaps(findings: Findings) -> None:
    with style():
        above, below = by_position(findings).axes
    there = findings.probes["position"][
        findings.probes["position"]["length"] == findings.probes["position"]["length"].max()
    ]
    losses = there.pivot(index="bucket_start", columns="scheme", values="loss")
    for axes, drawn in ((above, losses), (below, losses.sub(losses["qk_rope"], axis=0))):
        lines = {str(line.get_label()): line.get_ydata() for line in axes.get_lines()}
        for scheme in findings.schemes:
            assert lines[scheme] == pytest.approx(drawn[scheme].to_numpy())
    assert below.get_ylabel() == "gap to qk_rope, nats/token"


def test_dots_and_rings_are_explained(findings: Findings) -> None:
    for found, said in ((findings, ["a seed", "published"]), (replace(findings, against=[]), ["a seed"])):
        with style():
            (legend,) = gaps(found, "qk_rope").legends
        assert [text.get_text() for text in legend.get_texts()] == said


def test_every_picture_draws_and_names_its_units(findings: Findings) -> None:
    for stem, figure in draw_all(findings).items():
        text = svg(figure)
        assert "nats/token" in text or "perplexity" in text, stem
        assert re.search(r">[^<]*(token)", text), stem
        assert png(figure).startswith(b"\x89PNG")


def test_a_figure_gives_the_same_file_twice(findings: Findings) -> None:
    with style():
        assert svg(by_length(findings, "fixed")) == svg(by_length(findings, "fixed"))


def test_names_are_shortened_and_never_hidden() -> None:
    assert short("x" * 60) == "x" * 23 + "…" and short("_hidden").strip("\u200a") == "_hidden"
    assert not short("_hidden").startswith("_")


def test_tokens_in_short() -> None:
    assert [tokens_text(n) for n in (0, 999, 1500, 50_000, 1_500_000, 2e9)] == ["0", "999", "1.5k", "50k", "1.5M", "2G"]
