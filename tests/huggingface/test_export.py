"""A model that `posbench export` writes computes the same in transformers as here."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import posbench.huggingface
from posbench.catalogue.choices import choices
from posbench.config import SchemeConfig, TokenizerConfig
from posbench.data.text.tokenizer import TOKENIZERS
from posbench.huggingface import export_model
from posbench.model.decoder import build_model
from posbench.schemes.building import with_option
from posbench.verify.random_model import certificate_config, randomise
from tests.refusals import refuses

STOCK = {
    "LlamaForCausalLM": "qk_rope qk_rope_1m qk_rope_500k qk_rope_context qk_rope_learned qk_rope_learned_base "
    "p_rope_25 p_rope_75 hope clipped_rope",
    "Phi3ForCausalLM": "rotary_pct_25",
    "SmolLM3ForCausalLM": "mistral_large_4 nope rope_nope_interleaved smollm3",
}
CLASS_OF = {scheme: name for name, schemes in STOCK.items() for scheme in schemes.split()}


def byte_tokenizer():
    return TOKENIZERS["bytes"](TokenizerConfig(kind="bytes"), [])


def written(folder, scheme, *overrides, options=None):
    config = certificate_config(scheme, ("train.context_length=48", "model.init_std=0.02", *overrides))
    if options:
        config = replace(config, scheme=SchemeConfig.from_mapping({**config.scheme.to_mapping(), **options}))
    model = build_model(config, 257, bos_id=256)
    randomise(model)
    result = export_model(model.eval(), config, byte_tokenizer(), folder / "exported", "a test")
    return model, result


# One of each class of transformers, and of each kind of attention.
FAST = ("qk_rope", "nope", "alibi", "t5", "gdn", "kda", "mla", "linear_qk_rope", "decay_vo_rope", "sink_qk_rope")


@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in choices("scheme")]
)
@torch.no_grad()
def test_every_scheme_comes_back_with_its_logits_and_generates(scheme, tmp_path):
    model, result = written(tmp_path, scheme)
    assert result.class_name == CLASS_OF.get(scheme, "PosbenchForCausalLM")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    scale = expected.abs().max()
    torch.testing.assert_close(theirs(tokens).logits / scale, expected / scale, atol=2e-5, rtol=0)
    generation = {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": 2,
        "do_sample": False,
        "pad_token_id": 256,
    }
    generated = theirs.generate(tokens, eos_token_id=None, **generation)
    assert generated[:, 24].tolist() == expected[:, -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("scheme", "words", "name"),
    [
        ("qk_rope", ["model.qk_norm=true"], "Qwen3ForCausalLM"),
        ("qk_rope_500k", ["model.qkv_bias=true"], "Qwen2ForCausalLM"),
        ("p_rope_25", ["model.qk_norm=true", "model.tied_embeddings=true"], "Qwen3ForCausalLM"),
        ("qk_rope", ["model.qk_norm=true", "model.qkv_bias=true"], "PosbenchForCausalLM"),
        ("nope", ["model.qk_norm=true"], "PosbenchForCausalLM"),
        ("rotary_pct_25", ["model.qkv_bias=true"], "PosbenchForCausalLM"),
    ],
)
def test_normalised_queries_and_keys_and_biases_are_qwens(scheme, words, name, tmp_path):
    _, result = written(tmp_path, scheme, *words)
    assert result.class_name == name  # and `export_model` has compared the logits


@pytest.mark.parametrize("rescale", ["pi", "ntk", "yarn", "yarn_code"])
def test_rescaled_frequencies_are_a_stock_llama(rescale, tmp_path):
    model, result = written(tmp_path, "qk_rope", options={"rescale": rescale, "factor": 4.0})
    rope = AutoConfig.from_pretrained(tmp_path / "exported").rope_parameters
    types = {"pi": "linear", "yarn_code": "yarn"}  # of transformers; it has no other of ours
    assert rope["rope_type"] == types.get(rescale, "longrope")
    assert model.scheme.first.rescaling.name == rescale
    assert result.class_name == "LlamaForCausalLM"  # and `export_model` has compared the logits


@pytest.mark.parametrize("scheme", ["qk_rope", "vo_rope", "rope_nope_interleaved"])
def test_a_factor_lengthens_what_the_folder_says_it_reads(scheme, tmp_path):
    config = certificate_config(scheme, ("train.context_length=48",))
    mapping = with_option(with_option(config.scheme.to_mapping(), "rescale", "pi"), "factor", 4)
    config = replace(config, scheme=SchemeConfig.from_mapping(mapping))
    export_model(build_model(config, 257), config, byte_tokenizer(), tmp_path / "exported", "a test")
    assert AutoConfig.from_pretrained(tmp_path / "exported").max_position_embeddings == 4 * 48
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").model_max_length == 4 * 48


def test_a_temperature_is_not_phi_3s(tmp_path):
    _, result = written(tmp_path, "rotary_pct_25", options={"rescale": "yarn", "factor": 4.0})
    assert result.class_name == "PosbenchForCausalLM"


def test_frequencies_that_follow_the_window_come_back(tmp_path):
    model, result = written(tmp_path, "qk_rope", options={"rescale": "dynamic_ntk"})
    assert result.class_name == "PosbenchForCausalLM"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.randint(257, (1, 90))  # beyond the training length
    torch.testing.assert_close(theirs(tokens).logits, model(tokens))
    assert theirs.generate(tokens, max_new_tokens=2, pad_token_id=256).shape[1] > 90


@pytest.mark.parametrize("scheme", ["qk_rope", "rotary_pct_25", "nope", "vo_rope"])
def test_tied_embeddings_stay_tied(scheme, tmp_path):
    written(tmp_path, scheme, "model.tied_embeddings=true")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight


def test_padding_behind_a_sequence_changes_nothing_and_padding_before_it_is_refused(tmp_path):
    written(tmp_path, "sinusoidal")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens, mask = torch.arange(6)[None], torch.tensor([[1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(model(tokens, attention_mask=mask.bool()).logits[:, :4], model(tokens[:, :4]).logits)
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens, attention_mask=mask.flip(1))


@pytest.mark.parametrize(("scheme", "side"), [("sinusoidal", "right"), ("qk_rope", "left")])
def test_the_tokenizer_pads_where_the_class_takes_padding(scheme, side, tmp_path):
    written(tmp_path, scheme)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    batch = tokenizer(["a longer text", "short"], return_tensors="pt", padding=True, return_token_type_ids=False)
    assert tokenizer.padding_side == side
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(**batch).logits.isfinite().all()


def test_the_tokenizer_gives_the_tokens_of_training_behind_a_bos(tmp_path):
    written(tmp_path, "nope")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "Sein <|bos|> und Zeit: 道可道 "
    assert tokenizer(text).input_ids == [256, *text.encode()]
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 256, 48)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "thesis.tex").touch()
    refuses("exported is not an empty folder", written, tmp_path, "nope")


def test_a_model_that_reads_each_document_alone_is_refused(tmp_path):
    refuses(r"data\.document_mask=true.* cannot be exported", written, tmp_path, "qk_rope", "data.document_mask=true")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_logits_is_never_written(tmp_path, monkeypatch):
    monkeypatch.setattr(posbench.huggingface.export, "transformers_model", wrong_stock)
    refuses(r"logits of .* differ from posbench", written, tmp_path, "qk_rope")
    assert list(tmp_path.iterdir()) == []


def wrong_stock(model):
    stock = posbench.huggingface.stock.transformers_model(model)
    return replace(stock, config={**stock.config, "rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}})
