"""A Hugging Face folder that posbench cannot represent is refused before any text is read, in its files' own words."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from posbench.runs.start import start_of
from tests.huggingface.test_export import written
from tests.huggingface.test_from_folder import ROPE, assert_same_logits, composed, edit, saved
from tests.refusals import refuses


def start(folder):
    found = start_of(str(folder), 0, "runs")
    assert found is not None
    return found


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(part):
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


def with_tensor(name, tensor):
    return lambda weights: weights | {name: tensor}


@pytest.mark.parametrize("family", ["Llama", "SmolLM3"])
@torch.no_grad()
def test_a_head_that_differs_from_tied_embeddings_is_kept(family, tmp_path):
    saved(tmp_path / "head", family, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(257, 64, generator=generator) / 8
    change_weights(tmp_path / "head", with_tensor("lm_head.weight", head))
    assert start(tmp_path / "head").model["tied_embeddings"] is False
    assert "lm_head.weight that differs" in start(tmp_path / "head").notes[0]
    weights = load_file(tmp_path / "head/model.safetensors")
    theirs = saved(tmp_path / "untied", family, tie_word_embeddings=False)
    theirs.load_state_dict(weights)
    assert_same_logits(tmp_path / "head", theirs)


def test_a_head_that_equals_tied_embeddings_is_no_second_table(tmp_path):
    saved(tmp_path / "head", "Llama", tie_word_embeddings=True)
    table = load_file(tmp_path / "head/model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path / "head", with_tensor("lm_head.weight", table.clone()))
    assert start(tmp_path / "head").model["tied_embeddings"] is True
    assert not start(tmp_path / "head").notes


CHANGES = {
    "a scale": (with_tensor("model.layers.0.self_attn.k_scale", torch.ones(1)), "has model.layers.0.self_attn.k_scale"),
    "a scalar": (with_tensor("model.layers.0.self_attn.k_scale", torch.tensor(1.0)), "layers.0.self_attn.k_scale"),
    "half of the biases": (with_tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "q_proj.bias, which"),
    "frequencies": (
        with_tensor("rope.freqs", torch.ones(8)),
        r"model.safetensors has rope\.freqs, which LlamaForCausalLM has not",
    ),
    "rows": (
        with_tensor("model.embed_tokens.weight", torch.ones(260, 64)),
        r"has model.embed_tokens.weight \[260, 64\], and config.json says vocab_size=257, which makes it \[257, 64\]",
    ),
    "no head": (without("lm_head"), r"lacks lm_head.weight \(tie_word_embeddings=false\)"),
    "no values": (without("1.self_attn.v_proj"), r"lacks model.layers.1.self_attn.v_proj.weight"),
    "no layer": (without("layers.1."), r"lacks model.layers.1.*8 more tensors do not fit"),
    "integers": (
        lambda weights: {k: v.to(torch.int8) if "q_proj" in k else v for k, v in weights.items()},
        "q_proj.weight in the number type I8",
    ),
    "compiled": (
        lambda weights: {f"_orig_mod.{k}": v for k, v in weights.items()},
        "begins with _orig_mod.: remove it",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_do_not_fit_are_refused_by_their_own_names(change, tmp_path):
    saved(tmp_path / "theirs", "Llama")
    start(tmp_path / "theirs")
    edited, message = CHANGES[change]
    change_weights(tmp_path / "theirs", edited)
    refuses(message, start, tmp_path / "theirs")


def test_keys_of_a_rotation_that_are_not_used_are_named(tmp_path):
    saved(tmp_path / "theirs", "Llama")
    edit(tmp_path / "theirs", rope_parameters={"rope_type": "linear", "factor": 4.0, **ROPE, "attn_factor": 0.9})
    [line] = start(tmp_path / "theirs").notes
    assert line.endswith("has rotation keys that rope_type=linear does not use: attn_factor")


def test_a_broken_adapter_is_named(tmp_path):
    saved(tmp_path / "theirs", "Llama")
    for content in ("{", "[1]", ""):
        (tmp_path / "theirs" / "adapter_config.json").write_text(content)
        refuses(r"adapter_config\.json is not a JSON object", start, tmp_path / "theirs")


@pytest.mark.parametrize("missing", [(), ("model.safetensors",), ("model.safetensors", "config.json")])
def test_an_adapter_is_refused(missing, tmp_path):
    folder = tmp_path / "adapted"
    saved(folder, "Llama")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "big"}))
    for name in missing:
        (folder / name).unlink()
    refuses(r"an adapter of big.*merge it", start, folder)


def test_the_files_of_another_tokenizer_are_named(tmp_path):
    saved(tmp_path / "theirs", "Llama")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "theirs" / name).write_text("{}")
    refuses(r"no tokenizer\.json \(it has merges\.txt, vocab\.json\)", composed, tmp_path / "theirs")


def test_an_export_with_tensors_that_do_not_fit_is_refused(tmp_path):
    written(tmp_path, "t5")
    change_weights(tmp_path / "exported", without("blocks.1.attention.qkv"))
    refuses(r"lacks decoder\.blocks\.1\.attention\.qkv\.weight", start, tmp_path / "exported")
