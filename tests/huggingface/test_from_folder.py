"""A folder in Hugging Face's form gives the same logits here before it is trained on, and goes back."""

import json

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posbench.composition.compose import compose
from posbench.config import ModelConfig
from posbench.huggingface import export_run
from posbench.model.decoder import build_model
from posbench.runs.start import start_of
from posbench.training import train
from tests.conftest import small_run
from tests.greedy import greedy
from tests.huggingface.test_export import written
from tests.refusals import refuses

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": None,
}
ROPE = {"rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
OF_48 = "original_max_position_embeddings: 48"
YARN_48 = f"rope_type: yarn, factor: 4.0, {OF_48}"
LLAMA3 = f"factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, {OF_48}"
LISTS = "short_factor: [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], long_factor: [1, 2, 3, 4, 5, 6, 7, 8]"
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
FAMILIES = {  # class, and what its configuration says
    "Llama": ("Llama", {}),
    "SmolLM 2": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 24}),
    "Qwen 2": ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    "Qwen 3": ("Qwen3", {**WINDOW, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    "SmolLM 3": ("SmolLM3", {"num_hidden_layers": 5}),
    "Phi-3": ("Phi3", {"sliding_window": 24}),
}
POSITIONS = [  # class, and what its config.json says
    ("Llama", "rope_parameters: {rope_type: linear, factor: 4.0, rope_theta: 500.0}"),
    ("Llama", "rope_parameters: {rope_type: dynamic, factor: 1.0, rope_theta: 500.0}"),
    ("Llama", "rope_parameters: {rope_type: dynamic, factor: 2.0, rope_theta: 500.0}"),
    ("Llama", f"rope_parameters: {{{YARN_48}, rope_theta: 500.0, beta_fast: 16, truncate: false, mscale: 0.7}}"),
    ("Llama", f"rope_parameters: {{{YARN_48}, rope_theta: 500.0, attention_factor: 1.3}}"),
    ("Llama", f"rope_parameters: {{rope_type: llama3, {LLAMA3}, rope_theta: 500.0}}"),
    ("Llama", f"rope_parameters: {{rope_type: longrope, {LISTS}, {OF_48}, factor: 4.0, rope_theta: 500.0}}"),
    ("Qwen3", "{use_sliding_window: false, sliding_window: 8, max_window_layers: 1}"),
    ("SmolLM3", "{no_rope_layers: [0, 1], use_sliding_window: true, sliding_window: 8}"),
    ("Phi3", "rope_parameters: {rope_type: default, partial_rotary_factor: 0.5, rope_theta: 500.0}"),
]
OLDER = [  # class, and keys of config.json before transformers 5
    ("Llama", "rope_theta: 500.0"),
    ("Llama", "{rope_theta: 500.0, rope_scaling: {type: linear, factor: 4.0}}"),
    ("Llama", f"rope_scaling: {{{YARN_48}}}"),
    ("Llama", f"rope_scaling: {{rope_type: yarn, factor: null, {OF_48}}}"),
    ("Llama", f"{{rope_scaling: {{{YARN_48}, finetuned: true}}, original_max_position_embeddings: 24}}"),
    ("Llama", f"{{rope_scaling: {{rope_type: llama3, {LLAMA3}}}, rope_theta: 500.0}}"),
    (
        "Phi3",
        f"{{rope_scaling: {{type: su, {LISTS}, original_max_position_embeddings: 24}}, rope_theta: 500.0, {OF_48}}}",
    ),
    ("Phi3", f"rope_scaling: {{type: longrope, {LISTS}}}"),
    ("Mistral", "{}"),
    ("SmolLM3", "{}"),
]


def saved(folder, class_name, **config):
    """Return a model of transformers with random weights, in a folder."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 48, **config}
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{class_name}Config")(**sizes)).eval()
    for parameter in model.parameters():  # biases and norms too
        parameter.data.normal_(0.0, 1 / parameter.shape[-1] ** 0.5) if parameter.ndim > 1 else parameter.data.normal_(
            1.0
        )
    model.save_pretrained(folder)
    return model


def edit(folder, without=(), keys="", **more):
    """Change entries of config.json; `keys` is their YAML."""
    more |= yaml.safe_load(keys) or {}
    content = json.loads((folder / "config.json").read_text())
    content = {key: value for key, value in content.items() if key not in without} | more
    (folder / "config.json").write_text(json.dumps(content))


def composed(folder, *words):
    return compose([f"train.from_run={folder}", "train.context_length=48", *words])


def begun(folder, *words):
    """Return the decoder with the folder's weights."""
    start = start_of(str(folder), 0, "runs")
    config = composed(folder, *words)
    assert config.model == ModelConfig(**start.model)
    model = build_model(config, start.model["vocab_size"], bos_id=256).eval()
    unmatched = start.load_into(model)
    return model, unmatched


@torch.no_grad()
def assert_same_logits(folder, theirs, *words):
    """Compare logits within and beyond the trained length of 48 tokens, and return the decoder."""
    model, unmatched = begun(folder, "tokenizer=bytes", *words)
    assert unmatched == ([], [])
    for length in (40, 70):
        tokens = torch.randint(257, (2, length))
        expected = theirs(tokens).logits
        scale = expected.abs().max()
        torch.testing.assert_close(model(tokens) / scale, expected / scale, atol=1e-5, rtol=0)
    return model


@torch.no_grad()
def assert_same_greedy_tokens(model, theirs):
    """Compare 50 tokens written after a prompt of 20, with caches unless the factor follows the length."""
    prompt = torch.randint(256, (1, 20))
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False)
    if model.scheme.is_streaming:
        ours = [*prompt[0].tolist(), *greedy(model, prompt, 70)]
    else:
        for _ in range(50):
            prompt = torch.cat((prompt, model(prompt)[:, -1:].argmax(-1)), dim=1)
        ours = prompt[0].tolist()
    assert ours == expected[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("is_rescaled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_gives_its_logits_and_writes_its_tokens(family, is_rescaled, tmp_path):
    name, config = FAMILIES[family]
    rope = {**ROPE, **(YARN if is_rescaled else {"rope_type": "default"})}
    if name == "Phi3":
        config = {**config, "original_max_position_embeddings": 48}
        rope["partial_rotary_factor"] = 0.5
    if name == "Phi3" and is_rescaled:
        rope |= {"rope_type": "longrope", "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [1, 2, 3, 4]}
    theirs = saved(tmp_path / "theirs", name, **config, max_position_embeddings=192, rope_parameters=rope)
    assert_same_greedy_tokens(assert_same_logits(tmp_path / "theirs", theirs), theirs)


@pytest.mark.parametrize(("name", "keys"), POSITIONS)
def test_a_folder_has_its_own_positions(name, keys, tmp_path):
    theirs = saved(tmp_path / "theirs", name, **yaml.safe_load(keys))
    assert_same_logits(tmp_path / "theirs", theirs)


@pytest.mark.parametrize(("name", "keys"), OLDER)
def test_older_folders_have_their_own_positions(name, keys, tmp_path):
    saved(tmp_path / "theirs", name)
    edit(tmp_path / "theirs", ["rope_parameters", "original_max_position_embeddings", "sliding_window"], keys)
    assert_same_logits(tmp_path / "theirs", AutoModelForCausalLM.from_pretrained(tmp_path / "theirs"))


def test_a_word_changes_one_option_of_the_folders_positions(tmp_path):
    saved(tmp_path / "theirs", "Mistral", sliding_window=8, rope_parameters={"rope_type": "default", **ROPE})
    config = composed(tmp_path / "theirs", "scheme.window=4", "tokenizer=bytes")
    assert config.scheme.options == {"sites": ["q", "k"], "base": 500.0, "window": 4}
    assert composed(tmp_path / "theirs", "scheme=nope", "tokenizer=bytes").scheme.options == {}


def test_positions_that_posbench_lacks_need_a_scheme(tmp_path):
    saved(tmp_path / "theirs", "Llama")
    edit(tmp_path / "theirs", keys="rope_parameters: {rope_type: proportional}")
    says = r"rope_type=proportional, which is not known.*: name the scheme"
    refuses(says, composed, tmp_path / "theirs", "tokenizer=bytes")
    assert composed(tmp_path / "theirs", "tokenizer=bytes", "scheme=nope").scheme.kind == "nope"


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "Llama",
            "model_type: mixtral",
            "model_type=mixtral .*posbench continues Llama, Mistral, Qwen 2 and 3, SmolLM",
        ),
        (
            "Llama",
            "architectures: [LlamaForSequenceClassification]",
            "Classification.*posbench continues Llama",
        ),
        (
            "Llama",
            "{architectures: [MyForCausalLM], auto_map: {AutoModelForCausalLM: my.MyForCausalLM}}",
            "MyForCausal",
        ),
        ("Llama", "hidden_act: gelu", "hidden_act=gelu, and posbench has SiLU"),
        ("Llama", "attention_bias: true", "attention_bias=True, and posbench has no bias"),
        ("Llama", "mlp_bias: true", "mlp_bias=True, and posbench has no biases"),
        ("Llama", "quantization_config: {bits: 4}", "has a quantization_config: dequantise"),
        (
            "Llama",
            "rope_parameters: {full_attention: {rope_type: default, rope_theta: 500.0}}",
            r"\.full_attention, which is for some of the layers",
        ),
        ("Llama", "rope_parameters: {rope_type: llama3, factor: 8.0}", "cannot load .*Missing required keys.*'llama3'"),
        ("Llama", "rope_parameters: {rope_type: default, rope_theta: '500.0'}", "rope_theta='500.0', which"),
        (
            "Llama",
            "rope_parameters: {rope_type: longrope, factor: 2.0, rope_theta: 9.0, short_factor: [1], long_factor: [1]}",
            "short_factor has 1 entries, and 16 channels a head are rotated: it needs 8",
        ),
        ("Llama", "rope_parameters: {rope_type: default, rope_theta: null}", "rope_theta=None, which must"),
        ("Qwen3", f"layer_types: {['full_attention'] * 3}", r"`num_hidden_layers` \(2\).* `layer_types` \(3\)"),
        ("Qwen3", "layer_types: [full_attention, chunked_attention]", "layer_types with chunked_attention"),
        ("SmolLM3", "no_rope_layers: [1]", "1 entries in no_rope_layers for num_hidden_layers=2"),
        ("Llama", "hidden_size: '64'", r"'hidden_size' expected int, got str \(value: '64'\)"),
        ("Llama", "num_hidden_layers: null", r"'num_hidden_layers' expected int, got NoneType"),
    ],
)
def test_a_model_that_posbench_cannot_be_is_refused_by_its_key(family, keys, message, tmp_path):
    saved(tmp_path / "theirs", family)
    edit(tmp_path / "theirs", keys=keys)
    refuses(message, composed, tmp_path / "theirs", "tokenizer=bytes")


