"""Tasks: every answer is found again from the names of the tokens, by a solver that shares no code with its task."""

import numpy as np
import pytest

from posbench.data.tasks.addition import Addition
from posbench.data.tasks.copy import Copy, Reverse
from posbench.data.tasks.count import Count
from posbench.data.tasks.flip_flop import FlipFlop
from posbench.data.tasks.index import Index, IndexFromEnd
from posbench.data.tasks.induction import Induction
from posbench.data.tasks.mqar import Mqar
from posbench.data.tasks.needle import Needle


def copied(names, length):
    assert names[length] == "="
    yield from ((length + 1 + n, names[n]) for n in range(length))


def reversed_(names, length):
    yield from ((length + 1 + n, names[length - 1 - n]) for n in range(length))


def indexed(names, length):
    for at in range(length + 2, len(names), 2):
        yield at, names[int(names[at - 1]) - 1]


def indexed_in_decimals(names, length):
    for at in range(length + 3, len(names), 3):
        yield at, names[int(names[at - 2] + names[at - 1]) - 1]


def indexed_from_end(names, length):
    for at in range(length + 2, len(names), 2):
        yield at, names[:length][-int(names[at - 1])]


def recalled(names, length):
    pairs = dict(zip(names[: 2 * length : 2], names[1 : 2 * length : 2], strict=True))
    assert len(pairs) == length
    queries = [(at, key) for at, key in enumerate(names[:-1]) if at >= 2 * length and key.startswith("k")]
    assert sorted(key for _, key in queries) == sorted(pairs), "each key is asked for once"
    yield from ((at + 1, pairs[key]) for at, key in queries)


def induced(names, length):
    assert len(set(names[:length])) == length
    for at in range(length + 2, len(names)):
        yield at, names[names.index(names[at - 1]) + 1]


def flipped(names, length):
    memory = ""
    for at in range(0, 2 * length, 2):
        if names[at] == "w":
            memory = names[at + 1]
        if names[at] == "r":
            yield at + 1, memory


def counted(names, length):
    assert (names[0], names[length + 1]) == ("^", "?")
    for at in range(length + 3, len(names), 2):
        yield at, str(names[1 : length + 1].count(names[at - 1]))


def added(names, length, step=1):
    first, second = "".join(names).split("=")[0].split("+")
    total = str(int(first[::step]) + int(second[::step])).rjust(length + 1, "0")
    yield from enumerate(total[::step], 2 * length + 2)


def added_least_first(names, length):
    yield from added(names, length, step=-1)


def found(names, length):
    assert sum(name.startswith("K") for name in names) == 2
    yield len(names) - 1, names[names.index(names[-2]) + 1]


TASKS = [
    pytest.param(task, solve, id=f"{type(task).__name__}{n}")
    for n, (task, solve) in enumerate(
        [
            (Copy(), copied),
            (Reverse(letters=5), reversed_),
            (Index(), indexed),
            (Index(letters=26, questions=3, digits=2), indexed_in_decimals),
            (IndexFromEnd(), indexed_from_end),
            (Mqar(), recalled),
            (Mqar(keys=40, values=4, room=1, power=1.0), recalled),
            (Induction(), induced),
            (FlipFlop(), flipped),
            (FlipFlop(ignored=0.1), flipped),
            (Count(), counted),
            (Addition(), added_least_first),
            (Addition(least_first=False), added),
            (Needle(), found),
            (Needle(depth=0.5), found),
        ]
    )
]
of_each_task = pytest.mark.parametrize(("task", "solve"), TASKS)


def named(task, length, rng):
    """Return the token names of a problem, and the positions of its answers."""
    tokens, is_answer = map(np.asarray, task.problems(length, 1, rng))
    return [task.tokens[token] for token in tokens[0]], np.flatnonzero(is_answer).tolist()


