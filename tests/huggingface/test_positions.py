"""Positions of models are read from a class and its settings, checked by behaviour, and changed by `--under`."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from posbench.config import ConfigError
from posbench.huggingface.behaviour import contradictions, moved_layers, tiny, tiny_model, wrong_rotations
from posbench.huggingface.loading import Source
from posbench.huggingface.positions import _Reader, read_positions, skeleton
from posbench.huggingface.rotations import change_rotations
from posbench.model.positions import row_of
from tests.huggingface.test_from_folder import edit
from tests.huggingface.test_subject import scored, subject, windows

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
FAMILIES = {  # family -> changed settings
    "gemma3_text": {},  # two kinds of layers
    "deepseek_v3": {"rope_parameters": YARN},  # MLA
    "lfm2": {"full_attn_idxs": [2, 5]},  # convolutions
    "gemma4_text": {"num_hidden_layers": 6},  # p-RoPE
    "qwen3_next": {},  # states
    "gemma2": {},
    "gpt_neox": {},
    "smollm3": {},
    "llama4_text": {},
    "cohere2": {},
    "olmo3": {},
    "mimo_v2_flash": {},
}
SLOW = [*FAMILIES][4:]


def paragraph(family, **settings):
    config = AutoConfig.for_model(family, **settings)
    return read_positions(skeleton(config), config, 4096).paragraph


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("llama", {}, "All layers see all tokens and rotate whole heads with base 10,000."),
        ("mistral", {"sliding_window": 64}, "All layers see a window of 64 tokens and rotate whole heads"),
        ("mistral", {"sliding_window": None}, "All layers see all tokens and rotate whole heads"),
        (
            "llama4_text",
            {},
            "3 of 4 layers see chunks of 8,192 tokens and rotate whole heads with base 500,000. Every 4th layer "
            "(from 3) sees all tokens, has no position and multiplies queries by "
            "1 + 0.1 ln(1 + floor((p + 1) / 8,192)).",
        ),
        (
            "gemma2",
            {},
            "Every 2nd layer (from 0) sees a window of 4,096 tokens, rotates whole heads with base 10,000 and caps "
            "scores at 50.",
        ),
        ("gemma4_text", {}, "sees all tokens and rotates 128 of 512 channels of each head with base 1,000,000."),
        ("exaone4", {}, "Every 4th layer (from 3) sees all tokens and has no position."),
        ("lfm3", {}, "13 layers have a convolution over 7 tokens."),
        ("qwen3_next", {}, "3 of 4 layers have a state instead of attention."),
        ("bloom", {}, "All layers see all tokens and use ALiBi."),
        ("gpt2", {}, "Positions are added to the embeddings (learned). All layers see all tokens and have no other."),
        ("deepseek_v3", {}, "rotate 64 of 192 channels of each head with base 10,000."),
        # 1 + 0.1 ln 40, squared, is in the scale of the scores.
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "(yarn with factor 40, temperature 1.87)",
        ),
        (
            "recurrent_gemma",
            {},
            "Every 3rd layer (from 2) sees a window of 2,048 tokens and rotates 128 of 256 channels",
        ),
        ("gpt_oss", {}, "(yarn with factor 32, temperature 1.81) and has a sink."),
    ],
)
def test_a_paragraph_says_what_the_class_does(family, settings, said):
    assert said in paragraph(family, **settings)


def checked(family, **settings):
    model = tiny_model(AutoConfig.for_model(family, **settings))
    found = contradictions(model, read_positions(model, model.config, 12))
    return found + wrong_rotations(model, model.config) + moved_layers(model)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FAMILIES]
)
def test_a_tiny_model_agrees_with_the_table(family):
    assert not checked(family, **FAMILIES[family])


def test_a_wrong_statement_is_found_by_behaviour(monkeypatch):
    usual = _Reader._rotation

    def global_base(self, number, kind, sees):
        return usual(self, number, "full_attention", sees)

    monkeypatch.setattr(_Reader, "_rotation", global_base)
    found = checked("gemma3_text")
    assert len(found) == 7 and "layer 0 is said to see a window of 5 tokens and rotate whole heads" in found[0]
    assert "its queries turn otherwise" in found[0]

    def always(self, number, kind, sees):
        self.text.no_rope_layers = [1] * 99
        return usual(self, number, kind, sees)

    monkeypatch.setattr(_Reader, "_rotation", always)
    found = checked("smollm3")
    assert "layer 3 is said to see all tokens and rotate whole heads" in found[0]
    assert "its output is the same if two tokens are exchanged" in found[0]
    monkeypatch.setattr(_Reader, "_rotation", usual)
    monkeypatch.setattr(_Reader, "_sees", lambda self, *words: ("window", 4))
    assert "layer 0" in checked("llama")[0] and "depends on token" in checked("llama")[0]


def test_a_class_that_rotates_queries_alone_is_found(monkeypatch):
    usual = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **words: (usual(q, k, cos, sin, **words)[0], k)
    )
    [*_, last] = checked("llama")
    assert last.endswith("and its output changes if all positions grow")


def by_hand(parameters, option):
    """Return `rope_parameters` as a person would edit them in config.json."""
    if "rope_theta" not in parameters:
        return {kind: by_hand(inner, option) for kind, inner in parameters.items()}
    if option == "base=3e5":
        return {**parameters, "rope_theta": 3e5}
    kept = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return {**kept, **LINEAR}


@pytest.mark.parametrize("option", ["base=3e5", "rescale={rope_type: linear, factor: 4}"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FAMILIES]
)
def test_a_changed_model_is_the_edited_one_whole_and_in_pieces(family, option, tmp_path):
    config = tiny(AutoConfig.for_model(family, **{"max_position_embeddings": 64, **FAMILIES[family]}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Large enough that positions count.
        if parameter.ndim > 1:
            parameter.data.normal_(0, 2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    source, read = Source(tmp_path), windows(80)
    if family == "gemma4_text" and option.startswith("rescale"):
        with pytest.raises(ConfigError, match="which posbench does not rescale"):
            subject(source, option)
        return
    usual = scored(subject(source), read)
    whole, in_pieces = losses(subject(source, option), read)
    edit(tmp_path, rope_parameters=by_hand(config.to_dict()["rope_parameters"], option))
    expected, expected_in_pieces = losses(subject(Source(tmp_path)), read)
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(in_pieces, expected_in_pieces, atol=1e-6, rtol=0)
    torch.testing.assert_close(in_pieces, whole, atol=1e-4, rtol=0)
    assert (whole - usual).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "settings", "option", "message"),
    [
        ("gemma4_text", {}, "rescale=yarn", "has rope_type=proportional, which posbench does not rescale"),
        ("granite_swa", {"layer_rope_theta": [0, 1e4] * 12}, "base=1e6", r"a base for each layer \(layer_rope_theta\)"),
        ("bloom", {}, "rescale=pi", "has no rotations in its config"),
        ("gpt2", {}, "base=1e6", "has no rotations in its config"),
        ("jamba", {}, "rescale=pi", "has no rotations in its config"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_its_key(family, settings, option, message):
    config = AutoConfig.for_model(family, **settings)
    with pytest.raises(ConfigError, match=message):
        change_rotations(config, [option], 4096, 2048, family)


def test_a_base_for_each_layer_is_read():
    config = AutoConfig.for_model("granite_swa", layer_rope_theta=[0, 1e4] * 12)
    bases = [layer.rotation and layer.rotation.base for layer in read_positions(skeleton(config), config, 4096).layers]
    assert bases == [None, 1e4] * 12
    assert not checked("granite_swa", layer_rope_theta=[0, 1e4] * 12)


def losses(model, read):
    """Return the losses of windows that are read whole, and 37 tokens at a time."""
    whole = scored(model, read)
    model.piece = 37
    in_pieces = scored(model, read)
    model.piece = None
    return whole, in_pieces


def test_the_same_positions_can_be_trained():
    config = AutoConfig.for_model("smollm3")
    table = read_positions(skeleton(config), config, 4096)
    rotated = {"name": "rotary", "kind": "rotary", "sites": ["q", "k"], "base": 2e6}
    nope = {"name": "nope", "kind": "nope"}
    assert row_of(table) == {"name": "interleaved", "kind": "interleaved", "layers": [rotated] * 3 + [nope]}
    with pytest.raises(ConfigError, match="layers that see all tokens, have no position and cap scores at 9"):
        row_of(replace(table, layers=[replace(table.layers[3], cap=9.0)]))
