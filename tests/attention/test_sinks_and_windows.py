"""Sinks and windows, held to transformers' gpt-oss on every kernel; what windows compute."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from posbench.attention import kernels
from posbench.attention.kernels import Scoring
from posbench.attention.softmax import _bias_within_documents
from posbench.model.decoder import build_model
from posbench.training.optimizers.optimizer import decayed_parameters
from posbench.verify import VOCAB, certificate_config
from tests.rows import assert_same_gradients, built, difference, first_layer, random

D, H, HKV, C = 16, 6, 2, 48


def gpt_oss(attention):
    """Return gpt-oss's attention with our weights."""
    sizes = {"hidden_size": C, "num_attention_heads": H, "num_key_value_heads": HKV, "head_dim": D}
    config = GptOssConfig(**sizes, num_hidden_layers=1, attention_bias=False, attn_implementation="eager")
    theirs = GptOssAttention(config, layer_idx=0).double()
    parts = attention.qkv.weight.split([H * D, HKV * D, HKV * D])
    weights = {f"{part}_proj.weight": weight for part, weight in zip("qkv", parts, strict=True)}
    theirs.load_state_dict(weights | {"o_proj.weight": attention.out.weight, "sinks": attention.kind.sink})
    return theirs


@pytest.mark.parametrize("kernel", ["usual", "without a gradient", "blocks", "masked"])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 149])
def test_sinks_and_windows_are_those_of_gpt_oss(window, kernel):
    """Outputs, and gradients by the stream and by the sinks, which the kernels that have one compute."""
    model, T = built("sink_qk_rope"), 150
    attention, at, scheme = first_layer(model, T, 7)
    theirs = gpt_oss(attention)
    scheme.window = window
    attention.kind.kernel = attention.kind.kernels([scheme], True, torch.device("cpu")).get(kernel)
    x = random(2, T, C)
    leaves = [[x.clone().requires_grad_(), sink] for sink in (attention.kind.sink, theirs.sinks)]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    visible = sliding_window_causal_mask_function(window or T)(0, 0, i, j)
    mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    with torch.set_grad_enabled(kernel != "without a gradient"):
        ours = attention(leaves[0][0], at, scheme)
        expected = theirs(leaves[1][0], tuple(half[None] for half in at.pos), mask)[0]
        assert expected.abs().max() > 0.5 and difference(ours, expected) < 1e-12
        if ours.requires_grad:
            assert_same_gradients(ours, expected, leaves[0], 1e-11, their_leaves=leaves[1])


@pytest.mark.parametrize("kernel", [kernels.blocks, kernels.short])
def test_operations_grow_with_the_window_and_not_with_the_length(kernel):
    def operations(T):
        q, k, v = torch.randn(3, 1, 2, T, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            kernel(q, k, v, Scoring(1.0, window=50)).sum().backward()
        return counter.get_total_flops()

    assert operations(2048) - operations(1024) == operations(3072) - operations(2048)
    assert operations(2048) < 2.1 * operations(1024)


@pytest.mark.parametrize("T, window", [(1, 1), (128, 5), (300, 1), (384, 128), (500, 129), (1024, 300)])
def test_the_tiles_of_windows_are_those_that_pytorch_finds_pair_by_pair(T, window):
    tiles = kernels.windowed_tiles(T, window, None, torch.device("cpu"))
    theirs = create_block_mask(tiles.mask_mod, None, None, T, T, device="cpu")
    assert tiles.seq_lengths == theirs.seq_lengths and torch.equal(tiles.to_dense(), theirs.to_dense())


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 150])
def test_tiles_of_other_documents_are_left_out_and_change_nothing(window):
    T, starts = 500, torch.zeros(2, 500, dtype=torch.long)
    starts[0, [1, 130, 300, 420]], starts[1, 256] = torch.tensor([1, 130, 300, 420]), 256
    first = starts.cummax(1).values
    least = 0 if window is None else torch.arange(T) + 1 - window

    def is_seen(b, h, i, j):
        return (j <= i) & (j >= torch.maximum(first, torch.as_tensor(least))[b, i])

    tiles = kernels.windowed_tiles(T, window, first, torch.device("cpu"))
    assert torch.equal(tiles.to_dense(), create_block_mask(is_seen, 2, None, T, T, device="cpu").to_dense())
    q, k, v = random(3, 2, 2, T, 16)
    bias = partial(_bias_within_documents, lambda b, h, i, j: 0.01 * (j - i), first, 0)
    scoring = Scoring(0.25, bias, window=window, first=first)
    expected = kernels.blocks(q, k, v, scoring)
    assert difference(kernels.flex(q, k, v, scoring), expected) < 1e-12


def test_a_sink_begins_at_zero_and_is_not_decayed():
    sink, plain = (build_model(certificate_config(name), VOCAB) for name in ("sink_qk_rope", "qk_rope"))
    more = {name for name, _ in sink.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert more == {f"blocks.{n}.attention.kind.sink" for n in range(2)} and not more & decayed_parameters(sink)
    assert not any(sink.state_dict()[name].any() for name in more)
