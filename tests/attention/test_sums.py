"""Sums over the past in chunks equal their definitions, however they are cut and however strongly they fade."""

import pytest
import torch

from posbench.attention import sums
from tests.rows import assert_same_gradients, random

B, H, D, E = 2, 3, 5, 4
DECAYS = {
    "none": [0.0, 0.0, 0.0],
    "alibi's": [-0.5, -0.0625, -0.00390625],
    "too strong for powers": [-30.0, -1e4, 0.0],  # exp(-30 * -64) is infinite in float64
}


def weights(a, T):
    """Return `exp(a_h (i - j))` for j <= i, [H, T, T]."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return torch.where(distance >= 0, (a[:, None, None] * distance.clamp(min=0)).exp(), 0.0)


def dense(q, k, v, a):
    return (q @ k.mT * weights(a, q.shape[2])) @ v


@pytest.mark.parametrize("decay", DECAYS)
def test_the_gradients_are_those_of_the_definition(decay):
    T = 150
    leaves = [
        x.requires_grad_()
        for x in (
            random(B, H, T, D),
            random(B, H, T, D, seed=1),
            random(B, H, T, E, seed=2),
            torch.tensor(DECAYS[decay], dtype=torch.float64),
        )
    ]
    q, k, v, a = leaves
    assert_same_gradients(sums.products(q, k, v, a)[0], dense(q, k, v, a), leaves, 1e-11)
