"""Kneser-Ney models: by a brute-force definition, on the text that a run read, stored once a seed."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ngrams import ORDERS, KneserNey, discounts, holders, losses_of, text_read, windows_read
from posbench.config import ConfigError
from posbench.data import prepare
from posbench.training import train

V, LONGEST = 4, 4


def probability(target, context, read, order, is_whole=True):
    """Compute the definition from a set of (place, n-gram) of every length, each of which it holds once."""
    if order == 0:
        return 1 / V
    history = context[len(context) - order + 1 :]
    places = {(place, gram) for place, gram in read if len(gram) == order + (not is_whole)}
    if is_whole:
        counts = Counter(gram for _, gram in places)
    else:
        counts = Counter(gram[1:] for gram in {gram for _, gram in places})
    subtracted = discounts(np.array(list(counts.values()), np.int64))
    follower_counts = {w: counts[(*history, w)] for w in range(V)}
    total = sum(follower_counts.values())
    lower = probability(target, context, read, order - 1, is_whole=False)
    if not total:
        return lower
    freed = sum(subtracted[min(count, 3)] for count in follower_counts.values()) / total
    return float((follower_counts[target] - subtracted[min(follower_counts[target], 3)]) / total + freed * lower)


@given(
    text=st.lists(st.integers(0, V - 1), min_size=8, max_size=60),
    starts=st.sets(st.integers(0, 40), min_size=1, max_size=6),
    context_length=st.integers(2, 6),
    scored=st.lists(st.integers(0, V - 1), min_size=6, max_size=6),
)
def test_probabilities_are_those_of_the_definition(text, starts, context_length, scored):
    """Windows overlap and leave gaps; an n-gram within any window counts once for each place."""
    begins = sorted(s for s in starts if s + context_length < len(text)) or [0]
    tokens, depths = text_read(np.array(text, np.uint16), np.array(begins), context_length, LONGEST)
    model = KneserNey(tokens, depths, V, LONGEST)
    read = {
        (place, tuple(text[place : place + order]))
        for start in begins
        for order in range(1, LONGEST + 1)
        for place in range(start, start + context_length + 2 - order)
    }
    every = np.stack([np.array([*scored[:-1], w]) for w in range(V)])  # the last token is any of the vocabulary
    predicted = model.probabilities(every)
    for order in range(2, LONGEST + 1):
        assert predicted[order][:, -1].sum() == pytest.approx(1, abs=1e-12)
        for n in range(4):
            defined = probability(scored[n + 1], tuple(scored[: n + 1]), read, min(order, n + 2))
            assert predicted[order][0, n] == pytest.approx(defined, rel=1e-12)


def test_discounts_are_those_of_chen_and_goodman():
    counts = np.repeat([1, 2, 3, 4, 9], [60, 20, 10, 5, 3])
    y = 60 / (60 + 2 * 20)
    assert discounts(counts) == pytest.approx([0, 1 - 2 * y * 20 / 60, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10])
    assert discounts(np.array([1, 1, 2])).tolist() == [0, 0.5, 1, 1.5]


@pytest.fixture
def run(config):
    return train(config("scheme=nope", "train.steps=1"))


def test_they_read_the_batches_and_windows_of_the_run(run):
    corpus = prepare(run.config)
    starts, batches = windows_read(run.config, corpus)
    assert batches == run.manifest.fingerprints.batches and len(starts) == 4
    losses = losses_of(run)
    assert [*losses] == list(ORDERS) and all(0 < loss < np.log(corpus.vocab_size) for loss in losses.values())


def test_other_batches_than_recorded_are_refused(run):
    run.update_manifest(fingerprints=replace(run.manifest.fingerprints, batches="0" * 16))
    with pytest.raises(ConfigError, match="was trained on other batches"):
        losses_of(run)


@pytest.mark.parametrize(("name", "shown"), [("headline", "2.307"), ("headline_prose-tune", "2.150")])
def test_the_figures_of_the_results_page_are_in_the_packs(name, shown):
    runs = [run for run in holders(f"runs/reference/{name}") if run.manifest.tokens == 12_288_000]
    assert f"{np.mean([losses_of(run)[5] for run in runs]):.3f}" == shown
    assert f"Kneser-Ney 5 ({shown})" in Path("docs/results.md").read_text(encoding="utf-8")
