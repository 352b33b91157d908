"""T5's bias: one learned number for each bucket of distances and each head (Raffel et al. 2020, arXiv 1910.10683)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, whole


def buckets_of(d: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance `d` in tokens, int64 both: those of T5's decoder (section 2.1).

    A bucket for each distance below `num_buckets / 2`, the others for logarithmically wider ranges to `max_distance`.
    All longer distances are in the last one.
    """
    exact = num_buckets // 2
    ratio = (d.clamp(min=exact).to(torch.float64) / exact).log() / math.log(max_distance / exact)
    wider = (exact + (ratio * (num_buckets - exact)).floor().long()).clamp(max=num_buckets - 1)
    return torch.where(d < exact, d, wider)


class T5(Scheme):
    """`bias_h(i, j) = table[bucket(i - j), h]`, learned from 0, one table for all layers.

    Added to the scaled scores (T5 itself does not scale them). The last bucket is flat: from 113 tokens on, with the
    usual options, distances are not told apart. That is T5's definition, however far away a key is.

    Options: `num_buckets`, half of them for single distances; `max_distance`, in tokens, where the last bucket ends its
    range and takes all that is farther.
    Raises: ConfigError for an odd or too small number of buckets, or a distance that the exact ones already reach.
    """

    def __init__(self, shape: Shape, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(shape)
        if whole("num_buckets", num_buckets, 2, "32 is usual") % 2:
            raise ConfigError(f"scheme.num_buckets={num_buckets} is odd: half of the buckets hold single distances")
        if whole("max_distance", max_distance, 1, "128 is usual") <= num_buckets // 2:
            raise ConfigError(
                f"scheme.max_distance={max_distance} must be above scheme.num_buckets / 2 = "
                f"{num_buckets // 2} (128 is usual): shorter distances have a bucket each"
            )
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        buckets = buckets_of(at.distances(q), len(self.table), self.max_distance)
        return at.look_up(self.table[buckets].t())
