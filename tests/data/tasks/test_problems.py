"""The problems of a task: the same for (seed, n), never in two splits, padded to one width, at the asked positions."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench import build_model, compose
from posbench.config import ConfigError, TaskConfig
from posbench.data import Problems
from posbench.data.tasks import build_task, tasks
from posbench.data.tasks.problems import ProblemBatches
from tests.refusals import refuses

FIRST = [[15, 14, 0, 16, 15, 14, 0, 0, 0, 0], [12, 4, 14, 16, 12, 4, 14, 0, 0, 0]]  # of seed 7, pinned


def problems(task="copy", positions="window", **options):
    """Return problems of lengths 2 to 5, tested up to 12."""
    config = TaskConfig(task, task, lengths=[2, 5], longest=12, positions=positions, options=options)
    config.window = Problems(config).window(config.longest)
    return Problems(config)


def rows_of(batch):
    """Return the problems of a batch without their padding."""
    ends = [int(np.flatnonzero(answers >= 0)[-1]) + 2 for answers in batch.answers]
    return {tuple(tokens[:end].tolist()) for tokens, end in zip(batch.tokens, ends, strict=True)}


@settings(max_examples=30)
@given(n=st.integers(0, 10**6), seed=st.integers(0, 2**62), earlier=st.integers(0, 100))
def test_a_batch_follows_from_seed_and_number_alone(n, seed, earlier):
    fresh, used = ProblemBatches(problems(), 3, seed), ProblemBatches(problems(), 3, seed)
    used.batch(earlier)
    assert np.array_equal(fresh.batch(n).tokens, used.batch(n).tokens)
    assert not np.array_equal(fresh.batch(n).tokens, ProblemBatches(problems(), 3, seed + 1).batch(n).tokens)


def test_the_first_batch_is_what_it_was():
    assert ProblemBatches(problems(), 2, 7).batch(0).tokens[:, :10].tolist() == FIRST


@pytest.mark.parametrize("letters", [5, 16])
def test_no_problem_stands_in_two_splits(letters):
    drawn = problems(letters=letters)
    trained = set().union(*(rows_of(ProblemBatches(drawn, 64, 0).batch(n)) for n in range(30)))
    scored = {
        split: set().union(*(rows_of(drawn.splits[split].at_length(n, 64)) for n in range(3, 6)))
        | rows_of(drawn.splits[split].at_trained_lengths(64))
        for split in ("validation", "test")
    }
    assert not trained & scored["test"] and not trained & scored["validation"]
    assert not scored["test"] & scored["validation"]
    assert {sha256(np.array(row, np.int32).tobytes()).digest()[0] % 8 for row in scored["test"]} == {0}


def test_a_space_without_a_problem_for_a_split_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"at length \d fewer than 1 belong to the test split: there are too few",
    ):
        for length in range(2, 6):
            problems(letters=1).splits["test"].at_length(length, 1)


def test_an_evaluation_may_have_other_options_but_no_other_tokens():
    trained = Problems(TaskConfig("flip_flop", "flip_flop", window=100))
    changed = trained.with_options(TaskConfig("flip_flop", "flip_flop", window=100, options={"ignored": 1.0}))
    assert (
        changed.splits["test"].at_length(20, 50).answers >= 0
    ).sum() == 50 and changed.fingerprint == trained.fingerprint
    refuses("change its tokens", problems().with_options, problems(letters=5).config)


def test_answers_alone_are_scored_and_the_rest_is_padding():
    batch = ProblemBatches(problems(), 200, 0).batch(3)
    assert batch.tokens.shape == (200, 11) and batch.answers.shape == (200, 10)
    lengths = (batch.tokens == 16).argmax(axis=1)
    assert set(lengths) == {2, 3, 4, 5}
    for tokens, answers, length in zip(batch.tokens, batch.answers, lengths, strict=True):
        assert answers.tolist() == [-1] * length + tokens[:length].tolist() + [-1] * (10 - 2 * length)


def test_what_is_scored_is_the_same_for_every_run():
    first, second = problems(), problems()
    second.config.lengths = [3, 9]
    for length in (5, 12):
        ours, theirs = (problem_set.splits["test"].at_length(length, 7) for problem_set in (first, second))
        assert np.array_equal(ours.tokens, theirs.tokens)
    more = first.splits["test"].at_length(12, 9)
    assert np.array_equal(more.tokens[:7], ours.tokens)
    refuses(r"length 13 is beyond data\.longest=12 items", first.splits["test"].at_length, 13, 1)


def test_shifted_windows_stand_anywhere_in_training_and_at_0_in_tests():
    drawn = problems(positions="shifted")
    batch = ProblemBatches(drawn, 500, 0).batch(0)
    read = 2 * (batch.tokens == 16).argmax(axis=1)
    inside = np.arange(10) < read[:, None]
    assert (np.diff(batch.positions, axis=1)[inside[:, 1:]] == 1).all()
    assert batch.positions.min() == 0 and batch.positions[inside].max() == 23 == batch.positions.max()
    assert drawn.splits["test"].at_length(5, 9).positions is None
    assert ProblemBatches(problems(), 5, 0).batch(0).positions is None


def test_subsets_ascend_in_training_and_in_tests():
    drawn = problems(positions="subset")
    for batch in (ProblemBatches(drawn, 500, 0).batch(0), drawn.splits["test"].at_length(5, 500)):
        read = 2 * (batch.tokens == 16).argmax(axis=1)
        inside = np.arange(10) < read[:, None]
        assert (np.diff(batch.positions, axis=1)[inside[:, 1:]] > 0).all()
        assert set(batch.positions[inside]) == set(range(24)) and batch.positions.max() == 23
        assert abs(batch.positions[read == read.max(), 4].mean() - 5 * 25 / 11 + 1) < 1  # of 10 of 24, the fifth


def test_windows_follow_from_the_task():
    run_config = compose(["data=copy", "data.lengths=[3,7]", "data.longest=20", "scheme=learned"])
    assert (run_config.train.context_length, run_config.data.window, run_config.experiment_name) == (14, 40, "copy")
    assert build_model(run_config, 17).scheme.first.table.shape == (40, 64)
    assert compose(["data=copy", "data.longest=null", "train.context_length=32"]).data.longest == 64


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.leters=8"], r"data\.leters is not an option of 'copy'; did you mean 'letters'"),
        (["data.lengths=[5,2]"], r"data\.lengths=\[5, 2\] is not two lengths in items"),
        (["data.longest=9"], r"data\.longest=9 is shorter than the longest that is trained, 16"),
        (
            ["train.context_length=33"],
            r"train\.context_length=33 is given, but a problem .* give train.context_length=n",
        ),
        (["data.positions=absolute"], r"data\.positions='absolute' is not known"),
        (["data.letters=30"], r"data=copy refuses data\.letters=30: letters must be a whole number from 1 to 26"),
        (["data=count", "data.questions=16"], r"questions=16 must be less than letters=16"),
        (["data=mqar", "data.keys=4"], r"data=mqar cannot draw problems of length .* keys=4: raise the option keys"),
        (["data.letters=many"], r"data=copy refuses data\.letters=many: "),
    ],
)
def test_what_cannot_be_is_refused(words, says):
    refuses(says, compose, ["data=copy", *words])


def test_a_class_that_gives_no_problems_is_named(monkeypatch):
    monkeypatch.setattr(tasks()["copy"], "problems", lambda self, length, number, rng: ([[0, 1]] * 2, [True, False]))
    refuses(r"problems of data=copy must be tokens from 0 to \d+, one row per", build_task, TaskConfig("copy", "copy"))


def test_a_class_without_tokens_is_refused(monkeypatch):
    monkeypatch.delattr(tasks()["addition"], "tokens")
    refuses("has no tokens", build_task, TaskConfig("addition", "addition"))
