"""A subject is scored as transformers computes it: families of random weights against a plain loop."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from posbench.config import ConfigError
from posbench.huggingface.loading import Source, load, positions_under
from posbench.model.decoder import build_model
from posbench.runs.start import start_of
from posbench.system.device import Device
from tests.huggingface.test_from_folder import ROPE, WINDOW, YARN, composed, edit
from tests.refusals import refuses

CPU = Device(torch.device("cpu"), torch.float32, compiled=False)
TRAINED = 48  # tokens
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": TRAINED,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SLIDES = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TRAINED}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1}
BLOOM = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": TRAINED}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "GPTNeoX": {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    "GPT2": {**GPT2, **SPECIAL},
    "Bloom": {**BLOOM, **SPECIAL},
    "Gemma3Text": {**SIZES, **SLIDES, "rope_parameters": GEMMA_ROPE, "final_logit_softcapping": 5.0},
    "Olmo2": SIZES,
    "Mixtral": {**SIZES, **EXPERTS, "sliding_window": 16},
    "GptOss": {**SIZES, **SLIDES, **EXPERTS, "rope_parameters": {**YARN, **ROPE}},
    "OPT": {**OPT, **SPECIAL, "max_position_embeddings": TRAINED, "word_embed_proj_dim": 32},  # calls its decoder
    "GPTJ": {**GPT2, **SPECIAL, "rotary_dim": 4},  # rotates by a table
    "Qwen3": {**SIZES, **WINDOW, "layer_types": SLIDES["layer_types"]},
}


def saved(folder, family, **keys):
    """Save a model of random weights, large enough that positions and softcaps count."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES.get(family, SIZES), **keys})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.data.normal_(float(parameter.ndim == 1), scale)
    model.save_pretrained(folder)
    return Source(folder)


def windows(length, vocab_size=97):
    return torch.randint(2, vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def plain_losses(model, read):
    """Return the losses of windows, [B, T] float64, target by target from the logits of the whole window."""
    rows = []
    for window in read:
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].double()
        normalisers = torch.logsumexp(logits, dim=-1)
        rows.append(torch.stack([normalisers[t] - logits[t, window[t + 1]] for t in range(len(window) - 1)]))
    return torch.stack(rows)


@torch.no_grad()
def scored(model, read, last=None):
    losses = model.nll(read[:, :-1], read[:, 1:], last=last)
    return losses.double()


def subject(source, *options, length=100):
    return load(source, options, length, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_a_plain_loop(family, tmp_path, monkeypatch):
    source = saved(tmp_path, family)
    assert source.length == TRAINED
    model = subject(source)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    monkeypatch.setattr("posbench.huggingface.subject._LOGITS", 97 * 2 * 7)  # the head reads 7 rows at a time
    has_table = family in ("GPT2", "OPT", "GPTJ")
    assert model.longest == (TRAINED if has_table else None)
    assert model.base is not None  # so it never holds the logits of a whole window
    for length in (40, TRAINED if has_table else 100):
        read = windows(length)
        expected = plain_losses(theirs, read)
        assert expected.std() > 0.3  # the losses differ enough for an error to be seen
        torch.testing.assert_close(scored(model, read), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(scored(model, read, last=5), expected[:, -5:], atol=1e-5, rtol=0)
        model.piece = 12
        assert model.has_exact_cache
        torch.testing.assert_close(scored(model, read), expected, atol=1e-5, rtol=0)
        model.piece = None


def test_positions_count_in_these_losses(tmp_path):
    source, read = saved(tmp_path, "Gemma3Text"), windows(100)
    usual = scored(subject(source), read)
    for layer_type in ("full_attention", "sliding_attention"):
        changed = scored(subject(source, f"{layer_type}.base=1e6"), read)
        assert (changed - usual).abs().max() > 0.01
        bases = {kind: keys["rope_theta"] for kind, keys in GEMMA_ROPE.items()} | {layer_type: 1e6}
        layers = positions_under(source, [f"{layer_type}.base=1e6"], 100).layers
        assert [layer.rotation.base for layer in layers] == [bases[kind] for kind in source.config.layer_types]


@pytest.mark.parametrize("option", ["dynamic", "longrope"])
def test_a_cache_that_is_not_exact_is_not_used(option, tmp_path):
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 48}
    rope = {"rope_type": option, "factor": 2.0, **ROPE, **(lists if option == "longrope" else {})}
    model = subject(saved(tmp_path, "Llama", rope_parameters=rope))
    whole = scored(model, windows(100))
    model.piece = 12
    assert not model.has_exact_cache
    torch.testing.assert_close(scored(model, windows(100)), whole)


WITNESSED = {
    "as in config.json": ("Llama", {}, ()),
    "pi": ("Llama", {}, ("rescale=pi",)),
    "ntk": ("Llama", {}, ("rescale=ntk",)),
    "dynamic_ntk": ("Llama", {}, ("rescale=dynamic_ntk",)),
    "yarn": ("Llama", {}, ("rescale=yarn",)),
    "yarn of a factor": ("Llama", {}, ("rescale=yarn", "factor=8")),
    "yarn_code": ("Mistral", {"sliding_window": 16}, ("rescale=yarn_code",)),
    "base": ("Qwen2", {}, ("base=1e6",)),
    "a mapping": (
        "Llama",
        {},
        ("rescale={rope_type: yarn, factor: 4, original_max_position_embeddings: 48}",),
    ),
    "a key": ("Llama", {"rope_parameters": {**YARN, **ROPE}}, ("rescale.factor=2",)),
    "some channels": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **ROPE}}, ()),
    "layers without": ("SmolLM3", {"no_rope_layers": [0, 1]}, ("rescale=ntk",)),
}


