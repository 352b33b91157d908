"""Sizes of a decoder equal a count by hand and the built model, for every kind of attention."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from posbench import compose
from posbench.model.architecture import build_architecture
from posbench.model.decoder import build_model
from posbench.model.size import CacheSize, cache_size, forward_flops_per_token, num_parameters

LAYERS, H, HKV, D, C, V = 2, 6, 2, 16, 48, 64
MODEL = ("model=tiny", f"model.d_model={C}", f"model.num_heads={H}", f"model.num_kv_heads={HKV}", f"model.head_dim={D}")


@cache
def config(scheme):
    return compose([f"scheme={scheme}", *MODEL])


@cache
def architecture(scheme):
    return build_architecture(config(scheme))


@pytest.mark.parametrize(
    "scheme, rows, state",  # rows of D numbers a token, and numbers of a state, in one layer
    [
        ("qk_rope", 2 * HKV, 0),
        ("shared_kv_qk_rope", 2 * HKV, 0),
        ("shared_kv_qkvo_rope", HKV, 0),
        ("linear_alibi", 0, H * D * (D + 1)),
        ("decay_vo_rope", 0, H * D),
    ],
)
def test_what_is_kept_of_the_past_by_hand(scheme, rows, state):
    assert cache_size(architecture(scheme)) == CacheSize(
        2 * LAYERS * rows * D, 4 * LAYERS * state
    )  # sums are float32 in bf16 too
    assert cache_size(architecture(scheme), torch.float32) == CacheSize(4 * LAYERS * rows * D, 4 * LAYERS * state)


def test_a_gated_delta_rule_keeps_its_states_and_the_tokens_that_its_convolutions_read():
    rows = 3 * (H + 2 * HKV) * D  # three tokens of q, k and v in the activations' dtype; states in float32
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        expected = CacheSize(0, LAYERS * (4 * HKV * D * D + size * rows))
        assert cache_size(architecture("gdn"), dtype) == expected


@pytest.mark.parametrize("scheme", ["inkling", "repo"])
def test_gates_that_only_their_own_token_reads_are_not_cached(scheme):
    assert cache_size(architecture(scheme)) == CacheSize(LAYERS * 2 * HKV * D * 2, 0)


def test_layers_in_chunks_or_windows_keep_no_more_than_those():
    row = 2 * HKV * D * 2  # bytes of a token's keys and values in one layer
    four = build_architecture(replace(config("llama_4"), model=replace(config("llama_4").model, num_layers=4)))
    assert cache_size(four) == CacheSize(row, 3 * 64 * row)  # three layers of a chunk of 64 tokens, one of all
    for scheme, looked_back in (("gemma_3", 0), ("inkling_layers", 3)):
        six = build_architecture(replace(config(scheme), model=replace(config(scheme).model, num_layers=6)))
        assert cache_size(six) == CacheSize(row, 5 * 64 * row + 6 * looked_back * row)


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
