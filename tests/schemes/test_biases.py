"""Biases on the scores against other people's code, or loops over the papers' formulas, in float64."""

import math

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from posbench.composition import choices
from posbench.model import build_model
from posbench.schemes import At, Shape
from posbench.schemes.kerple import Kerple
from posbench.schemes.t5 import T5, buckets_of
from posbench.verify import VOCAB, certificate_config, randomise

H, T, D = 6, 300, 16
SHAPE = Shape(d_model=48, num_heads=H, num_kv_heads=2, head_dim=D, num_layers=2, context_length=128)


def filled(scheme, seed=0):
    """The scheme in float64, what it learns drawn."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in scheme.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return scheme


def whole(scheme, q=None, x=None, offset=0):
    """The bias of every pair of tokens of a window that begins at position `offset`, [1 or B, H, T, T]."""
    q = torch.zeros(1, H, T, D, dtype=torch.float64) if q is None else q
    at = At(scheme.prepare(torch.arange(offset, offset + q.shape[2]), q.shape[2]), offset, offset, q.shape[2])
    bias = scheme.bias(q, None if x is None else scheme.gate(x, at.pos), at)
    rows = torch.arange(q.shape[2])
    b, h = torch.arange(len(q))[:, None, None, None], torch.arange(H)[:, None, None]
    return bias(b, h, rows[:, None], rows[None, :]).expand(len(q), -1, -1, -1)


def pairs(length):
    """Every query and the keys that it may see."""
    return [(i, j) for i in range(length) for j in range(i + 1)]


@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (2, 9), (32, 1000)])
def test_the_buckets_are_t5s(num_buckets, max_distance):
    distances = torch.cat((torch.arange(5000), torch.arange(5000, 3_000_000, 997)))
    theirs = T5Attention._relative_position_bucket(-distances, False, num_buckets, max_distance)
    assert torch.equal(buckets_of(distances, num_buckets, max_distance), theirs)


def test_the_bias_of_t5_is_that_of_its_decoder():
    theirs = T5Attention(T5Config(d_model=48, num_heads=H, d_kv=D, is_decoder=True), has_relative_attention_bias=True)
    scheme = filled(T5(SHAPE))
    theirs.relative_attention_bias.weight.data = scheme.table.data
    expected = theirs.compute_bias(T, T).tril()
    assert expected.dtype == torch.float64 and torch.equal(whole(scheme).tril(), expected)
    assert torch.equal(whole(scheme, offset=2**22), whole(scheme))


def test_kerple_is_its_formula_and_starts_at_one():
    assert torch.allclose(whole(Kerple(SHAPE))[0, 3, 9, 2], torch.tensor(-math.log(8)))
    scheme = filled(Kerple(SHAPE))
    bias = whole(scheme)[0]
    a, b = ([math.log(1 + math.exp(x)) for x in parameter.tolist()] for parameter in (scheme.a, scheme.b))
    for i, j in pairs(40):
        for h in range(H):
            assert bias[h, i, j].item() == pytest.approx(-a[h] * math.log(1 + b[h] * (i - j)), abs=1e-14)


BIASED = [name for name in choices("scheme") if "bias" in build_model(certificate_config(name), VOCAB).scheme.acts_on]


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_single_rows_is_that_of_blocks_of_them(name):
    model = build_model(certificate_config(name), VOCAB)
    randomise(model)
    scheme = model.double().scheme.layer(0)
    generator = torch.Generator().manual_seed(1)
    x, q = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 9, 48), (2, H, 9, D)))
    first, kept = 1_000_003, 4  # the queries are the last 5 of 9 tokens
    at = At(scheme.prepare(torch.arange(first + kept, first + 9), 9), first + kept, first, 9)
    gate = scheme.gate(x, scheme.prepare(torch.arange(first, first + 9), 9))
    bias = scheme.bias(scheme.q(q[:, :, kept:], at.pos), gate, at)
    rows = torch.arange(9)
    block = bias(torch.arange(2)[:, None, None, None], torch.arange(H)[:, None, None], rows[:5, None], rows[None, :])
    block = block.expand(2, H, 5, 9)
    for place in [(0, 0, 0, 0), (1, 5, 2, 6), (1, 3, 4, 8), (0, 2, 3, 1)]:
        single = bias(*(torch.tensor(n) for n in place))
        assert single.shape == () and torch.allclose(single, block[place], rtol=0, atol=1e-12)
