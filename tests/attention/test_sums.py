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
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 300])
def test_the_sums_equal_their_definitions(T, decay):
    (q, k, v), a = drawn(T), torch.tensor(DECAYS[decay], dtype=torch.float64)
    o, state = sums.products(q, k, v, a)
    assert (o - dense(q, k, v, a)).abs().max() <= 1e-12 * o.abs().max()
    last = torch.einsum("ht,bhtd,bhte->bhde", weights(a, T)[:, -1], k, v)
    assert (state - last).abs().max() <= 1e-12 * last.abs().max()
    totals, total = sums.running_sum(v, a)
    assert (totals - weights(a, T) @ v).abs().max() <= 1e-12 * totals.abs().max()
    assert (total - totals[:, :, -1:]).abs().max() <= 1e-12 * totals.abs().max()


@pytest.mark.parametrize("cuts", [(1, 150), (64, 150), (10, 90, 91, 150), range(1, 151)], ids=str)
def test_pieces_go_on_where_the_one_before_ended(cuts):
    (q, k, v), a = drawn(150), torch.tensor(DECAYS["alibi's"], dtype=torch.float64)
    state, total, rows, totals, begin = None, None, [], [], 0
    for end in cuts:
        piece = slice(begin, end)
        o, state = sums.products(q[:, :, piece], k[:, :, piece], v[:, :, piece], a, state)
        s, total = sums.running_sum(k[:, :, piece], a, total)
        rows.append(o)
        totals.append(s)
        begin = end
    assert (torch.cat(rows, dim=2) - dense(q, k, v, a)).abs().max() < 1e-11
    assert (torch.cat(totals, dim=2) - weights(a, 150) @ k).abs().max() < 1e-11


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


def test_float32_is_right_to_its_rounding_over_thousands_of_tokens():
    (q, k, v), a = drawn(4000), torch.tensor(DECAYS["none"], dtype=torch.float64)
    q, k = q.abs(), k.abs()
    exact = sums.products(q, k, v, a)[0]
    o = sums.products(q.float(), k.float(), v.float(), a.float())[0]
    assert ((o - exact).norm() / exact.norm()) < 32 * 2.0**-24
