"""A folder in Hugging Face's form gives the same logits here before it is trained on, and goes back."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from posbench.composition import compose
from posbench.config import ModelConfig
from posbench.huggingface import export_run
from posbench.model import build_model
from posbench.runs.origin import begin_with, origin_of
from posbench.training import train
from tests.conftest import small_run
from tests.huggingface.test_export import written

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
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1], "use_sliding_window": False}),
}


def begun(folder, scheme, *words):
    """The decoder with the folder's weights."""
    origin = origin_of(str(folder), 0, "runs")
    config = compose([f"scheme={scheme}", f"train.from_run={folder}", "train.context_length=48", *words])
    assert config.model == ModelConfig(**origin.model)
    model = build_model(config, origin.model["vocab_size"], bos_id=256).eval()
    left = begin_with(model, origin.load())
    return model, left


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_of_transformers_gives_its_logits(family, tmp_path):
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    theirs = AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES, **rope, **more)).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.1, 0.2)  # biases and norms too
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(257, (2, 40))
    expected = theirs(tokens).logits
    model, left = begun(tmp_path / "theirs", "qk_rope", "scheme.base=500", "tokenizer=bytes")
    assert left == ([], [])
    torch.testing.assert_close(model(tokens) / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scheme", ["qk_rope", "rotary_pct_25", "nope", "t5", "sink_nope"])
@torch.no_grad()
def test_what_was_exported_comes_back(scheme, tmp_path):
    model, _ = written(tmp_path, scheme, "model.tied_embeddings=true")
    again, left = begun(tmp_path / "exported", scheme)
    tokens = torch.randint(257, (2, 40))
    assert left == ([], [])
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_a_folder_is_trained_on_and_goes_back(tmp_path, documents, cache):
    model, _ = written(tmp_path, "qk_rope")
    words = [word for word in small_run(documents, cache, tmp_path / "runs") if not word.startswith(("model", "token"))]
    words += [f"train.from_run={tmp_path / 'exported'}", "scheme=nope", "train.steps=3"]
    run = train(compose(words))
    assert run.path.parent.name == "exported_then_nope" and run.manifest.continued["scheme"] == "exported"
    assert export_run(run, tmp_path / "back").class_name == "SmolLM3ForCausalLM"
    config = compose([*words, "train.lr=1e-12", "train.weight_decay=0", "scheme=qk_rope", "experiment_name=still"])
    still = train(config)
    tokens = torch.randint(257, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(still.load_model()(tokens), model(tokens), atol=1e-5, rtol=0)
