"""Batch n is a pure function of the seed, n and the tokens; an epoch sees every window once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posbench.data import Split
from posbench.data.text.corpus import TextBatches
from tests.refusals import refuses


def counting(num_tokens, name="train"):
    """Return a split whose token number i is i, so that a window shows its position in the split."""
    starts = np.array([0, num_tokens], np.int64)
    return Split(name, np.arange(num_tokens, dtype=np.uint32), starts, np.array([num_tokens], np.int64), None)


@given(context=st.integers(1, 20), extra=st.integers(1, 300), batch=st.integers(1, 7), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_is_every_window_once(context, extra, batch, seed):
    split = counting(context + extra)
    batches = TextBatches(split, context, batch, seed)
    count = batches.windows_per_epoch
    rows = np.concatenate([batches.batch(n).tokens for n in range(-(-3 * count // batch))])
    assert rows.shape[1] == context + 1 and rows.dtype == np.int64
    assert (np.diff(rows, axis=1) == 1).all(), "a window is a stretch of the text"
    for epoch in range(3):
        starts = np.sort(rows[epoch * count : (epoch + 1) * count, 0])
        assert (np.diff(starts) == context).all(), "no window twice, none left out: each target once"
        assert starts[0] < context and split.num_tokens - 1 - (starts[-1] + context) < 2 * context, (
            "to the ends of the text"
        )


@given(n=st.integers(0, 10_000), earlier=st.lists(st.integers(0, 10_000), max_size=4))
def test_a_batch_does_not_depend_on_what_was_read_before(n, earlier):
    split = counting(997)
    fresh, used = TextBatches(split, 10, 4, seed=3), TextBatches(split, 10, 4, seed=3)
    for number in earlier:
        used.batch(number)
    assert np.array_equal(fresh.batch(n).tokens, used.batch(n).tokens)


def test_seeds_and_epochs_differ_in_order_and_phase():
    split = counting(5_000)
    count = TextBatches(split, 16, 1, 0).windows_per_epoch
    orders = [
        tuple(int(TextBatches(split, 16, 1, seed).batch(epoch * count + n).tokens[0, 0]) for n in range(count))
        for seed in range(4)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 12
    assert len({min(order) for order in orders}) > 4, "the cuts fall elsewhere each epoch"


def test_the_draws_are_pinned():
    """Numbers written down once: no change of NumPy or of this code may change a seed's batches unnoticed."""
    batches = TextBatches(counting(1_000), 8, 4, seed=7)
    assert [row[0] for row in batches.batch(0).tokens] == PINNED_FIRST
    assert [row[0] for row in batches.batch(1000).tokens] == PINNED_LATER


PINNED_FIRST = [422, 126, 782, 110]
PINNED_LATER = [675, 875, 275, 451]


def test_a_split_shorter_than_a_context_is_refused_with_its_counts():
    assert TextBatches(counting(11), 10, 2, 0).batch(0).tokens.tolist() == [list(range(11))] * 2
    refuses(r"validation split has 10 tokens in 1 documents", TextBatches, counting(10, "validation"), 10, 2, 0)
    refuses("test split has 0 tokens in 1 documents", TextBatches, counting(0, "test"), 10, 2, 0)
