"""Sizes of a decoder equal a count by hand and the built model, for every kind of attention."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from posbench import compose
from posbench.model.architecture import build_architecture
from posbench.model.decoder import build_model
from posbench.model.size import cache_per_token, cached_numbers, forward_flops_per_token, num_parameters
from posbench.verify import random_tokens
from tests.rows import built

LAYERS, H, HKV, D, C, V = 2, 6, 2, 16, 48, 64
MODEL = ("model=tiny", f"model.d_model={C}", f"model.num_heads={H}", f"model.num_kv_heads={HKV}", f"model.head_dim={D}")


@cache
def config(scheme):
    return compose([f"scheme={scheme}", *MODEL])


@cache
def architecture(scheme):
    return build_architecture(config(scheme))


ROW = 2 * HKV * D  # numbers of a token's keys and values in one layer
CACHES = [  # words, numbers of a token and of a state in all layers
    ("qk_rope", 2 * ROW, 0),
    ("shared_kv_nope", ROW, 0),
    ("shared_kv_qk_rope", 2 * ROW, 0),
    ("gemma_4_kv", 2 * ROW, 0),
    ("shared_kv_qkv_rope", ROW, 0),
    ("shared_kv_qkvo_rope", ROW, 0),
    ("deepseek_v4", ROW, 0),
    ("inkling", 2 * ROW, 0),  # gates that only their own token reads are not cached
    ("repo", 2 * ROW, 0),
    ("linear_alibi", 0, 2 * H * D * (D + 1)),
    ("decay_vo_rope", 0, 2 * H * D),
    ("hybrid_kda_mla", ROW // HKV, 3 * (HKV * D * D + 3 * (H + 2 * HKV) * D)),
    ("mimo_v2", 2 * ROW, 4 * 64 * ROW),
    ("gdn", 0, 2 * HKV * D * D + 6 * (H + 2 * HKV) * D),
    ("window_rope_nope", ROW, 3 * 64 * ROW),  # four layers, one of them without a window
    ("llama_4", ROW, 3 * 64 * ROW),
    ("gemma_3", ROW, 5 * 64 * ROW),
    ("inkling_layers", ROW, 5 * 64 * ROW + 6 * 3 * ROW),
    ("canon_nope", 2 * ROW, 2 * 3 * (C + (H + 2 * HKV) * D)),
    ("key_offset", 2 * ROW, 2 * HKV * D),
    ("smear_nope", 2 * ROW, C),  # the first layer's
    *((f"mla scheme.attention.latent_heads={n}", n * ROW, 0) for n in (1, 3)),
    *((f"mla_nope scheme.attention.latent_heads={n}", n * ROW, 0) for n in (1, 3)),
    *((f"gqa_qk_rope scheme.attention.kv_heads={n}", n * ROW, 0) for n in (1, 3)),
]


@torch.no_grad()
@pytest.mark.parametrize("words, per_token, state", CACHES)
def test_what_is_kept_of_the_past_by_hand_and_in_a_forward_pass(words, per_token, state):
    model = built(*words.split())
    assert cached_numbers(model.architecture, 100) == 100 * per_token + state
    context = model.scheme.shape.context_length
    assert cache_per_token(model.architecture) * context == cached_numbers(model.architecture, context)
    caches = model.caches(100)
    for piece in random_tokens(100).split(20, 1):
        model.hidden(piece, 3, caches)
    assert sum(cache.size for cache in caches) == 100 * per_token + state


def test_a_query_of_attention_in_chunks_sees_half_a_chunk_on_average():
    four = build_architecture(replace(config("llama_4"), model=replace(config("llama_4").model, num_layers=4)))

    def mixing(length):  # FLOPs of scores and values, without the growth of the fourth layer's scores
        return sum(kind.flops_per_token(length, scheme) for kind, scheme in zip(four.kinds, four.scheme, strict=True))

    assert mixing(2048) == 4 * H * D * (3 * 32 + 1024)
    assert mixing(48) == 4 * H * D * 4 * 24  # shorter than a chunk
    assert mixing(96) == 4 * H * D * (3 * (64 * 32 + 32 * 16) / 96 + 48)


@pytest.mark.parametrize(
    "scheme", ["qk_rope", "shared_kv_qkvo_rope", "linear_qk_rope", "decay_vo_rope", "gdn", "trinity"]
)
def test_parameters_are_those_of_the_built_model(scheme):
    counted = sum(num_parameters(architecture(scheme), V).values())
    assert counted == sum(p.numel() for p in build_model(config(scheme), V).parameters())


@pytest.mark.parametrize("scheme", ["linear_nope", "linear_qk_rope", "linear_alibi", "decay", "decay_vo_rope", "gdn"])
def test_operations_a_token_grow_with_length_under_softmax_alone(scheme):
    def mixing(scheme, length):
        weights = LAYERS * C * (D * sum({"q": H, "k": HKV, "v": HKV, "o": H}.values()))
        if scheme.startswith("decay"):
            weights = LAYERS * C * D * (HKV + H)
        ffn = (
            num_parameters(architecture("nope"), V)["body"] - LAYERS * C * D * (2 * H + 2 * HKV) - C * (2 * LAYERS + 1)
        )
        return forward_flops_per_token(architecture(scheme), V, length) - 2 * (weights + ffn + V * C)

    assert mixing("qk_rope", 2048) == LAYERS * 2 * H * D * 2048
    by_hand = LAYERS * (2 * H * D if scheme.startswith("decay") else 4 * H * D * (D + 1))
    if scheme == "gdn":
        gates, taps = C * (2 * HKV + H * D), 4 * (H + 2 * HKV) * D
        by_hand = LAYERS * 2 * (gates + taps + D * D * (2 * HKV + H))
    assert mixing(scheme, 128) == mixing(scheme, 32768) == by_hand