@of_each_task
@pytest.mark.parametrize("length", [2, 3, 9, 17, 40])
def test_a_solver_that_reads_the_names_finds_every_answer(task, solve, length):
    rng = np.random.default_rng(length)
    for _ in range(40):
        names, answers = named(task, length, rng)
        solved = list(solve(names, length))
        assert [at for at, _ in solved] == answers and min(answers) > 0
        assert [name for _, name in solved] == [names[at] for at in answers]
        assert len(names) == task.width(length)


@of_each_task
@pytest.mark.parametrize("length", [5, 16, 24])
def test_chance_is_the_share_of_the_most_common_answer(task, solve, length):
    tokens, is_answer = map(np.asarray, task.problems(length, 5000, np.random.default_rng(0)))
    _, times = np.unique(tokens[np.broadcast_to(is_answer, tokens.shape)], return_counts=True)
    assert task.chance(length) == pytest.approx(times.max() / times.sum(), rel=0.05, abs=0.012)


@of_each_task
def test_problems_that_are_drawn_together_differ(task, solve):
    tokens = np.asarray(task.problems(20, 300, np.random.default_rng(0))[0])
    assert len({tuple(row) for row in tokens.tolist()}) == 300


def test_training_shows_every_number_at_every_length():
    rng = np.random.default_rng(0)
    for task in (Index(), IndexFromEnd()):
        for length in (5, 16, 64):
            asked = {name for _ in range(200) for name in named(task, length, rng)[0][length + 1 :: 2]}
            assert asked == {str(number) for number in range(1, min(16, length) + 1)}


def test_queries_follow_the_power_law():
    """Slots are drawn without replacement by zoology's weights: as often as NumPy's own `choice` draws them."""
    rng, pairs, slots = np.random.default_rng(0), 3, 12
    weights = 0.01 * np.arange(1.0, slots + 1) ** (0.01 - 1)
    expected = np.zeros(slots)
    for _ in range(3000):
        expected[rng.choice(slots, size=pairs, replace=False, p=weights / weights.sum())] += 1
    _, is_answer = Mqar(room=4).problems(pairs, 3000, rng)
    drawn = np.asarray(is_answer).sum(axis=0)[2 * pairs + 1 :: 2]
    assert drawn == pytest.approx(expected, abs=200)
    assert drawn[0] > 3 * drawn[-1]


@pytest.mark.parametrize("ignored", [0.1, 0.8, 0.98])
def test_steps_are_ignored_as_often_as_asked_and_writes_are_as_many_as_reads(ignored):
    rng = np.random.default_rng(0)
    steps = [name for _ in range(200) for name in named(FlipFlop(ignored=ignored), 100, rng)[0][2:-2:2]]
    assert steps.count("i") / len(steps) == pytest.approx(ignored, abs=0.01)
    assert steps.count("w") == pytest.approx(steps.count("r"), rel=0.1, abs=60)


def test_a_needle_stands_at_the_depth_that_is_asked_for():
    for depth, place in ((0.0, 0), (0.25, 16), (1.0, 64)):
        names, _ = named(Needle(depth=depth), 64, np.random.default_rng(0))
        assert names[place].startswith("K")
    drawn = [named(Needle(), 8, np.random.default_rng(seed))[0] for seed in range(200)]
    assert {next(at for at, name in enumerate(names) if name.startswith("K")) for names in drawn} == set(range(9))


@pytest.mark.parametrize("task", [Mqar(keys=8), Induction(vocabulary=8)])
def test_more_items_than_tokens_that_differ_are_refused(task):
    with pytest.raises(ValueError, match="raise the option"):
        task.problems(9, 1, np.random.default_rng(0))


@pytest.mark.parametrize("length", [3, 16, 40])
@pytest.mark.parametrize("task", [Index(), IndexFromEnd(), Index(digits=2)])
def test_no_answer_of_an_index_can_be_copied_from_the_same_question(task, length):
    for seed in range(20):
        names, answers = named(task, length, np.random.default_rng(seed))
        asked = [tuple(names[at - max(1, task.digits) : at]) for at in answers]
        assert len(set(asked)) == len(asked) == min(task.questions, length)
