"""Schemes against other people's code run in float64, or against loops over the arithmetic of their papers' code."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BloomModel,
    DistilBertConfig,
    DistilBertModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MptModel,
    T5Config,
    T5Model,
    XLNetConfig,
    XLNetModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import _apply_relative_key_position_encoding

from posbench.attention.kernels import Scoring, attend
from posbench.config import SchemeConfig
from posbench.huggingface.stock import transformers_model
from posbench.schemes import Gates, Placement, Shape, build_scheme
from posbench.schemes.alibi import slopes
from posbench.schemes.biases import buckets_of
from posbench.schemes.path import reflected
from posbench.verify import random_tokens
from tests.rows import Float64, assert_same_gradients, built, difference, random

H, HKV, T, D = 6, 2, 300, 16
SHAPE = Shape(d_model=48, num_heads=H, num_kv_heads=HKV, head_dim=D, context_length=512)


def scheme_of(kind, shape=SHAPE, **options):
    """Return the scheme of a layer in float64 with random parameters."""
    scheme = build_scheme(SchemeConfig("mine", kind, options), shape).double()[0]
    for n, parameter in enumerate(scheme.parameters()):
        parameter.data = random(*parameter.shape, seed=n)
    return scheme


def whole(scheme, q=None, k=None, offset=0, length=T):
    """Return the bias of every pair of tokens of a window that begins at position `offset`, [1 or B, H, T, T]."""
    q = random(1, scheme.shape.num_heads, length, D) if q is None else q
    at = Placement(scheme.prepare(torch.arange(offset, offset + q.shape[2]), q.shape[2]), offset, offset, q.shape[2])
    bias, rows = scheme.bias(q, k, None, at), torch.arange(q.shape[2])
    b, h = torch.arange(len(q))[:, None, None, None], torch.arange(q.shape[1])[:, None, None]
    return bias(b, h, rows[:, None], rows).expand(len(q), -1, -1, -1)


@torch.no_grad()
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "extra", [[], ["model.num_kv_heads=6"], ["model.tied_embeddings=true"]], ids=["gqa", "mha", "tied"]
)
def test_qk_equals_hugging_face_llama(base, extra, monkeypatch):
    monkeypatch.setattr(modeling_llama, "torch", Float64())
    model, tokens = built("qk_rope", f"scheme.base={base}", *extra), random_tokens(150).view(2, 75)
    stock = transformers_model(model)
    theirs = LlamaForCausalLM(LlamaConfig(**stock.config)).double().eval()
    assert not theirs.load_state_dict(stock.weights, strict=False).unexpected_keys
    assert theirs.config.rope_parameters["rope_theta"] == base
    for offset in (0, 37):
        logits = theirs(tokens, position_ids=torch.arange(offset, offset + 75)[None]).logits
        assert logits.dtype == torch.float64 and logits.abs().max() > 1
        assert difference(model(tokens, offset=offset), logits) < 1e-12


@pytest.mark.parametrize("num_heads", range(1, 34))
def test_alibi_slopes_and_bias_equal_those_of_bloom_and_mpt(num_heads):
    ours = whole(scheme_of("alibi", Shape(64, num_heads, num_heads, 16)), length=20)[0]
    bloom = (
        BloomModel.build_alibi_tensor(None, torch.ones(1, 20), num_heads, torch.float32).view(num_heads, 20).double()
    )
    mpt = MptModel.build_mpt_alibi_tensor(None, num_heads, 20).view(num_heads, 20).double()
    for theirs in (bloom, mpt):
        # Both write the bias of the last query, up to a constant of the row, which a softmax drops; ours is 0 at j = i.
        assert torch.allclose(slopes(num_heads), (theirs[:, -1] - theirs[:, 0]) / 19, rtol=1e-6, atol=0)
        assert torch.allclose(ours, theirs[:, None, :] - theirs[:, :, None], rtol=1e-5, atol=1e-6)


def test_the_sinusoidal_table_equals_distilberts():
    config = DistilBertConfig(dim=48, n_heads=4, n_layers=1, max_position_embeddings=T, sinusoidal_pos_embds=True)
    theirs = DistilBertModel(config).embeddings.position_embeddings.weight.double()
    scheme, x = scheme_of("sinusoidal", Shape(48, 4, 4, 12, embedding_std=0.5), amplitude=3.0), random(2, T, 48)
    added = scheme.embed(x, scheme.prepare(torch.arange(T), T)) - x
    assert torch.allclose(added, 1.5 * theirs.expand(2, -1, -1), rtol=0, atol=1e-6)


def t5_attention(num_buckets=32, max_distance=128):
    """Return the self-attention of a T5 decoder's first layer, which has the biases."""
    sizes = {"d_model": 48, "num_heads": H, "d_kv": D, "num_layers": 1}
    buckets = {"relative_attention_num_buckets": num_buckets, "relative_attention_max_distance": max_distance}
    return T5Model(T5Config(**sizes, **buckets)).decoder.block[0].layer[0].SelfAttention