def test_a_model_that_lacks_a_key_is_refused_by_it(tmp_path):
    saved(tmp_path / "theirs", "Llama")
    edit(tmp_path / "theirs", ["rms_norm_eps"])
    refuses("config.json has no rms_norm_eps: save", composed, tmp_path / "theirs", "tokenizer=bytes")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{'model_type': 'llama'}", "config.json is not a JSON object"),
        ("model.safetensors", None, "no safetensors files"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1", "not a safetensors file .*git lfs pull"),
        ("tokenizer.json", None, "no tokenizer.json, which says what its token ids mean"),
    ],
)
def test_a_damaged_folder_is_refused_by_its_file(name, content, message, tmp_path):
    written(tmp_path, "qk_rope")
    (tmp_path / "exported" / name).unlink()
    if content:
        (tmp_path / "exported" / name).write_text(content)
    refuses(message, begun, tmp_path / "exported")


def test_the_weights_are_those_that_the_index_names(tmp_path):
    theirs, folder = saved(tmp_path / "theirs", "Llama"), tmp_path / "sharded"
    theirs.save_pretrained(folder, max_shard_size="100KB")
    for file in folder.glob("model-*"):  # the shards of another save, whose names come later
        save_file({name: 0 * tensor for name, tensor in load_file(file).items()}, file.with_stem(f"{file.stem}-of-99"))
    assert_same_logits(folder, theirs)
    first_shard = min(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    (folder / first_shard).unlink()
    refuses(r"model-00001-of-.* is not in the folder", composed, folder, "tokenizer=bytes")


@pytest.mark.parametrize(
    "scheme",
    ["qk_rope", "qk_rope_500k", "hope", "rotary_pct_25", "nope", "rope_nope_interleaved", "t5", "sink_nope"],
)
@torch.no_grad()
def test_what_was_exported_comes_back(scheme, tmp_path):
    model, _ = written(tmp_path, scheme, "model.tied_embeddings=true")
    again, unmatched = begun(tmp_path / "exported")
    tokens = torch.randint(257, (2, 40))
    assert unmatched == ([], [])
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-6, rtol=1e-6)
    assert scheme != "qk_rope_500k" or composed(tmp_path / "exported").scheme.options["base"] == 500_000


