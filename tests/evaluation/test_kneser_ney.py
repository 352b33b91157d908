"""Kneser-Ney models: by a brute-force definition, on the text that a run read, stored once a seed."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from posbench.config import Config
from posbench.data import prepare
from posbench.evaluation import Question
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.kneser_ney import KneserNey, discounts
from posbench.evaluation.ngrams import text_read, windows_read
from posbench.runs import Run, find_runs
from posbench.runs.ngrams import ngrams_of, task_of
from posbench.runs.pack import pack
from posbench.training import train

V, LONGEST = 4, 4
Gram = tuple[int, ...]


def probability(target: int, context: Gram, read: set[tuple[int, Gram]], order: int, is_whole: bool = True) -> float:
    """The definition, from a set of (place, n-gram) of every length: each stands once in it."""
    if order == 0:
        return 1 / V
    history = context[len(context) - order + 1 :]
    places = {(place, gram) for place, gram in read if len(gram) == order + (not is_whole)}
    if is_whole:
        counts = Counter(gram for _, gram in places)
    else:
        counts = Counter(gram[1:] for gram in {gram for _, gram in places})
    taken = discounts(np.array(list(counts.values()), np.int64))
    behind = {w: counts[(*history, w)] for w in range(V)}
    total = sum(behind.values())
    lower = probability(target, context, read, order - 1, is_whole=False)
    if not total:
        return lower
    left = sum(taken[min(count, 3)] for count in behind.values()) / total
    return float((behind[target] - taken[min(behind[target], 3)]) / total + left * lower)


@given(
    text=st.lists(st.integers(0, V - 1), min_size=8, max_size=60),
    starts=st.sets(st.integers(0, 40), min_size=1, max_size=6),
    context_length=st.integers(2, 6),
    scored=st.lists(st.integers(0, V - 1), min_size=6, max_size=6),
)
def test_probabilities_are_those_of_the_definition(
    text: list[int], starts: set[int], context_length: int, scored: list[int]
) -> None:
    """Windows overlap here, and leave gaps; an n-gram counts where it stands within one of them, once a place."""
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


def test_discounts_are_those_of_chen_and_goodman() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [60, 20, 10, 5, 3])
    y = 60 / (60 + 2 * 20)
    assert discounts(counts) == pytest.approx([0, 1 - 2 * y * 20 / 60, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10])
    assert discounts(np.array([1, 1, 2])).tolist() == [0, 0.5, 1, 1.5]


@pytest.fixture
def made(config: Callable[..., Config]) -> list[Run]:
    """Two schemes, two seeds."""
    names = [(name, seed) for name in ("nope", "qk_rope") for seed in (0, 1)]
    return [train(config(f"scheme={name}", f"seed={seed}", "train.steps=1")) for name, seed in names]


@pytest.fixture
def run(config: Callable[..., Config]) -> Run:
    return train(config("scheme=nope", "train.steps=1"))


def evaluated(runs: list[Run], **question: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    evaluate_runs(runs, Question(lengths=(128,), device="cpu", dtype="float32", **question), console)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_it_is_computed_once_a_seed_and_found_in_a_pack(made: list[Run], tmp_path: Path) -> None:
    said = evaluated(made)
    assert re.findall(r"seed \d: Kneser-Ney 2, 3, 5 on the same batches: ", said) == [
        f"seed {n}: Kneser-Ney 2, 3, 5 on the same batches: " for n in (0, 1)
    ]
    folder = made[0].path.parents[1]
    assert len(list((folder / "ngrams").iterdir())) == 2
    assert "Kneser-Ney" not in evaluated(made) and evaluated(made, again=True).count("Kneser-Ney") == 2
    pack(folder, tmp_path / "packed", pytest.fail)
    records = [ngrams_of(run) for run in find_runs(tmp_path / "packed")]
    assert records == [ngrams_of(run) for run in find_runs(folder)]
    assert all(len(of_run) == 1 and not faults for of_run, faults in records)
    assert records[0] == records[2] != records[1]


def test_a_record_is_of_the_batches_and_the_windows_that_the_run_recorded(run: Run) -> None:
    evaluated([run])
    ((record,), _) = ngrams_of(run)
    corpus = prepare(run.config)
    starts, batches = windows_read(run.config, corpus)
    assert batches == run.manifest.fingerprints.batches
    (validation,) = [result for result in run.results()[0] if result.protocol == "validation"]
    assert record.targets == validation.windows["targets"].sum() and record.task == task_of(run.manifest, validation)
    assert record.bits_per_byte(2) / record.losses[2] == pytest.approx(validation.bits_per_byte / validation.loss)
    assert record.tokens == 4 * 32 == len(starts) * 32


def test_what_was_altered_is_named_and_made_again(run: Run) -> None:
    evaluated([run])
    (file,) = (run.path.parents[1] / "ngrams").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "losses": {"2": 0.1, "3": 0.1, "5": 0.1}}))
    records, faults = ngrams_of(run)
    assert not records and faults == [
        f"{file} is not used (it does not match its checksum). To make it again: posbench eval {run.path}"
    ]
    assert "Kneser-Ney" in evaluated([run]) and ngrams_of(run)[0][0].losses == {
        int(order): loss for order, loss in whole["losses"].items()
    }


def test_other_batches_than_recorded_give_no_lines(run: Run) -> None:
    run.update_manifest(fingerprints=replace(run.manifest.fingerprints, batches="0" * 16))
    assert f"no n-gram models, because {run.name} was trained on other batches (fingerprint 0000" in evaluated([run])
    assert ngrams_of(run) == ([], [])


def test_a_run_of_more_tokens_than_the_setting_has_none(config: Callable[..., Config]) -> None:
    run = train(config("train.steps=2", "evaluation.ngram_tokens=255"))
    assert "Kneser-Ney" not in evaluated([run]) and run.manifest.tokens == 256


def test_text_that_epochs_bring_back_counts_once() -> None:
    """Windows of other phases overlap; a token is read once, with the most that any window shows before it."""
    tokens, depths = text_read(np.arange(20, dtype=np.uint16), np.array([0, 2, 8]), 4, 5)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert depths.tolist() == [1, 2, 3, 4, 5, 4, 5, 1, 2, 3, 4, 5]
