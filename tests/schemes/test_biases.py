"""Biases on the scores against other people's code, or loops over the papers' formulas, in float64."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import T5Config, XLNetConfig
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import _apply_relative_key_position_encoding
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from posbench.attention.ways import attend
from posbench.composition import choices
from posbench.model import build_model
from posbench.schemes import At, Shape, build_scheme
from posbench.schemes.fire import Fire
from posbench.schemes.fox import Fox
from posbench.schemes.kerple import Kerple
from posbench.schemes.shaw import Shaw
from posbench.schemes.ssmax import Ssmax
from posbench.schemes.t5 import T5, buckets_of
from posbench.schemes.transformer_xl import TransformerXL
from posbench.training.optimizer import decayed_parameters
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


def sites(name):
    return build_scheme(certificate_config(name).scheme, Shape(48, 6, 2, 16, num_layers=4)).acts_on


BIASED = [name for name in choices("scheme") if "bias" in sites(name)]


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_single_rows_or_the_last_is_that_of_all(name):
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
    # A softmax would not notice what all keys of a query share, such as the gates until the query.
    everything = At(scheme.prepare(torch.arange(first, first + 9), 9), first, first, 9)
    of_all = scheme.bias(scheme.q(q, everything.pos), gate, everything)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(H)[:, None, None]
    assert torch.allclose(block, of_all(b, h, rows[kept:, None], rows[None, :]), rtol=0, atol=1e-12)
    for place in [(0, 0, 0, 0), (1, 5, 2, 6), (1, 3, 4, 8), (0, 2, 3, 1)]:
        single = bias(*(torch.tensor(n) for n in place))
        assert single.shape == () and torch.allclose(single, block[place], rtol=0, atol=1e-12)


def random(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clip", [1, 16, 500])
def test_shaws_keys_are_those_of_wav2vec2_bert(clip):
    theirs = SimpleNamespace(left_max_position_embeddings=clip, right_max_position_embeddings=0, scaling=D**-0.5)
    scheme, q = filled(Shaw(SHAPE, clip)).layer(1), random(2, H, T, D)
    theirs.distance_embedding = torch.nn.Embedding.from_pretrained(scheme.table.detach().flip(0))
    _, expected = _apply_relative_key_position_encoding(theirs, q, q)
    assert torch.allclose(whole(scheme, q).tril(), expected.tril(), rtol=0, atol=1e-13)
    assert torch.equal(whole(scheme, q, offset=2**22), whole(scheme, q))


@pytest.mark.parametrize("channels", [None, 48, 6])
def test_the_scores_of_transformer_xl_are_those_of_xlnets_code(channels):
    scheme = filled(TransformerXL(SHAPE, channels))
    width, layer = channels or D, scheme.layer(1)
    q, k, v = random(2, H, T, D), random(2, 2, T, D, seed=3), random(2, 2, T, D, seed=4)
    theirs = XLNetRelativeAttention(XLNetConfig(d_model=H * D, n_head=H)).double().eval()
    theirs.r_w_bias.data, theirs.r_r_bias.data = scheme.content.data, scheme.position.data
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    r = XLNetModel.positional_embedding(torch.arange(T, -T, -1, dtype=torch.float64), frequencies, 2)
    heads = (x.repeat_interleave(H // x.shape[1], 1).permute(2, 0, 1, 3) for x in (q, k, v))  # [T, B, H, D]
    later = torch.ones(T, T, dtype=torch.float64).triu(1)[:, :, None, None].expand(-1, -1, 2, H)
    matrix = layer.matrix.view(H, D, width)
    expected = theirs.rel_attn_core(*heads, torch.einsum("jbr,hdr->jbhd", r, matrix), attn_mask=later)

    for offset, close in ((0, 1e-12), (2**22, 1e-8)):
        pos = layer.prepare(torch.arange(offset, offset + T), T)
        wide_q, wide_k = layer.q(q, pos), layer.k(k, pos)
        assert wide_q.shape[-1] == wide_k.shape[-1] == D + width  # nothing T x T: any fused kernel takes them
        ours = attend(wide_q, wide_k, v, layer.bias(wide_q, None, None), D**-0.5)
        assert torch.allclose(ours.permute(2, 0, 1, 3), expected, rtol=0, atol=close)


def test_transformer_xl_shares_its_vectors_and_has_a_matrix_in_each_layer():
    names = dict(TransformerXL(SHAPE).named_parameters())
    assert list(names) == ["content", "position", "layers.0.matrix", "layers.1.matrix"]
    copied = copy.deepcopy(TransformerXL(SHAPE))
    assert copied.layer(1)._of[0] is copied  # and not the one that it was copied from


def test_fire_is_its_formula_beyond_its_threshold_too():
    scheme = filled(Fire(SHAPE))
    c, L = (math.log(1 + math.exp(x)) for x in (scheme.c.item(), scheme.L.item()))
    bias = whole(scheme, torch.zeros(1, H, 40, D, dtype=torch.float64), offset=int(128 * L) - 20)[0]
    for i, j in pairs(40):
        share = math.log(1 + c * (i - j)) / math.log(1 + c * max(128 * L, i + int(128 * L) - 20))
        units = [max(0, w * share + b) for w, b in zip(scheme.hidden_weight[:, 0], scheme.hidden_bias, strict=True)]
        for h in range(H):
            expected = scheme.output_bias[h] + sum(w * u for w, u in zip(scheme.output_weight[h], units, strict=True))
            assert bias[h, i, j].item() == pytest.approx(expected.item(), abs=1e-12)


def test_fire_starts_at_the_training_length_with_the_authors_c():
    scheme = Fire(SHAPE)
    for learned, start in ((scheme.c, 0.1), (scheme.L, 1.0)):
        assert torch.nn.functional.softplus(learned).item() == pytest.approx(start)


def test_forgetting_is_the_sum_of_log_gates_between_key_and_query():
    scheme, x = filled(Fox(SHAPE)).layer(1), random(2, 50, 48)
    bias = whole(scheme, random(2, H, 50, D), x)
    for b in range(2):
        gates = torch.sigmoid(x[b] @ scheme.w.T + scheme.b).tolist()  # [T, H]
        for i, j in pairs(50):
            for h in range(H):
                expected = sum(math.log(gates[t][h]) for t in range(j + 1, i + 1))
                assert bias[b, h, i, j].item() == pytest.approx(expected, abs=1e-11)


def test_gates_and_their_sum_are_not_rounded_to_bfloat16():
    scheme, x = Fox(SHAPE).layer(0), random(1, 4, 48).bfloat16()
    gate = scheme.gate(x, None)
    bias = scheme.bias(random(1, H, 4, D).bfloat16(), gate, At(None, 0, 0, 4))
    assert gate.dtype == torch.float32 and bias(*torch.zeros(4, dtype=torch.long)).dtype == torch.float32


def test_ssmax_scales_queries_by_the_logarithm_of_what_they_see():
    scheme, q = Ssmax(SHAPE).double().layer(1), random(1, H, 128, D)
    scaled = scheme.q(q, scheme.prepare(torch.arange(128), 128))
    assert not scaled[:, :, 0].any()  # one token is seen, so its weight is 1 whatever its score
    assert torch.allclose(scaled[:, :, 127], q[:, :, 127], rtol=1e-6)  # 1 at the training length
    factors = torch.tensor([math.log(i + 1) / math.log(128) for i in range(128)])
    assert torch.allclose(scaled, q * factors[:, None], rtol=1e-6)


@pytest.mark.parametrize("name", ["shaw", "transformer_xl", "fox", "fox_qk_rope", "ssmax"])
def test_what_is_each_layers_own_is_registered_once_and_is_another_in_every_layer(name):
    model = build_model(certificate_config(name, ["model.num_layers=3"]), VOCAB)
    own = [{id(p) for p in scheme.parameters()} for scheme in model.schemes]
    registered = {id(p) for p in model.scheme.parameters()}
    assert len(set().union(*own)) == sum(map(len, own)) and set().union(*own) <= registered
    assert len(model.state_dict().keys()) == len(list(model.named_parameters()))


DECAYED = {
    "t5": set(),
    "kerple": set(),
    "fire": {"hidden_weight", "output_weight"},
    "shaw": set(),
    "transformer_xl": {"layers.0.matrix", "layers.1.matrix"},
    "fox": {"layers.0.w", "layers.1.w"},
    "fox_qk_rope": {"members.0.layers.0.w", "members.0.layers.1.w"},
    "ssmax": set(),
}


@pytest.mark.parametrize("name", DECAYED)
def test_matrices_alone_are_decayed(name):
    decayed = decayed_parameters(build_model(certificate_config(name), VOCAB))
    assert {each.removeprefix("scheme.") for each in decayed if each.startswith("scheme.")} == DECAYED[name]
