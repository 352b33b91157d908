"""A card's claims follow from intervals over documents, with enough windows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from posbench.analysis.card import FLAT, OPEN, RISES, TOO_FEW, Card, Choice, Difference, Step, difference, order_reach
from posbench.reporting.card import card_lines

DOCUMENTS = 20


def fixed(losses):
    """Return a result of `fixed` with one window of 64 targets in each document. Arguments: losses, their means."""
    documents = np.arange(len(losses))
    return pd.DataFrame({"document": documents, "start": 1000 * documents, "targets": 64, "nll": 64 * losses})


def test_a_difference_is_paired_by_window():
    random = np.random.default_rng(0)
    level, apart = random.normal(3, 1, DOCUMENTS), random.normal(0.5, 0.1, DOCUMENTS)
    rise = difference(fixed(level + apart), fixed(level))
    assert rise.half is not None
    assert rise.nats == pytest.approx(apart.mean())
    assert rise.half == pytest.approx(2.093 * apart.std(ddof=1) / DOCUMENTS**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("nats", "half", "windows", "verdict"),
    [
        (0.00, 0.015, 16, FLAT),
        (0.01, 0.015, 16, OPEN),
        (0.05, 0.015, 16, RISES),
        (-0.1, 0.200, 16, OPEN),
        (0.00, 0.001, 15, TOO_FEW),
        (3.90, 1.400, 4, RISES),
        (1.40, 1.390, 4, TOO_FEW),
        (0.00, None, 16, TOO_FEW),
    ],
)
def test_a_loss_does_not_rise_if_the_interval_ends_below_the_margin(nats, half, windows, verdict):
    assert Step(nats, half, 256, windows).verdict == verdict


def card(*steps):
    return Card("tiny", "TINY", 256, None, False, True, False, steps, 64, 128, None, 256, None, None)


def test_the_line_stops_at_the_first_length_that_rises():
    steps = Step(-0.1, 0.01, 128, 16), Step(0.0, 0.01, 256, 16), Step(3.9, 1.4, 512, 16), Step(0.0, 0.01, 1024, 16)
    line, first_command, *_ = card_lines(card(*steps))
    assert line == (
        "tiny: loss does not rise up to 256 tokens (trained: 256) and rises by 3.9 ±1.4 nats at 512; order is used up "
        "to 64 tokens back"
    )
    assert first_command.startswith("– rescaling: posbench eval TINY")
    assert "may rise at 256 (+0.003 ±0.050 nats)" in card_lines(card(Step(0.003, 0.05, 256, 16)))[0]
    assert "too few windows" in card_lines(card(Step(0.02, 0.05, 256, 4)))[0]
    few = card_lines(card(Step(0.0, 0.01, 256, 4), Step(3.9, 1.4, 512, 4)))[0]
    assert "loss rises by 3.9 ±1.4 nats at 512 (4 windows); too few windows to say up to where" in few


def test_a_base_that_is_not_certainly_better_is_not_called_better():
    for half, words in ((0.01, "is better than the one in config.json"), (0.1, "but not certainly better")):
        choice = Choice(256, "base=1e6", ["", "base=1e6"], Difference(-0.05, half))
        assert words in card_lines(replace(card(), base=choice))[1]


def test_order_counts_up_to_the_first_distance_that_is_not_certain():
    random = np.random.default_rng(0)
    rows = []
    for end, worth in ((2, 0.5), (3, 0.3), (5, 0.05), (9, 0.0), (17, 0.2)):
        lost = worth + random.normal(0, 0.01, DOCUMENTS)
        rows += [(n, end, 10, 30.0, 30.0 + 10 * lost[n]) for n in range(DOCUMENTS)]
    windows = pd.DataFrame(rows, columns=["document", "bucket_end", "targets", "nll", "shuffled_nll"])
    assert order_reach(windows) == (4, 16)
