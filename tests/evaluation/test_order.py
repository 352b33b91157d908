"""The protocol `order` finds how far back order matters, on models built so that this is known."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posbench.composition.compose import compose
from posbench.config import EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.order import (
    FAR,
    LOSSES,
    WINDOWS,
    bucket_edges,
    losses,
    sequences,
    window_starts,
    worth_beyond_near,
)
from posbench.model.decoder import Decoder, build_model
from posbench.reporting.protocols.order import threshold_table
from tests.refusals import refuses

ORDER = PROTOCOLS["order"]
VOCABULARY, LENGTH = 16, 64
SETTINGS = EvaluationConfig(order_windows=64, batch_tokens=10 * LENGTH)


def split_of(documents):
    starts = np.cumsum([0, *map(len, documents)])
    return Split("test", np.concatenate(documents), starts, np.diff(starts), None)


@pytest.fixture(scope="module")
def split():
    return repetitive(40)


def repetitive(number):
    """Return documents that mostly repeat the last token but one, else one of their four tokens."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(number):
        topic = random.permutation(VOCABULARY)[:4]
        tokens = random.choice(topic, 300)
        for t in np.flatnonzero(random.random(300) < 0.8):
            tokens[t] = tokens[max(t - 2, 0)]
        documents.append(tokens)
    return split_of(documents)


def decoder(*words):
    sizes = ("model=tiny", "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.init_std=0.1")
    return build_model(compose([*sizes, f"train.context_length={LENGTH}", *words]), VOCABULARY)


class Reader(Decoder):
    """A decoder whose loss is a function of the last `reads` tokens."""

    reads = 1

    def nll(self, tokens, targets, offset=0, last=None):
        weights = torch.arange(1, self.reads + 1, dtype=torch.float64).sqrt()
        losses = torch.nn.functional.pad(tokens.double(), (self.reads - 1, 0)).unfold(1, self.reads, 1) @ weights
        return losses[:, -(last or losses.shape[1]) :]


@pytest.mark.parametrize("reads", [1, 2, 5, 33])
def test_a_model_of_so_many_tokens_feels_nothing_from_that_distance_on(split, reads):
    model = decoder()
    model.__class__ = type("Reader", (Reader,), {"reads": reads})
    corpus = None
    rows, _ = ORDER.score(model, corpus, split, LENGTH, SETTINGS, LENGTH, lambda tokens: None)
    rows = rows.assign(**{name: (rows[name] - rows["nll"]).abs() for name in LOSSES[1:]})
    felt = rows.groupby("bucket_start")[list(LOSSES[1:])].sum() > 1e-9
    assert felt.index.tolist() == [1, 2, 3, 5, 9, 17]  # of 32 distances
    for reading in felt:
        assert felt[reading].tolist() == (felt.index < reads).tolist()


