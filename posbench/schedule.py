"""Where a run's warm-up ends and its decay begins, in steps.

A *family* is a trunk, which is its longest run, and branches, which are runs of fewer tokens. Warm-up is counted by the
trunk's steps and a decay by a run's own, so a branch and its trunk are the same run until the branch's decay begins.
"""

from __future__ import annotations

import math


def warmup_steps(warmup_ratio: float, trunk_steps: int) -> int:
    """The steps over which the learning rate rises, in every run of the family."""
    return math.ceil(warmup_ratio * trunk_steps)


def decay_begins(decay_ratio: float, num_steps: int) -> int:
    """The steps that a run of `num_steps` has done when its decay begins (`schedule=wsd`)."""
    return num_steps - math.ceil(decay_ratio * num_steps)
