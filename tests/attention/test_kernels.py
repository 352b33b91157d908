"""`attend` gives the numbers of the float64 definition, in every number format, at every length."""

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from posbench.attention import kernels
from posbench.attention.kernels import Scoring, attend, blocks, causal_tiles, masked, short
from posbench.reference.biases import alibi_slopes
from posbench.schemes import Placement, Shape
from posbench.schemes.alibi import Alibi
from tests.rows import assert_same_gradients, difference, random

# Roundings of the largest value allowed in an output: float64 and float32 sums of a few hundred terms, bfloat16 scores.
ROUNDING = {torch.float64: (2.0**-53, 64), torch.float32: (2.0**-24, 64), torch.bfloat16: (2.0**-8, 4)}


def random_heads(B, H, Hkv, T, D, dtype):
    return [random(B, heads, T, D, seed=seed).to(dtype) for seed, heads in enumerate((H, Hkv, Hkv))]


def defined(q, k, v, slopes=None):
    """Compute attention by its definition, query by query, in float64: [B, H, T, D]."""
    B, H, T, D = q.shape
    groups = H // k.shape[1]
    q, k, v = (x.double().numpy() for x in (q, k, v))
    o = np.zeros(q.shape)
    for b, h, i in np.ndindex(B, H, T):
        scores = k[b, h // groups, : i + 1] @ q[b, h, i] / D**0.5
        if slopes is not None:
            scores = scores - slopes[h] * (i - np.arange(i + 1))
        weights = np.exp(scores - scores.max())
        o[b, h, i] = weights @ v[b, h // groups, : i + 1] / weights.sum()
    return torch.from_numpy(o)


def alibi_of(q, k, dtype=torch.float64, first=0):
    """Return ALiBi's bias; the queries `q` are at the last of the keys `k`, whose first position is `first`."""
    H, D = q.shape[1], q.shape[3]
    scheme = Alibi(Shape(H * D, H, k.shape[1], D)).to(dtype)
    return scheme.bias(q, k, None, Placement(None, first + k.shape[2] - q.shape[2], first, k.shape[2]))


def scaled(kernel, **options):
    return lambda q, k, v, bias: kernel(q, k, v, Scoring(q.shape[3] ** -0.5, bias), **options)


KERNELS = {
    "attend": scaled(attend),
    "short": scaled(short),
    "blocks": scaled(blocks),
    "blocks of 8": scaled(blocks, block=8),
    "masked": scaled(masked),
    "masked in parts": lambda q, k, v, bias: scaled(masked, cells=16 * q.shape[2])(q, k, v, bias),
}


@cache
def case(T, dtype, biased):
    """Return the same heads for every kernel, and the definition's output for them."""
    q, k, v = heads = random_heads(*((2, 6, 2, T, 16) if T < 200 else (1, 3, 1, T, 8)), dtype)
    return heads, defined(q, k, v, alibi_slopes(q.shape[1]) if biased else None)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("T", [1, 37, 127, 128, 129, 640])
def test_every_kernel_equals_the_definition(T, dtype, biased, kernel):
    (q, k, v), expected = case(T, dtype, biased)
    bias = alibi_of(q, k, torch.promote_types(dtype, torch.float32)) if biased else None
    out = KERNELS[kernel](q, k, v, bias)
    assert out.dtype == dtype and out.shape == q.shape
    rounding, roundings = ROUNDING[dtype]
    error = difference(out.double(), expected)
    assert error <= roundings * rounding * v.double().abs().max()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_may_look_at_the_sequence_and_values_may_be_narrower_than_keys(kernel):
    q, k, c = leaves = [x.requires_grad_() for x in (random(2, 4, 150, 16), random(2, 2, 150, 16), random(2, 4, 150))]
    v = k[..., :6] + 1
    out = KERNELS[kernel](q, k, v, lambda b, h, i, j: c[b, h, i] - c[b, h, j])
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ keys.transpose(-2, -1) / 4 + c[..., :, None] - c[..., None, :]
    causal = torch.ones(150, 150, dtype=torch.bool).tril()
    expected = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ values
    assert out.shape == (2, 4, 150, 6) and torch.allclose(out, expected, rtol=0, atol=1e-12)
    assert_same_gradients(out, expected, leaves, 1e-11)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("is_intel", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_are_right_on_every_processor(learned, window, is_intel, compiling, monkeypatch):
    monkeypatch.setattr(kernels, "IS_INTEL", is_intel)
    monkeypatch.setattr(kernels, "FUSED_ABOVE", 32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    leaves = [random(2, 4, 150, 16), random(2, 2, 150, 16), random(2, 2, 150, 16), random(4, 150, seed=1)]
    outs, inputs = [], []
    for dtype in (torch.float32, torch.float64):
        q, k, v, table = [x.to(dtype).requires_grad_() for x in leaves]
        fixed = table if learned else table.detach()
        scoring = Scoring(
            0.25, lambda b, h, i, j, fixed=fixed: fixed[h, i - j if learned else (i - j).abs()], None, window
        )
        outs.append((attend if dtype == torch.float32 else blocks)(q, k, v, scoring).double())
        inputs.append([q, k, v, table] if learned else [q, k, v])
    g = random(*outs[0].shape, seed=2)
    mine, right = (torch.autograd.grad((out * g).sum(), xs) for out, xs in zip(outs, inputs, strict=True))
    for x, y in zip(mine, right, strict=True):
        assert difference(x.double(), y) <= 1e-5 * y.abs().max()


def test_scores_of_any_size_make_no_nan():
    q, k, v = random_heads(1, 2, 2, 140, 8, torch.float32)
    for scale in (0.0, 1e4):
        out = scaled(attend)(scale * q, scale * k, v, alibi_of(q, k, torch.float32))
        assert out.isfinite().all() and out.abs().max() <= v.abs().max() + 1e-5


@pytest.mark.parametrize("T", [1, 127, 128, 129, 384, 500, 1024])
def test_the_tiles_of_a_causal_window_are_those_that_pytorch_finds_pair_by_pair(T):
    expected = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    tiles = causal_tiles(T, torch.device("cpu"))
    assert tiles.seq_lengths == expected.seq_lengths and tiles.BLOCK_SIZE == expected.BLOCK_SIZE
    for side in ("kv", "q", "full_kv", "full_q"):
        counts, indices = (getattr(tiles, f"{side}_{part}") for part in ("num_blocks", "indices"))
        assert torch.equal(counts, getattr(expected, f"{side}_num_blocks")) and indices.dtype == torch.int32
        for row, (n, mine, theirs) in enumerate(
            zip(counts[0, 0], indices[0, 0], getattr(expected, f"{side}_indices")[0, 0], strict=True)
        ):
            assert torch.equal(mine[:n], theirs[:n]), (side, row)
