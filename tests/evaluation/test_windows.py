"""Every length scores the same tokens, spread evenly over all documents."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.config import EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.windows import choose_evenly
from tests.refusals import refuses

VALIDATION, FIXED, NONOVERLAPPING = (PROTOCOLS[name] for name in ("validation", "fixed", "nonoverlapping"))
SETTINGS = EvaluationConfig(targets=4, windows=8, max_tokens=10_000)
documents = st.lists(st.integers(2, 200), min_size=1, max_size=8)


def _split(sizes):
    starts = np.cumsum([0, *sizes])
    return Split("test", np.arange(starts[-1]), starts, np.array(sizes), None)


def _targets(windows):
    return [t for w in windows for t in range(w.start + w.length - w.scored + 1, w.start + w.length + 1)]


@given(documents, st.integers(4, 64), st.integers(4, 64))
def test_fixed_targets_are_the_same_at_every_length_and_stay_in_their_document(sizes, length, anchor):
    length, anchor = min(length, anchor), max(length, anchor)
    split = _split(sizes)
    if max(sizes) <= anchor:
        refuses(
            f"length {anchor} is longer than the text.*{max(sizes) - 1} tokens in its longest",
            FIXED.windows,
            split,
            length,
            SETTINGS,
            anchor,
        )
        return
    windows = FIXED.windows(split, length, SETTINGS, anchor)
    assert _targets(windows) == _targets(FIXED.windows(split, anchor, SETTINGS, anchor))
    assert len(set(_targets(windows))) == len(windows) * 4 and len(windows) <= 8
    for window in windows:
        document = np.searchsorted(split.starts, window.start, side="right") - 1
        assert window.start + window.length < split.starts[document + 1]


@given(documents, st.integers(2, 64))
def test_nonoverlapping_windows_score_every_target_once_in_order(sizes, length):
    split = _split(sizes)
    if split.num_tokens <= length:
        refuses("longer than the text", NONOVERLAPPING.windows, split, length, SETTINGS, length)
        return
    targets = _targets(NONOVERLAPPING.windows(split, length, SETTINGS, length))
    assert targets == list(range(1, len(targets) + 1))
    assert split.num_tokens - 1 - len(targets) < length


def test_a_token_bound_holds():
    split = _split([5000])
    bounded = replace(SETTINGS, max_tokens=1000)
    assert sum(w.length for w in NONOVERLAPPING.windows(split, 100, bounded, 100)) == 1000
    refuses(
        r"^evaluation\.max_tokens=1000 is less than one window of length 1001: raise",
        NONOVERLAPPING.windows,
        split,
        1001,
        bounded,
        1001,
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 60))
def test_places_are_dealt_to_documents_in_rounds(rooms, number):
    """No document has two fewer than another unless all its places are taken, and no place is taken twice."""
    chosen = choose_evenly(np.array(rooms), number)
    assert len(chosen) == min(number, sum(rooms)) and (np.diff(chosen) > 0).all()
    shares = np.bincount(np.searchsorted(np.cumsum(rooms), chosen, side="right"), minlength=len(rooms))
    assert (shares <= rooms).all()
    assert all(share >= shares.max() - 1 or share == room for share, room in zip(shares, rooms, strict=True))


@pytest.mark.parametrize("protocol", [NONOVERLAPPING, FIXED], ids=lambda p: p.name)
def test_lengths_that_divide_the_longest_score_the_same_targets(protocol):
    split = _split([3000, 700, 900])
    bounded = replace(SETTINGS, max_tokens=1024)
    targets = [sorted(_targets(protocol.windows(split, length, bounded, 256))) for length in (32, 64, 256)]
    assert targets[0] == targets[1] == targets[2] and len(targets[0]) > 8


def test_targets_that_do_not_fit_into_a_length_are_not_made_fewer():
    refuses(r"evaluation\.targets=4 does not fit into length 3", FIXED.windows, _split([3000, 700]), 3, SETTINGS, 256)
