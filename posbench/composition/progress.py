"""How far a sweep is: which run of how many begins, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class SweepProgress:
    """Of the runs of a sweep in their order.

    Arguments: to_train, for each run whether it has to be trained (false: it is finished already); workers, how many
    runs are trained side by side, None where that is not known (a cluster decides).
    """

    to_train: Sequence[bool] = ()
    workers: int | None = 1
    clock: Callable[[], float] = time.time  # one that all processes of a machine share
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def begins(self, number: int, name: str) -> str:
        """`run 7 of 33: demo/vo_rope/seed=0, about 12 min left`, for the run of that number (0-based)."""
        left = self.seconds_left(number)
        rest = "" if left is None else f", about {_duration(left)} left"
        return f"run {number + 1} of {len(self.to_train)}: {name}{rest}"

    def seconds_left(self, number: int) -> float | None:
        """For the whole sweep, when the run of that number begins: by the mean time of the runs trained so far.

        None until one of them has ended, and where it is not known how many run side by side.
        """
        if self.workers is None:
            return None
        begun = sum(self.to_train[:number])
        ended = begun - (self.workers - 1)
        if ended < 1:
            return None
        return (self.clock() - self.began) / ended * (sum(self.to_train) - ended)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
