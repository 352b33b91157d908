"""Llama 4's chunks and growing scores agree with transformers."""

import torch
from transformers.masking_utils import chunked_causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from posbench.config import SchemeConfig
from posbench.schemes import Placement, Shape, build_scheme

SHAPE = Shape(48, 6, 2, 16, context_length=128)


def test_a_query_sees_the_keys_that_llama_4_shows_it():
    scheme, T = build_scheme(SchemeConfig("c", "chunked", {"chunk": 12}), SHAPE)[0], 40
    b, h, i, j = torch.meshgrid(torch.arange(2), torch.arange(6), torch.arange(T), torch.arange(T), indexing="ij")
    theirs = chunked_causal_mask_function(12, torch.zeros(2, dtype=torch.int64))(b, h, i, j)
    q, k = torch.zeros(2, 6, T, 16), torch.zeros(2, 2, T, 16)
    ours = scheme.bias(q, k, None, Placement(torch.arange(T), 0, 0, T))(b, h, i, j)
    assert torch.equal((ours == 0) & (j <= i), theirs)
    # The last 7 of the same tokens, with all keys in the cache.
    later = scheme.bias(q[:, :, -7:], k, None, Placement(torch.arange(33, 40), 33, 0, T))
    assert torch.equal(later(*(index[:, :, :7] for index in (b, h, i, j))), ours[:, :, -7:])


@torch.no_grad()
def test_queries_grow_as_in_llama_4():
    config = Llama4TextConfig(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        no_rope_layers=[0],
        floor_scale=9,
        attn_scale=0.3,
        attn_implementation="eager",
    )
    theirs = Llama4TextAttention(config, 0)
    seen = []
    theirs.config._attn_implementation = "recorded"

    def record(module, query, *rest, **options):
        seen.append(query)
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("recorded", record)
    x = torch.randn(1, 40, 48, generator=torch.Generator().manual_seed(0))
    theirs(x, None, None)
    scheme = build_scheme(SchemeConfig("g", "log_growth", {"tokens": 9, "slope": 0.3}), SHAPE)[0]
    plain = theirs.q_proj(x).view(1, 40, 6, 16).transpose(1, 2)
    assert (scheme.q(plain, scheme.prepare(torch.arange(40), 40)) - seen[0]).abs().max() < 1e-6
    assert (seen[0] - plain).abs().max() > 0.1


def test_queries_grow_as_in_hypenets_code():
    """Follow the branch `attn_logits_scaling` of Qwen3Attention.forward in thunlp/hybrid-linear-attention."""
    a, position_ids = 21.0, torch.arange(5, 45)[None].double()
    query_states = torch.randn(1, 40, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.log(position_ids + a) / torch.full_like(position_ids, fill_value=a).log()  # (B, T)
    theirs = torch.einsum("b t h d, b t -> b t h d", query_states, scale)
    scheme = build_scheme(SchemeConfig("g", "log_length", {"a": 21}), SHAPE)[0]
    ours = scheme.q(query_states.transpose(1, 2), scheme.prepare(torch.arange(5, 45), 40))
    assert (ours - theirs.transpose(1, 2)).abs().max() < 1e-14
    assert (theirs - query_states).abs().max() > 0.5