@pytest.mark.parametrize("case", WITNESSED)
def test_posbenchs_decoder_is_a_witness(case, tmp_path):
    family, keys, options = WITNESSED[case]
    folder = tmp_path / "theirs"
    source = saved(folder, family, vocab_size=257, **keys)
    if case == "a key":
        rescale = "rescale={rope_type: yarn, factor: 2, original_max_position_embeddings: 48}"
        scheme = [f"++scheme.{rescale}"]
    else:
        scheme = [f"++scheme.{option}" for option in options]
    start = start_of(str(folder), 0, "runs")
    assert start is not None
    config = composed(folder, "tokenizer=bytes", *scheme)
    decoder = build_model(config, 257).eval()
    start.load_into(decoder)
    for length in (40, 100):
        read = windows(length, 257)
        model = subject(source, *options, length=length)
        torch.testing.assert_close(scored(model, read), scored(decoder, read), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rescale.factor=2", "has no rescaling to change"),
        ("factor=2", "needs a rescaling"),
        ("scheme=nope", "is not for"),
        ("full_attention.rescale=yarn", "one rotation for all layers"),
        ("rescale=yam", "yarn"),
        ("base=none", "must be a number"),
    ],
)
def test_an_option_that_a_model_does_not_have_is_refused(option, message, tmp_path):
    refuses(message, subject, saved(tmp_path / "llama", "Llama"), option)


@pytest.mark.parametrize("family", ["GPTNeoX", "GPT2", "Bloom", "Gemma3Text", "GptOss", "Mixtral"])
def test_attention_weights_are_recorded_layer_by_layer(family, tmp_path):
    model, layers = subject(saved(tmp_path, family)), []

    def record(number, layer):
        weights = layer["weights"]
        assert weights.shape == (2, 4, 40, 40)
        assert weights.triu(1).abs().max() == 0
        # gpt-oss has a sink, which takes a share.
        assert weights.sum(-1).max() < 1 + 1e-5
        layers.append(number)

    read = windows(40)
    before = scored(model, read)
    with model.recording(record):
        torch.testing.assert_close(scored(model, read), before, atol=1e-5, rtol=0)
    assert layers == [0, 1]


def test_a_recurrent_model_has_no_attention_maps(tmp_path):
    keys = {"vocab_size": 97, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "max_position_embeddings": 48}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(transformers.MambaConfig(**keys)).save_pretrained(tmp_path)
    model = subject(Source(tmp_path))
    model.piece = 12  # its cache is not read in pieces
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(scored(model, windows(40)), plain_losses(theirs, windows(40)), atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="gives no attention weights"), model.recording(lambda *_: None):
        scored(model, windows(40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rope_parameters: {full_attention: {rope_type: yarn, factor: 4.0, rope_theta: 9.0}}", "full_attention, which"),
        ("rope_parameters: {rope_type: unheard, rope_theta: 500.0}", "cannot load"),
        (
            "rope_parameters: {rope_type: longrope, short_factor: [1.0], long_factor: [1.0], rope_theta: 500.0}",
            "short_factor has 1 entries, and 8 channels a head are rotated: it needs 4",
        ),
        ("model_type: unheard", r"cannot load .* \(model_type=unheard\) without code from the folder"),
        ("num_hidden_layers: 3", r"lacks model.layers.2.*8 more tensors"),
        ("num_hidden_layers: 1", r"has model.layers.1.*which LlamaForCausalLM has not"),
        ("vocab_size: 90", r"\[97, 32\], and config.json says vocab_size=90, which makes it \[90, 32\]"),
    ],
)
def test_what_transformers_would_load_wrongly_is_refused(change, message, tmp_path):
    saved(tmp_path, "Llama")
    edit(tmp_path, keys=change)
    source = Source(tmp_path)
    with pytest.raises(ConfigError, match=message):
        source.check(), subject(source)


def as_gguf(source, file, change=lambda writer: None):
    """Write a Llama of `saved` as a GGUF file. Arguments: change, called with the writer, to add keys and tensors."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(TRAINED)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(97)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in AutoModelForCausalLM.from_pretrained(source.path).state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), _as_gguf(name, tensor).numpy())
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Source(file)


def test_a_gguf_file_is_read(tmp_path):
    source, read = saved(tmp_path / "folder", "Llama"), windows(100)
    theirs = scored(subject(source), read)
    file = as_gguf(source, tmp_path / "tiny.gguf")
    assert (file.name, file.length) == ("tiny", TRAINED)
    torch.testing.assert_close(scored(subject(file), read), theirs, atol=1e-5, rtol=0)


def _as_gguf(name, tensor):
    """Return a tensor as llama.cpp stores it: it pairs neighbouring channels, transformers the two halves of a head."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor.contiguous()
    heads = 4 if "q_proj" in name else 2
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