@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (2, 9), (32, 1000)])
def test_the_buckets_are_t5s(num_buckets, max_distance):
    theirs, length = t5_attention(num_buckets, max_distance), 300_000
    theirs.relative_attention_bias.weight.data = torch.arange(float(num_buckets))[:, None].expand(-1, H)
    buckets = theirs.compute_bias(length, 1)[0, 0, :, 0]  # every distance to the first token
    assert torch.equal(buckets_of(torch.arange(length), num_buckets, max_distance), buckets.long())


def test_the_bias_of_t5_is_that_of_its_decoder():
    theirs, scheme = t5_attention(), scheme_of("t5")
    theirs.relative_attention_bias.weight.data = scheme.table.data
    expected = theirs.compute_bias(T, T).tril()
    assert expected.dtype == torch.float64 and torch.equal(whole(scheme).tril(), expected)
    assert torch.equal(whole(scheme, offset=2**22), whole(scheme))


def test_the_bias_of_fire_is_its_perceptron():
    """A plain softmax ignores the output's own bias; with a sink it counts."""
    fire, i = scheme_of("fire", hidden=5), torch.arange(T)
    c, L = F.softplus(fire.c), F.softplus(fire.L) * fire.shape.context_length
    distances = (i[:, None] - i).clamp(min=0)
    share = torch.log1p(c * distances) / torch.log1p(c * torch.maximum(L, i.double()))[:, None]
    units = F.relu(F.linear(share[..., None], fire.hidden_weight, fire.hidden_bias))
    expected = F.linear(units, fire.output_weight, fire.output_bias).movedim(-1, 0)[None]
    assert torch.allclose(whole(fire).tril(), expected.tril(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [1, 16, 500])
def test_shaws_keys_are_those_of_wav2vec2_bert(clip):
    theirs = SimpleNamespace(left_max_position_embeddings=clip, right_max_position_embeddings=0, scaling=D**-0.5)
    scheme, q = scheme_of("shaw", clip=clip), random(2, H, T, D)
    theirs.distance_embedding = torch.nn.Embedding.from_pretrained(scheme.table.detach().flip(0))
    _, expected = _apply_relative_key_position_encoding(theirs, q, q)
    assert torch.allclose(whole(scheme, q).tril(), expected.tril(), rtol=0, atol=1e-13)
    assert torch.equal(whole(scheme, q, offset=2**22), whole(scheme, q))


@pytest.mark.parametrize("channels", [None, 48, 6])
def test_the_scores_of_transformer_xl_are_those_of_xlnets_code(channels):
    scheme, width = scheme_of("transformer_xl", channels=channels), channels or D
    q, k, v = random(2, H, T, D), random(2, HKV, T, D, seed=3), random(2, HKV, T, D, seed=4)
    theirs = XLNetModel(XLNetConfig(d_model=H * D, n_head=H, n_layer=1)).layer[0].rel_attn.double().eval()
    theirs.r_w_bias.data, theirs.r_r_bias.data = scheme.content.data, scheme.position.data
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    r = XLNetModel.positional_embedding(torch.arange(T, -T, -1, dtype=torch.float64), frequencies, 2)
    heads = (x.repeat_interleave(H // x.shape[1], 1).permute(2, 0, 1, 3) for x in (q, k, v))  # [T, B, H, D]
    later = torch.ones(T, T, dtype=torch.float64).triu(1)[:, :, None, None].expand(-1, -1, 2, H)
    keys = torch.einsum("jbr,hdr->jbhd", r, scheme.matrix.view(H, D, width))
    expected = theirs.rel_attn_core(*heads, keys, attn_mask=later)
    for offset, close in ((0, 1e-12), (2**22, 1e-8)):
        pos = scheme.prepare(torch.arange(offset, offset + T), T)
        wide_q, wide_k = scheme.q(q, pos), scheme.k(k, pos)
        assert wide_q.shape[-1] == wide_k.shape[-1] == D + width  # nothing T x T: any fused kernel takes them
        ours = attend(wide_q, wide_k, v, Scoring(D**-0.5))
        assert torch.allclose(ours.permute(2, 0, 1, 3), expected, rtol=0, atol=close)


def cope_by_loops(scheme, q, k):
    """Compute facebookresearch/RAM projects/cope query by query, which needs no mask."""
    e, out = scheme.e, []
    for i in range(q.shape[2]):
        scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].mT / math.sqrt(D)  # [B, H, 1, i + 1]
        positions = torch.sigmoid(scores).flip(-1).cumsum(-1).flip(-1).clamp(max=len(e) - 1)
        ceil, floor = positions.ceil().long(), positions.floor().long()
        integer = q[:, :, i : i + 1] @ e.T / math.sqrt(D)
        w = positions - floor
        out.append(integer.gather(-1, ceil) * w + integer.gather(-1, floor) * (1 - w))
    return out


def dape_by_loops(scheme, q, k):
    """Compute chuanyang-Zheng/DAPE: `alibi + mlp(cat(scores, alibi))` over heads, at each pair of tokens."""
    out = []
    for i in range(q.shape[2]):
        scores = (q[:, :, i : i + 1] @ k[:, :, : i + 1].mT / math.sqrt(D))[:, :, 0]  # [B, H, i + 1]
        alibi = -torch.tensor([2.0 ** -(8 * n / 4) for n in range(1, 5)] + [2.0**-1, 2.0**-3])[:, None]
        alibi = (alibi.double() * (i - torch.arange(i + 1))).expand_as(scores)
        pairs = torch.cat((scores, alibi), dim=1)  # [B, 2 H, i + 1]
        hidden = F.leaky_relu(torch.einsum("wc,bcj->bwj", scheme.inner, pairs) + scheme.inner_constant[:, None])
        mixed = torch.einsum("hw,bwj->bhj", scheme.outer, hidden) + scheme.outer_constant[:, None]
        out.append((alibi + mixed)[:, :, None])
    return out


@pytest.mark.parametrize("rows", [70, 33, 1])
def test_path_is_its_authors_decoding_step_with_its_gradients(rows):
    """Decoding in flash-linear-attention: each token removes from every past key the part along its w."""
    T, D = 70, 8
    q, k, w = (random(2, H, T, D, seed=seed).requires_grad_() for seed in range(3))
    b = (2 * random(2, H, T, 1, seed=3).sigmoid()).detach().requires_grad_()
    direction, keys, scores = F.normalize(w, dim=-1), k[:, :, :0], []
    for i in range(T):
        w_i = direction[:, :, i : i + 1]
        keys = torch.cat((keys - b[:, :, i : i + 1] * (keys * w_i).sum(-1, keepdim=True) * w_i, k[:, :, i : i + 1]), 2)
        scores.append(F.pad(q[:, :, i : i + 1] @ keys.mT, (0, T - 1 - i)))
    theirs = torch.cat(scores, 2)[:, :, T - rows :]
    visible = torch.ones(T, T, dtype=torch.bool).tril()[T - rows :]
    ours = reflected(q[:, :, T - rows :], k, direction, b) * visible
    assert theirs.abs().max() > 1 and difference(ours, theirs) < 1e-12
    assert_same_gradients(ours, theirs, (q, k, w, b), 1e-10)


@pytest.mark.parametrize(
    "kind, by_loops, options", [("cope", cope_by_loops, {"positions": 9}), ("dape", dape_by_loops, {"width": 5})]
)
def test_biases_that_read_keys_are_their_papers_code_with_its_gradients(kind, by_loops, options):
    scheme, length = scheme_of(kind, **options), 30
    q, k = random(2, H, length, D).requires_grad_(), random(2, HKV, length, D, seed=3).requires_grad_()
    ours = whole(scheme, q, k)
    rows = by_loops(scheme, q, k.repeat_interleave(H // HKV, 1))
    theirs = torch.cat([F.pad(row, (0, length - row.shape[-1])) for row in rows], dim=2)
    assert theirs.abs().max() > 1 and difference(ours.tril(), theirs) < 1e-12
    assert_same_gradients(ours.tril(), theirs, [q, k, *scheme.parameters()], 1e-10)


@torch.no_grad()
def test_selective_rope_that_selects_nothing_is_rope():
    """Sums include the first token, so angles count from 1; scores depend only on differences."""
    rope, selective = built("qk_rope"), built("selective_rope", "scheme.base=10000")
    for scheme in selective.scheme:
        scheme.b.zero_()
    assert difference(selective(random_tokens()), rope(random_tokens())) > 0.1
    for scheme in selective.scheme:
        scheme.u.zero_()
    assert difference(selective(random_tokens()), rope(random_tokens())) < 1e-12


@torch.no_grad()
def test_repo_is_transformers_rotation_at_the_positions_that_its_authors_map_gives(monkeypatch):
    monkeypatch.setattr(modeling_llama, "torch", Float64())
    scheme, positions = scheme_of("repo", base=10000.0), torch.arange(T)
    x, q, k = random(2, T, 48), random(2, H, T, D, seed=3), random(2, HKV, T, D, seed=4)
    learned = scheme.gate(x, positions)
    z = (F.silu(x @ scheme.G.t()) * (x @ scheme.A.t())) @ scheme.u.t()  # [B, T, Hkv], as SakanaAI/repo's final_map
    assert z.std() > 1
    rope = scheme_of("rotary", sites=["q", "k"])
    for gates, places in (
        (learned, z),
        (positions.double().expand(2, HKV, T)[..., None], positions.expand(HKV, -1).t()),
    ):
        angles = places[..., None] / 10000 ** (torch.arange(0, D, 2).double() / D)  # [B, T, Hkv, D/2]
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        for tensor, move in ((q, scheme.q), (k, scheme.k)):
            group = tensor.shape[1] // HKV
            ours = move(tensor, scheme.locate(None, Gates(*4 * [gates.repeat_interleave(group, dim=1)])))
            for head in range(tensor.shape[1]):
                head_rotation = (part[..., head // group, :].expand(2, -1, -1) for part in (cos, sin))
                theirs, _ = modeling_llama.apply_rotary_pos_emb(tensor[:, [head]], tensor[:, [head]], *head_rotation)
                assert difference(ours[:, [head]], theirs) < 1e-12
    assert torch.allclose(
        ours, rope.k(k, rope.prepare(positions, T)), rtol=0, atol=1e-12
    )  # tokens that say their index


@pytest.mark.parametrize("offset", [0, 37])
def test_grape_ap_is_its_authors_code_with_its_gradients(offset):
    """model/llama-mha-grape-a-pi.py. They turn the other way: swapping the halves of p undoes this."""
    P, length = 8, 40
    scheme, x = scheme_of("grape_ap", width=P), random(2, length, 48)
    positions = torch.arange(offset, offset + length)
    pos = scheme.prepare(positions, length)
    gates = scheme.gate(x, pos)
    rows, b, h = torch.arange(length), torch.arange(2)[:, None, None, None], torch.arange(H)[:, None, None]
    bias = scheme.bias(x, x, Gates(gates, gates, gates, gates), Placement(pos, offset, offset, length))
    ours = bias(b, h, rows[:, None], rows).tril()
    p = torch.cat((x @ scheme.W.t()).unflatten(-1, (H, P)).transpose(1, 2).chunk(2, -1)[::-1], -1)  # [B, H, T, P]
    p_norm = p * p.pow(2).mean(-1, keepdim=True).rsqrt()
    cos, sin = positions[:, None].double().cos(), positions[:, None].double().sin()
    first, second = p_norm.chunk(2, dim=-1)
    p_rot = torch.cat((first * cos + second * sin, first * -sin + second * cos), dim=-1)
    theirs = torch.log(torch.sigmoid(p @ p_rot.mT / P)) * slopes(H)[:, None, None]
    theirs = theirs.masked_fill(torch.ones(length, length).triu(1) == 1, 0.0)
    theirs = (theirs.sum(-1, keepdim=True) - theirs.cumsum(-1)).tril()
    assert theirs.abs().max() > 1 and difference(ours, theirs) < 1e-12
    assert_same_gradients(ours, theirs, [scheme.W], 1e-10)


WIDE = Shape(d_model=256, num_heads=4, num_kv_heads=2, head_dim=64, context_length=512)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75, 1.0])
def test_a_partial_rotation_is_gpt_neoxs(fraction, monkeypatch):
    monkeypatch.setattr(modeling_gpt_neox, "torch", Float64())
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    config = GPTNeoXConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    scheme = scheme_of("partial_rotary", WIDE, sites=["q", "k"], fraction=fraction)
    inv_freq, _ = modeling_gpt_neox.GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    q, k, positions = random(2, 4, T, 64), random(2, 2, T, 64, seed=1), torch.arange(7, 7 + T)
    angles = (positions[:, None] * inv_freq).repeat(1, 2)[None]
    theirs = modeling_gpt_neox.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    pos = scheme.prepare(positions, T)
    for ours, their in zip((scheme.q(q, pos), scheme.k(k, pos)), theirs, strict=True):
        assert difference(ours, their) < 1e-12
    assert torch.equal(scheme.q(q, pos)[..., scheme.width :], q[..., scheme.width :])


def their_frequencies(name, monkeypatch, length=None, **parameters):
    """Return transformers' frequencies for a kind of rotation, and its scaling of cosine and sine."""
    compute = ROPE_INIT_FUNCTIONS[name]
    monkeypatch.setitem(compute.__globals__, "torch", Float64())
    parameters = {"rope_type": name, "rope_theta": 10000.0, **parameters}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=512, rope_parameters=parameters
    )
    frequencies, scaling = compute(config, seq_len=length)
    return frequencies.double(), scaling


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.3, 0.75, 1.0])
def test_a_proportional_rotation_is_transformers(fraction, monkeypatch):
    theirs, _ = their_frequencies("proportional", monkeypatch, rope_theta=1e6, partial_rotary_factor=fraction)
    ours = scheme_of("p_rope", WIDE, sites=["q", "k"], fraction=fraction, base=1e6).frequencies()
    assert ours.shape == (32,) and (ours != 0).sum() == math.floor(fraction * 32)
    assert torch.allclose(ours, theirs, rtol=1e-14, atol=0)


THEIRS = {"pi": "linear", "dynamic_ntk": "dynamic", "yarn_code": "yarn", "ntk": "dynamic"}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize("name", THEIRS)
def test_rescaled_frequencies_equal_transformers(name, factor, base, fraction, monkeypatch):
    parameters = {"rope_theta": base, "original_max_position_embeddings": 512, "partial_rotary_factor": fraction}
    # Dynamic NTK grows with the window at their factor 1; our `ntk` has a fixed factor.
    parameters["factor"] = 1.0 if THEIRS[name] == "dynamic" else factor
    theirs, scaling = their_frequencies(THEIRS[name], monkeypatch, int(factor * 512), **parameters)
    options = {} if name == "dynamic_ntk" else {"factor": factor}
    scheme = scheme_of("partial_rotary", WIDE, sites=["q", "k"], fraction=fraction, base=base, rescale=name, **options)
    length = 77 if name == "ntk" else int(factor * 512)
    assert torch.allclose(scheme.angles(torch.ones(1), length)[0], theirs, rtol=1e-13, atol=0)
    if name == "yarn_code":  # they put the root of the temperature into cosine and sine; ours is on q, whole
        assert scheme.rescaling.temperature(length) == pytest.approx(scaling**2, rel=1e-14)


LENGTH = {"original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
YARN = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
LONGROPE = {"rope_type": "longrope", "factor": 32.0, **LENGTH}
ROPE_PARAMETERS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 1.0, **LENGTH},
    {"rope_type": "dynamic", "factor": 4.0, **LENGTH},
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    YARN,
    {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.25},
    {**YARN, "mscale": 0.7},
    LONGROPE,
    {**LONGROPE, "factor": 1.0},
    {**LONGROPE, "attention_factor": 1.5},
]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("length", [200, 512, 513, 3000])
@pytest.mark.parametrize("parameters", ROPE_PARAMETERS, ids=lambda p: "-".join(str(value) for value in p.values()))
def test_rope_parameters_mean_what_they_mean_in_transformers(parameters, length, fraction, monkeypatch):
    if parameters["rope_type"] == "longrope":
        pairs = range(int(32 * fraction))
        lists = {"short_factor": [1 + n / 40 for n in pairs], "long_factor": [1 + n * n / 9 for n in pairs]}
        parameters = {**parameters, **lists}
    theirs, scaling = their_frequencies(
        parameters["rope_type"],
        monkeypatch,
        length,
        **{**parameters, "rope_theta": 5e5, "partial_rotary_factor": fraction},
    )
    scheme = scheme_of("partial_rotary", WIDE, sites=["q", "k"], fraction=fraction, base=5e5, rescale=parameters)
    ours = scheme.angles(torch.ones(1), length)[0]
    assert torch.allclose(ours, theirs, rtol=2e-7 if "long_factor" in parameters else 1e-13, atol=0)
    q, r = torch.ones(64, dtype=torch.float64), int(64 * fraction)
    rotated = scheme.q(q[None, None, None], scheme.prepare(torch.tensor([7]), length)).flatten()
    assert rotated[:r].norm().item() == pytest.approx(r**0.5 * scaling**2, rel=1e-12)  # they also multiply k by it
    assert torch.equal(rotated[r:], q[r:])
