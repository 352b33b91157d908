"""Sums over the past in chunks equal their definitions, however they are cut and however strongly they fade."""

import pytest
import torch

from posbench.attention import sums

B, H, D, E = 2, 3, 5, 4
DECAYS = {
    "none": [0.0, 0.0, 0.0],
    "alibi's": [-0.5, -0.0625, -0.00390625],
    "too strong for powers": [-30.0, -1e4, 0.0],  # exp(-30 * -64) is infinite in float64
}


def drawn(T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(B, H, T, width, generator=generator, dtype=torch.float64).to(dtype) for width in (D, D, E)]


def weights(a, T):
    """Return `exp(a_h (i - j))` for j <= i, [H, T, T]."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return torch.where(distance >= 0, (a[:, None, None] * distance.clamp(min=0)).exp(), 0.0)


def dense(q, k, v, a):
    return (q @ k.mT * weights(a, q.shape[2])) @ v


@pytest.mark.parametrize("decay", DECAYS)
def test_the_gradients_are_those_of_the_definition(decay):
    T = 150
    leaves = [x.requires_grad_() for x in (*drawn(T), torch.tensor(DECAYS[decay], dtype=torch.float64))]
    q, k, v, a = leaves
    weight = torch.randn(B, H, T, E, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours = torch.autograd.grad((sums.products(q, k, v, a)[0] * weight).sum(), leaves)
    theirs = torch.autograd.grad((dense(q, k, v, a) * weight).sum(), leaves)
    for gradient, expected in zip(ours, theirs, strict=True):
        assert gradient.isfinite().all() and (gradient - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(
            min=1
        )