def test_the_three_readings_differ_in_their_first_half_alone():
    numbered = split_of([np.arange(300 * n, 300 * n + 300) for n in range(40)])  # a token is its place in the stream
    starts, middle = window_starts(numbered, LENGTH, 64), LENGTH // 2
    whole, shuffled, swapped = sequences(numbered, starts, LENGTH)
    assert np.array_equal(whole, np.array(starts)[:, None] + np.arange(LENGTH + 1))
    assert np.array_equal(np.sort(shuffled[:, :middle]), whole[:, :middle])
    assert (shuffled[:, :middle] != whole[:, :middle]).any(axis=1).all()
    document, first = swapped[:, :middle] // 300, swapped[:, :1]
    assert (document == document[:, :1]).all() and (document[:, 0] != whole[:, 0] // 300).all()
    assert np.array_equal(swapped[:, :middle], first + np.arange(middle)) and (first % 300 > 0).all()
    for reading in (shuffled, swapped):
        assert np.array_equal(reading[:, middle:], whole[:, middle:])
    assert np.array_equal(sequences(numbered, starts[7:8], LENGTH)[:, 0], np.stack((whole, shuffled, swapped))[:, 7])


def test_the_other_document_may_be_just_long_enough_and_is_not_left():
    """A document of 33 tokens has one place for half a window: all tokens after the first."""
    documents = split_of([np.arange(300), np.arange(300, 333), np.arange(333, 343)])
    _, _, swapped = sequences(documents, [1, 100], LENGTH)
    assert np.array_equal(swapped[:, : LENGTH // 2], np.tile(np.arange(301, 333), (2, 1)))


@given(st.lists(st.integers(2, 90), min_size=1, max_size=12), st.integers(2, 20), st.integers(1, 40))
def test_windows_are_spread_inside_documents(sizes, length, count):
    split = split_of([np.zeros(size, dtype=np.uint16) for size in sizes])
    room = np.array([(size - 1) // (length + 1) for size in sizes])
    if not room.any():
        refuses(f"length {length} is longer than the text", window_starts, split, length, count)
        return
    starts = window_starts(split, length, count)
    documents = np.searchsorted(split.starts, starts, side="right") - 1
    assert (np.array(starts) > split.starts[documents]).all()  # after the first token
    assert (np.array(starts) + length + 1 <= split.starts[documents + 1]).all()
    assert (np.diff(starts) > length).all()
    assert len(starts) == min(count, room.sum())


@given(st.integers(1, 5000))
def test_buckets_are_1_2_3_to_4_5_to_8_and_so_on(distances):
    edges = bucket_edges(distances)
    assert edges[0] == 1 and edges[-1] == distances + 1
    expected = [(distance - 1).bit_length() for distance in range(1, distances + 1)]
    bucket = np.searchsorted(edges, np.arange(1, distances + 1), side="right") - 1
    assert np.array_equal(bucket, expected)


def test_identity_needs_a_second_document():
    refuses(
        "order at length 64 needs a second document of 32 tokens",
        sequences,
        split_of([np.zeros(200, dtype=np.uint16), np.zeros(20, dtype=np.uint16)]),
        [1],
        LENGTH,
    )


@pytest.mark.parametrize("length", [128, 200])
def test_what_training_scores_is_the_bucket_beyond_32_tokens(split, length):
    """Training reads only a part of a window of 200 tokens."""
    corpus = None
    model, settings = decoder("train.context_length=128", "scheme=qk_rope"), EvaluationConfig(order_windows=64)
    rows, _ = ORDER.score(model.eval(), corpus, split, length, settings, length, lambda tokens: None)
    [sums] = rows[rows["bucket_start"] == 33].groupby("bucket_start")[["targets", *LOSSES]].sum().itertuples()
    expected = (sums.shuffled_nll - sums.nll) / sums.targets
    worth = worth_beyond_near(model, split, length, 1000)
    assert worth["order_beyond_32"] == pytest.approx(expected, abs=1e-7) and expected != 0
    figures = ["order_beyond_8", "order_beyond_16", "order_beyond_32", "copyable_order_beyond_32"]
    assert list(worth) == figures


def copies(window, i):
    """Return whether the token after the longest match more than 32 back, of 4 tokens or more, is token i."""
    longest, copy = 0, None
    for j in range(1, i - 32):
        size = 0
        while size < j and window[j - 1 - size] == window[i - 1 - size]:
            size += 1
        if size >= longest:
            longest, copy = size, window[j]
    return longest >= 4 and copy == window[i]


@pytest.mark.parametrize("documents", [32, pytest.param(500, marks=pytest.mark.slow)])
def test_the_order_of_copyable_targets_is_that_of_a_plain_loop(documents):
    """Every target of 64 or 1,000 windows, one by one: those that the copier finds, beyond 32 intact tokens."""
    split, length, corpus = repetitive(documents), 128, cast(Any, None)
    model, settings = decoder("train.context_length=128", "scheme=qk_rope").eval(), EvaluationConfig(order_windows=1000)
    rows, _ = ORDER.score(model, corpus, split, length, settings, length, lambda tokens: None)
    starts = window_starts(split, length, 1000)
    whole, shuffled, _ = losses(model, split, starts, length, 16384)
    expected = {"targets": 0, "nll": 0.0, "shuffled_nll": 0.0}
    for window, start in enumerate(starts):
        tokens = split.tokens[start : start + length + 1].tolist()
        for d in range(33, 65):
            if copies(tokens, length // 2 + d):
                expected["targets"] += 1
                expected["nll"] += whole[window, d - 1]
                expected["shuffled_nll"] += shuffled[window, d - 1]
    sums = rows[rows["bucket_start"] == 33][[f"copyable_{name}" for name in expected]].sum()
    assert 0 < expected["targets"] < len(starts) * 32
    assert sums.to_dict() == pytest.approx({f"copyable_{name}": value for name, value in expected.items()})
    assert len(starts) == 2 * documents
    if len(starts) == WINDOWS:
        worth = worth_beyond_near(model, split, length, 16384)["copyable_order_beyond_32"]
        assert worth == pytest.approx((expected["shuffled_nll"] - expected["nll"]) / expected["targets"])


def test_onsets_at_three_thresholds():
    """Two seeds, scored every million tokens: lines between the scores cross the thresholds where a ruler says."""
    worth = {0: [0.0, 0.04, 0.08, 0.12], 1: [0.0, 0.0, 0.03, 0.06]}
    lines = pd.DataFrame(
        [
            {"scheme": "alibi", "seed": seed, "tokens": 1_000_000 * (n + 1), FAR: value}
            for seed, values in worth.items()
            for n, value in enumerate(values)
        ]
    )
    compared = SimpleNamespace(schemes=["alibi"], runs=pd.DataFrame({"tokens": [4_000_000]}))
    [row] = threshold_table(lines, compared).frame.to_dict("records")
    assert row == {"scheme": "alibi", "0.02 nats": "1.5M (2/2)", "0.05 nats": "2.25M (2/2)", "0.1 nats": "3.5M (1/2)"}
