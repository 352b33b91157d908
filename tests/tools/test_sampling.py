"""`posbench sample`: a text goes on token by token, each read once."""

import pytest
import torch

from posbench.config import ConfigError
from posbench.data.text.tokenizer import find_bos
from posbench.model.decoder import build_model
from posbench.tools import sampling
from posbench.tools.sampling import SamplingConfig, generate, sample
from posbench.training import train
from posbench.verify.random_model import certificate_config


def test_draws_repeat_with_their_seed_and_keep_to_the_likeliest():
    model = build_model(certificate_config("nope"), 64)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    first, same, other_seed = (list(generate(model, tokens, 60, SamplingConfig(seed=seed))) for seed in (1, 1, 2))
    assert first == same != other_seed
    likeliest = list(generate(model, tokens, 60, SamplingConfig(temperature=0)))
    assert list(generate(model, tokens, 60, SamplingConfig(top_k=1))) == likeliest


def test_a_run_goes_on_with_a_prompt_as_far_as_its_scheme_is_defined(config):
    run = train(config("scheme=learned"))  # defined up to 32 tokens
    text = sample(run, "the rain ", 100, SamplingConfig(temperature=0))
    assert 0 < len(run.tokenizer.encode(text).ids) <= 22 and find_bos(run.tokenizer) == 256
    with pytest.raises(ConfigError, match="the prompt has 41 tokens"):
        sample(run, "rain" * 10, 1, SamplingConfig())


def test_only_tokens_of_the_tokenizer_are_drawn(config, monkeypatch):
    """The model's table may be larger than the vocabulary."""
    drawn = []
    monkeypatch.setattr(sampling, "generate", lambda *args: (drawn.append(token) or token for token in generate(*args)))
    sample(train(config("model.vocab_size=2000", "train.steps=1")), "rain", 50, SamplingConfig())
    assert len(drawn) == 50 and max(drawn) < 257
