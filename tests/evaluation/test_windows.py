"""Every length scores the same tokens, spread evenly over all documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.config import ConfigError, EvaluationConfig, parse_length
from posbench.data import Split
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.windowed import Windowed
from posbench.evaluation.windows import Window, choose_evenly

VALIDATION, FIXED, NONOVERLAPPING = (PROTOCOLS[name] for name in ("validation", "fixed", "nonoverlapping"))
SETTINGS = EvaluationConfig(targets=4, windows=8, max_tokens=10_000)
documents = st.lists(st.integers(2, 200), min_size=1, max_size=8)


def _split(sizes: list[int]) -> Split:
    starts = np.cumsum([0, *sizes])
    return Split("test", np.arange(starts[-1]), starts, np.array(sizes), None)


def _targets(windows: list[Window]) -> list[int]:
    return [t for w in windows for t in range(w.start + w.length - w.scored + 1, w.start + w.length + 1)]


@given(documents, st.integers(4, 64), st.integers(4, 64))
def test_fixed_targets_are_the_same_at_every_length_and_stay_in_their_document(
    sizes: list[int], length: int, anchor: int
) -> None:
    length, anchor = min(length, anchor), max(length, anchor)
    split = _split(sizes)
    if max(sizes) <= anchor:
        with pytest.raises(
            ConfigError, match=f"length {anchor} is longer than the text.*{max(sizes) - 1} tokens in its longest"
        ):
            FIXED.windows(split, length, SETTINGS, anchor)
        return
    windows = FIXED.windows(split, length, SETTINGS, anchor)
    assert _targets(windows) == _targets(FIXED.windows(split, anchor, SETTINGS, anchor))
    assert len(set(_targets(windows))) == len(windows) * 4 and len(windows) <= 8
    for window in windows:
        document = np.searchsorted(split.starts, window.start, side="right") - 1
        assert window.start + window.length < split.starts[document + 1]


@given(documents, st.integers(2, 64))
def test_nonoverlapping_windows_score_every_target_once_in_order(sizes: list[int], length: int) -> None:
    split = _split(sizes)
    if split.num_tokens <= length:
        with pytest.raises(ConfigError, match="longer than the text"):
            NONOVERLAPPING.windows(split, length, SETTINGS, length)
        return
    targets = _targets(NONOVERLAPPING.windows(split, length, SETTINGS, length))
    assert targets == list(range(1, len(targets) + 1))
    assert split.num_tokens - 1 - len(targets) < length


def test_a_token_bound_holds() -> None:
    split = _split([5000])
    bounded = replace(SETTINGS, max_tokens=1000)
    assert sum(w.length for w in NONOVERLAPPING.windows(split, 100, bounded, 100)) == 1000
    with pytest.raises(
        ConfigError, match=r"^evaluation\.max_tokens=1000 is less than one window of length 1001: raise"
    ):
        NONOVERLAPPING.windows(split, 1001, bounded, 1001)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 60))
def test_places_are_dealt_to_documents_in_rounds(rooms: list[int], number: int) -> None:
    """No document has two fewer than another unless all its places are taken, and no place is taken twice."""
    chosen = choose_evenly(np.array(rooms), number)
    assert len(chosen) == min(number, sum(rooms)) and (np.diff(chosen) > 0).all()
    shares = np.bincount(np.searchsorted(np.cumsum(rooms), chosen, side="right"), minlength=len(rooms))
    assert (shares <= rooms).all()
    assert all(share >= shares.max() - 1 or share == room for share, room in zip(shares, rooms, strict=True))


@pytest.mark.parametrize("protocol", [VALIDATION, FIXED, NONOVERLAPPING], ids=lambda p: p.name)
def test_windows_are_of_all_documents_though_one_is_most_of_the_text(protocol: Windowed) -> None:
    split = _split([20_000, *[500] * 19])
    bounded = replace(SETTINGS, max_tokens=40 * 64, windows=40)
    windows = protocol.windows(split, 64, bounded, 64)
    first_targets = np.array([w.start + w.length - w.scored + 1 for w in windows])
    documents = np.searchsorted(split.starts, first_targets, side="right") - 1
    assert np.bincount(documents, minlength=20).tolist() == [2] * 20


@pytest.mark.parametrize("protocol", [NONOVERLAPPING, FIXED], ids=lambda p: p.name)
def test_lengths_that_divide_the_longest_score_the_same_targets(protocol: Windowed) -> None:
    split = _split([3000, 700, 900])
    bounded = replace(SETTINGS, max_tokens=1024)
    targets = [sorted(_targets(protocol.windows(split, length, bounded, 256))) for length in (32, 64, 256)]
    assert targets[0] == targets[1] == targets[2] and len(targets[0]) > 8


def test_targets_that_do_not_fit_into_a_length_are_not_made_fewer() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.targets=4 does not fit into length 3"):
        FIXED.windows(_split([3000, 700]), 3, SETTINGS, 256)


def test_default_lengths_reach_as_far_as_the_text() -> None:
    assert FIXED.lengths([], 256, _split([3000, 400])) == [128, 256, 257, 266, 306, 356, 512, 1024, 2048]
    assert NONOVERLAPPING.lengths([], 256, _split([3000, 400])) == [128, 256, 512, 1024, 2048]


def test_validation_is_of_the_training_length_whatever_is_asked() -> None:
    assert VALIDATION.lengths([512, 1024], 256) == [256]


@pytest.mark.parametrize(("text", "length"), [("8k", 8192), ("4096", 4096), ("1M", 1 << 20), (" 2 ", 2)])
def test_lengths_are_read_as_people_write_them(text: str, length: int) -> None:
    assert parse_length("--length", text) == length


@pytest.mark.parametrize("text", ["0", "1", "8q", "-1", "", "1.0001k", "k", "999999m", "8 k", "0x10"])
def test_a_length_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="8k"):
        parse_length("--length", text)