def test_a_folders_tokenizer_is_left_for_a_named_one_alone(tmp_path):
    written(tmp_path, "qk_rope")
    folder = tmp_path / "exported"
    assert composed(folder, "tokenizer.vocab_size=300").tokenizer.path == str(folder / "tokenizer.json")
    assert composed(folder, "tokenizer=bytes").tokenizer.kind == "bytes"
    elsewhere = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert composed(folder, f"tokenizer.path={elsewhere}").tokenizer.kind == "file"
    refuses(r"no tokenizer\.json", composed, folder, "tokenizer.vocab_size=300")


def test_a_folder_that_names_code_needs_a_scheme(tmp_path):
    written(tmp_path, "t5")
    edit(tmp_path / "exported", scheme={"name": "evil", "kind": f"{tmp_path}/evil.py:Evil"})
    refuses(r"evil\.py:Evil.*: name the scheme", composed, tmp_path / "exported")


@pytest.mark.slow
def test_a_folder_is_trained_on_and_goes_back(tmp_path, documents, cache, capsys):
    model, _ = written(tmp_path, "qk_rope")
    words = [word for word in small_run(documents, cache, tmp_path / "runs") if not word.startswith(("model", "token"))]
    words += [f"train.from_run={tmp_path / 'exported'}", "scheme=nope", "train.steps=3"]
    run = train(compose(words))
    assert run.path.parent.name == "exported_then_nope" and run.manifest.continued["scheme"] == "exported"
    line = capsys.readouterr().err.replace("\n", " ")
    assert 'weights of exported, whose positions are {"kind": "rotary"' in line and 'run has {"kind": "nope"}' in line
    assert export_run(run, tmp_path / "back").class_name == "SmolLM3ForCausalLM"
    config = compose([*words, "train.lr=1e-12", "train.weight_decay=0", "scheme=qk_rope", "experiment_name=still"])
    still = train(config)
    tokens = torch.randint(257, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(still.load_model()(tokens), model(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rescale", ["yarn_code", {**YARN, "original_max_position_embeddings": 32}])
def test_a_run_extended_by_yarn_says_what_it_was_trained_on(rescale, documents, cache, tmp_path):
    """Trained at 128 = 32 x 4: not at 512, which 128 times the factor would be."""
    source = train(compose([*small_run(documents, cache, tmp_path), "model.head_dim=16"]))
    words = [word for word in small_run(documents, cache, tmp_path) if not word.startswith("model")]
    option = rescale if isinstance(rescale, str) else json.dumps(rescale).replace('"', "")
    words += [f"train.from_run={source.path}", "train.context_length=128", "train.batch_size=1"]
    run = train(compose([*words, "train.steps=1", f"scheme.rescale={option}", "experiment_name=longer"]))
    exported = export_run(run, tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert (exported.class_name, config["max_position_embeddings"]) == ("LlamaForCausalLM", 128)
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4, 32)
    assert export_run(run, tmp_path / "again", ["factor=8"]).is_stock  # rescaled further after training
    assert json.loads((tmp_path / "again/config.json").read_text())["max_position_embeddings"] == 256


def test_yarn_extends_the_context_of_a_folder(tmp_path, documents, cache):
    saved(tmp_path / "mini", "SmolLM3", **FAMILIES["SmolLM 3"][1], rope_parameters={"rope_type": "default", **ROPE})
    words = [word for word in small_run(documents, cache, tmp_path) if not word.startswith(("model", "tokenizer"))]
    words += [f"train.from_run={tmp_path / 'mini'}", "tokenizer=bytes", "train.context_length=96"]
    scheme = compose([*words, "scheme.rescale=yarn"]).scheme
    assert scheme.trained_length == 48
    assert [layer.get("factor") for layer in scheme.options["layers"]] == [2, 2, 2, None]  # the fourth is NoPE
