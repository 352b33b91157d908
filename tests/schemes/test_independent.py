"""QK, ALiBi and the sinusoidal table against Hugging Face transformers' own code, run in float64."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.llama import modeling_llama
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from posbench.composition import compose
from posbench.model import build_model
from posbench.schemes import At, Shape
from posbench.schemes.alibi import Alibi, slopes
from posbench.schemes.sinusoidal import Sinusoidal
from posbench.verify import MODEL, VOCAB, random_tokens, randomise


class _Float64:
    """torch, with float64 under the name of float32: transformers casts norms and angles to float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def llama_like(model, base):
    """transformers' LLaMA with the weights of `model`, in float64."""
    m = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=m.d_model,
            intermediate_size=m.ffn_dim,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_heads,
            num_key_value_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            rms_norm_eps=m.norm_eps,
            tie_word_embeddings=m.tied_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    ).double()
    ours = model.state_dict()
    theirs = {"model.embed_tokens.weight": ours["embedding.weight"], "model.norm.weight": ours["norm.weight"]}
    theirs["lm_head.weight"] = ours["embedding.weight" if m.tied_embeddings else "unembedding.weight"]
    for n in range(m.num_layers):
        layer, block = f"model.layers.{n}.", f"blocks.{n}."
        sizes = [m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, m.num_kv_heads * m.head_dim]
        q, k, v = ours[block + "attention.qkv.weight"].split(sizes)
        gate, up = ours[block + "ffn.gate_up.weight"].chunk(2)
        theirs |= {
            layer + "input_layernorm.weight": ours[block + "attention_norm.weight"],
            layer + "self_attn.q_proj.weight": q,
            layer + "self_attn.k_proj.weight": k,
            layer + "self_attn.v_proj.weight": v,
            layer + "self_attn.o_proj.weight": ours[block + "attention.out.weight"],
            layer + "post_attention_layernorm.weight": ours[block + "ffn_norm.weight"],
            layer + "mlp.gate_proj.weight": gate,
            layer + "mlp.up_proj.weight": up,
            layer + "mlp.down_proj.weight": ours[block + "ffn.down.weight"],
        }
    llama.load_state_dict(theirs, strict=True)
    return llama.eval()


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "extra", [[], ["model.num_kv_heads=6"], ["model.tied_embeddings=true"]], ids=["gqa", "mha", "tied"]
)
def test_qk_equals_hugging_face_llama(base, extra, monkeypatch):
    monkeypatch.setattr(modeling_llama, "torch", _Float64())
    model = build_model(compose(["scheme=qk_rope", f"scheme.base={base}", *MODEL, *extra]), VOCAB)
    randomise(model)
    model = model.double()
    tokens = random_tokens(150).view(2, 75)
    with torch.no_grad():
        for offset in (0, 37):
            position_ids = torch.arange(offset, offset + 75)[None]
            theirs = llama_like(model, base)(tokens, position_ids=position_ids).logits
            assert theirs.dtype == torch.float64 and theirs.abs().max() > 1
            assert (model(tokens, offset=offset) - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("num_heads", range(1, 34))
def test_alibi_slopes_and_bias_equal_those_of_bloom_and_mpt(num_heads):
    T = 20
    alibi = Alibi(Shape(64, num_heads, num_heads, 16)).double()
    head, i, j = torch.arange(num_heads)[:, None, None], torch.arange(T)[:, None], torch.arange(T)[None, :]
    ours = alibi.bias(None, None, At(None, 0, 0, T))(None, head, i, j)
    assert ours.shape == (num_heads, T, T)
    bloom = build_alibi_tensor(torch.ones(1, T), num_heads, torch.float32).view(num_heads, T).double()
    mpt = build_mpt_alibi_tensor(num_heads, T).view(num_heads, T).double()
    for theirs in (bloom, mpt):
        # Both write the bias of the last query, up to a constant of the row, which a softmax drops; ours is 0 at j = i.
        assert torch.allclose(slopes(num_heads), (theirs[:, -1] - theirs[:, 0]) / (T - 1), rtol=1e-6, atol=0)
        relative = theirs[:, None, :] - theirs[:, :, None]
        assert torch.allclose(ours, relative, rtol=1e-5, atol=1e-6)


def test_alibi_slopes_by_hand():
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]  # the example of the paper
    assert slopes(8).tolist() == eight
    assert slopes(1).tolist() == [2.0**-8]
    assert torch.allclose(
        slopes(12), torch.tensor([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], dtype=torch.float64), rtol=1e-15
    )


def test_a_penalty_not_a_reward_and_none_at_distance_zero():
    bias, at = Alibi(Shape(64, 2, 2, 16)).bias(None, None, At(None, 0, 0, 0)), torch.tensor
    assert bias(None, at(0), at(5), at(5)) == 0
    assert bias(None, at(0), at(5), at(3)) == -2 * 2.0**-4
    far = 2**20
    assert bias(None, at(0), at(far), at(far - 1)) == bias(None, at(0), at(1), at(0))


def test_the_sinusoidal_table_equals_distilberts():
    width, length = 48, 300
    theirs = torch.empty(length, width, dtype=torch.float64)
    create_sinusoidal_embeddings(length, width, theirs)
    scheme = Sinusoidal(Shape(width, 4, 4, 12, embedding_std=0.5), amplitude=3.0)
    assert torch.allclose(scheme.prepare(torch.arange(length), length), 1.5 * theirs, rtol=0, atol=1e-6)
    x = torch.randn(2, length, width, dtype=torch.float64)
    assert torch.allclose(
        scheme.embed(x, scheme.prepare(torch.arange(length), length)) - x,
        1.5 * theirs.expand(2, -1, -1),
        rtol=0,
        atol=1e-6,
    )


def test_at_amplitude_one_sines_and_token_embeddings_are_in_the_papers_proportion():
    config = compose(["scheme=sinusoidal", "model=tiny"])
    assert config.scheme.options["amplitude"] == 1.0
    model = build_model(config, VOCAB)
    assert model.scheme.prepare(torch.arange(100), 100).max() == pytest.approx(
        model.embedding.weight.std().item(), rel=0.05
    )
