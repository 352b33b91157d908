"""T5's bias: one learned number for each bucket of distances and each head (Raffel et al. 2020, arXiv 1910.10683)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer


def buckets_of(d: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the index (int64) of the bucket of each distance `d` (int64, tokens), as in section 2.1 of the paper."""
    # Half of the buckets hold one distance each; the others cover ranges that grow as a logarithm.
    exact = num_buckets // 2
    ratio = (d.clamp(min=exact).to(torch.float64) / exact).log() / math.log(max_distance / exact)
    # The last bucket also covers everything beyond `max_distance`.
    wider = (exact + (ratio * (num_buckets - exact)).floor().long()).clamp(max=num_buckets - 1)
    return torch.where(d < exact, d, wider)


class T5(Scheme):
    """T5's bias: add `table[bucket(i - j), h]` to the scaled scores, with one table for all layers, learned from 0.

    T5 itself does not scale the scores. The last bucket covers all longer distances: from 113 tokens on by default.

    Options: `num_buckets`, half of them for single distances; `max_distance`, tokens at which the logarithmic ranges
    end.
    Raises: ConfigError for an odd or too small number of buckets, or a `max_distance` up to `num_buckets / 2`.
    """

    def __init__(self, shape: Shape, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(shape)
        if require_integer("num_buckets", num_buckets, 2, "32 is usual") % 2:
            raise ConfigError(
                f"scheme.num_buckets={num_buckets} must be even: half of the buckets hold single distances"
            )
        if require_integer("max_distance", max_distance, 1, "128 is usual") <= num_buckets // 2:
            raise ConfigError(
                f"scheme.max_distance={max_distance} must be above scheme.num_buckets / 2 = "
                f"{num_buckets // 2} (128 is usual): shorter distances have a bucket each"
            )
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        buckets = buckets_of(at.distances(q), len(self.table), self.max_distance)
        return at.look_up(self.table[buckets].t())
