"""FoPE against the arithmetic of vLLM's and XTuner's code around transformers' rotation, and its fixed numbers."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from posbench.config import SchemeConfig
from posbench.schemes import Shape, build_scheme
from posbench.verify import random_tokens
from tests.rows import built, difference, random

H, HKV, T, D, L = 6, 2, 90, 32, 256


def fope(kind="fope", **options):
    shape = Shape(d_model=48, num_heads=H, num_kv_heads=HKV, head_dim=D, context_length=L)
    return build_scheme(SchemeConfig("mine", kind, options), shape).double()[0]


def test_queries_and_keys_are_those_of_intern_s1_pros_code():
    """Follow XTuner's FourierEmbedding.forward, with vLLM's sine of 0 for pairs that are not rotated."""
    scheme, position = fope(gain=0.5), 41
    inv_freq = 1 / 10000 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    inv_freq = inv_freq[inv_freq > 2 * torch.pi / L]
    n = len(inv_freq)
    assert 0 < n < D // 2
    freqs = torch.arange(position, position + T, dtype=torch.float64)[None, :, None] * inv_freq
    pos_cos, pos_sin = (x[:, None].expand(1, HKV, T, n) for x in (freqs.cos(), freqs.sin()))
    cos = torch.einsum("bhtD, hDd -> bhtd", pos_cos, scheme.cos_mix[:, :n, :n])
    sin = torch.einsum("bhtD, hDd -> bhtd", pos_sin, scheme.sin_mix[:, :n, :n])
    cos, sin = F.pad(cos, (0, D // 2 - n), value=1), F.pad(sin, (0, D // 2 - n), value=0)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    q, k = random(1, H, T, D), random(1, HKV, T, D)
    pos = scheme.prepare(torch.arange(position, position + T), T)
    for member in range(H // HKV):  # the queries of one key head are neighbours
        theirs_q, theirs_k = apply_rotary_pos_emb(q[:, member :: H // HKV], k, cos[0], sin[0], unsqueeze_dim=0)
        assert difference(theirs_q, q[:, member :: H // HKV]) > 1
        assert difference(scheme.q(q, pos)[:, member :: H // HKV], theirs_q) < 1e-13
        assert difference(scheme.k(k, pos), theirs_k) < 1e-13


def test_mixes_are_the_identity_plus_glorots_numbers_in_each_key_head():
    scheme = fope(gain=0.5)
    n = int((2 * math.pi / scheme.frequencies() <= L).sum())
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.init.xavier_normal_(torch.empty(HKV, n, n), gain=0.5, generator=generator).std().item()
    noises = [mix - torch.eye(D // 2) for mix in (scheme.cos_mix, scheme.sin_mix)]
    for noise in noises:
        assert noise[:, :n, :n].std().item() == pytest.approx(theirs, rel=0.25)
        assert noise[:, n:].abs().max() == noise[:, :, n:].abs().max() == 0
    heads = [head for noise in noises for head in noise]
    assert all(difference(a, b) > 0.1 for i, a in enumerate(heads) for b in heads[:i])


@torch.no_grad()
def test_without_random_numbers_it_is_hope():
    ours, hope = (built(*words.split())(random_tokens(), offset=5) for words in ("fope scheme.gain=0", "hope"))
    assert difference(ours, hope) < 1e-13
