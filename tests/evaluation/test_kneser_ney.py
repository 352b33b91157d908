"""Kneser-Ney models: by a brute-force definition, on the text that a run read, stored once a seed."""

import io
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from posbench.data import prepare
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.ngram import ORDERS, KneserNey, discounts, text_read, windows_read
from posbench.evaluation.request import Request
from posbench.runs import find_runs
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
def trained_runs(config):
    """Return finished runs of two schemes and two seeds."""
    names = [(name, seed) for name in ("nope", "qk_rope") for seed in (0, 1)]
    return [train(config(f"scheme={name}", f"seed={seed}", "train.steps=1")) for name, seed in names]


@pytest.fixture
def run(config):
    return train(config("scheme=nope", "train.steps=1"))


def evaluated(runs, **request):
    console = Console(file=io.StringIO(), width=200)
    evaluate_runs(runs, Request(protocols=("ngram",), **request), console)
    return console.file.getvalue()


def ngrams(runs):
    return [result for run in runs for result in run.results()[0] if result.protocol == "ngram"]


@pytest.mark.slow
def test_they_are_scored_once_a_seed_on_the_batches_and_windows_of_its_runs(trained_runs):
    assert evaluated(trained_runs).count("Kneser-Ney 2, 3, 5 on the same batches: ") == 2
    held = ngrams(find_runs(trained_runs[0].path.parents[1]))
    assert [result.header["batches"] for result in held] == [
        run.manifest.fingerprints.batches for run in trained_runs[:2]
    ]
    assert (
        "Kneser-Ney" not in evaluated(trained_runs[::-1])
        and evaluated(trained_runs, again=True).count("Kneser-Ney") == 2
    )
    assert len(ngrams(trained_runs)) == 2
    result, run = held[0], trained_runs[0]
    corpus = prepare(run.config)
    starts, batches = windows_read(run.config, corpus)
    assert batches == run.manifest.fingerprints.batches and result.header["tokens"] == 4 * 32 == len(starts) * 32
    [validation] = [stored for stored in run.results()[0] if stored.protocol == "validation"]
    scored = ["document", "start", "targets", "bytes"]
    for order in ORDERS:
        of_order = result.windows[result.windows["order"] == order].reset_index(drop=True)
        assert of_order[scored].equals(validation.windows[scored])
        loss = of_order["nll"].sum() / of_order["targets"].sum()
        assert result.header["losses"][str(order)] == pytest.approx(loss)


def test_bits_a_byte_are_those_of_the_longest_model(run):
    evaluated([run])
    [result] = ngrams([run])
    rows = result.windows[result.windows["order"] == max(ORDERS)]
    assert result.header["nll_mean"] == pytest.approx(rows["nll"].sum() / rows["targets"].sum())
    assert result.header["bits_per_byte"] == pytest.approx(rows["nll"].sum() / math.log(2) / rows["bytes"].sum())


def test_other_batches_than_recorded_or_too_many_tokens_give_none(run, config):
    run.update_manifest(fingerprints=replace(run.manifest.fingerprints, batches="0" * 16))
    assert f"no n-gram models, because {run.name} was trained on other batches (fingerprint 0000" in evaluated([run])
    assert not ngrams([run])
    long = train(config("train.steps=2", "evaluation.ngram_tokens=255"))
    assert "Kneser-Ney" not in evaluated([long]) and long.manifest.tokens == 256
