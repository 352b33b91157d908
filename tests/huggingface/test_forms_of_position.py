"""Forms of position in other people's files: each is read right, or refused by name (public bug reports as inputs)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from posbench.config import ConfigError
from posbench.huggingface.loading import Source, positions_under
from posbench.huggingface.positions import _Reader
from tests.huggingface.test_from_folder import edit
from tests.huggingface.test_subject import as_gguf, saved, scored, subject, windows

ORIGINAL = 12  # tokens
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10000.0}
FACTORS = [1.0, 1.5, 4.0, 8.0]  # one for each pair of the heads of eight channels


def yarn(writer):
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL)


def linear(writer):
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def frequencies(writer):
    writer.add_tensor("rope_freqs.weight", np.array(FACTORS, np.float32))


RESCALED = {
    "yarn": (yarn, YARN),
    "linear": (linear, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "rope_freqs": (
        frequencies,
        {
            "rope_type": "longrope",
            "short_factor": FACTORS,
            "long_factor": FACTORS,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": 48,
            "rope_theta": 10000.0,
        },
    ),
}


@pytest.mark.parametrize("kind", RESCALED)
def test_a_gguf_file_is_rescaled_as_it_says(kind, tmp_path):
    change, parameters = RESCALED[kind]
    source = saved(tmp_path / "folder", "Llama", rope_parameters=parameters)
    file, read = as_gguf(source, tmp_path / "tiny.gguf", change), windows(40)
    theirs = scored(subject(source, length=40), read)
    torch.testing.assert_close(scored(subject(file, length=40), read), theirs, atol=1e-5, rtol=0)
    plain = scored(subject(saved(tmp_path / "plain", "Llama"), length=40), read)
    assert (plain - theirs).abs().max() > 0.01, "rescaling counts in these losses"
    assert file.length == source.length


def longrope(writer):
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (longrope, "llama.rope.scaling.type=longrope, which posbench does not apply"),
        (lambda writer: writer.add_float32("llama.rope.scaling.yarn_ext_factor", 0.5), "yarn_ext_factor=0.5"),
        (lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)), "rope_factors_long"),
    ],
)
def test_a_gguf_file_with_another_rescaling_is_refused_by_its_key(change, message, tmp_path):
    source = saved(tmp_path / "folder", "Llama")
    with pytest.raises(ConfigError, match=message):
        subject(as_gguf(source, tmp_path / "tiny.gguf", change))


def test_half_a_gguf_file_is_called_damaged(tmp_path):
    whole = as_gguf(saved(tmp_path / "folder", "Llama"), tmp_path / "tiny.gguf").path.read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"half\.gguf is damaged or not complete: download it again"):
        subject(Source(tmp_path / "half.gguf"))


TEMPERATURE = {**YARN, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("option", "by_hand"),
    [
        ("rescale=null", {"rope_type": "default"}),
        ("rescale={rope_type: linear, factor: 4}", {"rope_type": "linear", "factor": 4.0}),
        ("base=1e6", {**TEMPERATURE, "rope_theta": 1e6}),
    ],
)
def test_a_new_rescaling_keeps_the_temperature_of_the_queries(option, by_hand, tmp_path):
    """Ministral 3 (transformers#44860): the key is not a rescaling's, and it counts from the original length."""
    source, read = saved(tmp_path / "model", "Ministral3", rope_parameters=TEMPERATURE), windows(40)
    changed = scored(subject(source, option, length=40), read)
    kept = {key: TEMPERATURE[key] for key in ("rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings")}
    other = saved(tmp_path / "other", "Ministral3", rope_parameters=TEMPERATURE)
    edit(other.path, rope_parameters={**kept, **by_hand})
    expected = scored(subject(Source(other.path), length=40), read)
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=0)
    assert (changed - scored(subject(source, length=40), read)).abs().max() > 0.001


def test_what_a_rescaling_cannot_keep_is_refused_by_its_key(tmp_path):
    proportional = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    source = saved(tmp_path / "p", "Llama", rope_parameters=proportional)
    with pytest.raises(ConfigError, match="rope_type=proportional, which posbench does not rescale"):
        positions_under(source, ["rescale=yarn"], 100)
    rotation = positions_under(source, ["base=1e6"], 100).layers[0].rotation
    assert (rotation.frequencies[2:] == 0).all() and (rotation.frequencies[:2] > 0).all(), "zeros stay zero"


def test_angles_that_are_not_those_of_the_table_are_an_error(tmp_path, monkeypatch):
    source = saved(tmp_path / "model", "Llama")
    subject(source, "rescale=yarn")
    usual = _Reader._rotation

    def wrong(*words):
        rotation = usual(*words)
        return replace(rotation, frequencies=1.01 * rotation.frequencies)

    monkeypatch.setattr(_Reader, "_rotation", wrong)
    with pytest.raises(AssertionError, match=r"layer 0 is said to .* turn otherwise"):
        subject(source, "rescale=yarn")


def test_what_transformers_says_of_lengths_is_shown(tmp_path):
    source = saved(tmp_path / "model", "Llama")
    edit(source.path, rope_parameters={**YARN, "factor": 2.5})
    [note] = [note for note in Source(source.path).check() if "factor" in note]
    assert note.startswith(f"transformers says of {source.path}/config.json: ") and "\n" not in note


def weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_prefix_of_all_tensors_is_named(prefix, tmp_path):
    source = saved(tmp_path / "model", "Llama")
    weights(source.path, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    with pytest.raises(ConfigError, match=f"has a name that begins with {prefix}: remove it"):
        source.check()


def test_prediction_heads_are_left_out_with_a_line(tmp_path):
    source, read = saved(tmp_path / "model", "Llama"), windows(40)
    theirs = scored(subject(source), read)
    heads = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
    weights(source.path, lambda tensors: tensors | heads)
    with pytest.raises(ConfigError, match=r"has model\.layers\.2"):
        subject(Source(source.path))
    edit(source.path, num_nextn_predict_layers=1)
    assert any("2 tensors of prediction heads are left out" in note for note in Source(source.path).check())
    torch.testing.assert_close(scored(subject(Source(source.path)), read), theirs, atol=0, rtol=0)


def test_weights_that_are_not_finite_are_named(tmp_path):
    source = saved(tmp_path / "model", "Llama")
    name = "model.layers.1.mlp.down_proj.weight"
    weights(source.path, lambda tensors: tensors | {name: tensors[name].index_fill(0, torch.tensor([3]), torch.nan)})
    with pytest.raises(ConfigError, match=f"has {name} with values that are not finite"):
        subject(Source(source.path))


def test_a_hub_cache_and_a_link_keep_their_names(tmp_path):
    folder = tmp_path / "models--me--SmallLM" / "snapshots" / ("0123abc" + 33 * "f")
    saved(folder, "Llama")
    assert Source(folder).name == "SmallLM-0123abc"
    (tmp_path / "Mine").symlink_to(folder)
    assert Source(tmp_path / "Mine").name == "Mine"


def test_tokens_that_transformers_adds_to_a_gguf_file_are_dropped(tmp_path):
    """Its class for byte-level vocabularies adds <|endoftext|>, of which the model has no row."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, "Ġ", "Ċ", "ab"]

    def tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])

    file = as_gguf(saved(tmp_path / "folder", "Llama"), tmp_path / "tiny.gguf", tokenizer)
    read = Tokenizer.from_file(str(file.tokenizer_file(tmp_path / "out")))
    assert read.get_vocab_size() == len(tokens) == 97
    assert read.encode("abc").tokens == ["ab", "c"]
