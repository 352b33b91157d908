"""A sweep says which run begins and how long the rest takes, from the runs that were trained."""

from __future__ import annotations

import pytest

from posbench.composition.progress import SweepProgress


def progress(to_train: list[bool], workers: int | None, seconds: float) -> SweepProgress:
    times = iter([0.0, *[seconds] * 9])
    return SweepProgress(to_train, workers, lambda: next(times))


@pytest.mark.parametrize(
    ("to_train", "workers", "number", "says"),
    [
        ([True] * 4, 1, 0, "run 1 of 4: r"),  # none has ended
        ([True] * 4, 1, 1, "run 2 of 4: r, about 5 min left"),  # 100 s for one, three are left
        ([False, True, True], 1, 2, "run 3 of 3: r, about 2 min left"),  # a finished one takes no time
        ([True] * 9, 4, 3, "run 4 of 9: r"),  # four begin at once
        ([True] * 9, 4, 4, "run 5 of 9: r, about 13 min left"),  # one of nine in 100 s
        ([True] * 9, None, 8, "run 9 of 9: r"),  # on a cluster
    ],
)
def test_the_rest_is_estimated_from_runs_that_ended(
    to_train: list[bool], workers: int | None, number: int, says: str
) -> None:
    assert progress(to_train, workers, 100.0).begins(number, "r") == says


@pytest.mark.parametrize(("seconds", "says"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (7000, "1 h 57 min")])
def test_durations_are_read_at_a_glance(seconds: float, says: str) -> None:
    assert progress([True, True], 1, seconds).begins(1, "r").endswith(f"about {says} left")
