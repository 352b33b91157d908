"""Numbers of tokens as people write them."""

import pickle
from dataclasses import fields

import pytest

from posbench.composition import compose
from posbench.composition.counts import COUNTS, LENGTHS, SCHEMA, count
from posbench.config import ConfigError, DataConfig, EvaluationConfig, TrainConfig
from posbench.evaluation import parse_length

SMALL = ["model=tiny", "train.batch_size=4", "train.context_length=32", "train.steps=null", "train.schedule=wsd"]
TOKENS = {
    "train.tokens": ("64k", 64_000),
    "train.branch_tokens": ("[12.8k,0.032M]", [12_800, 32_000]),
    "train.trunk_tokens": ("0.128M", 128_000),
    "train.validation_tokens": ("10k", 10_000),
    "data.token_budget": ("2.5B", 2_500_000_000),
    "evaluation.max_tokens": ("1e6", 1_000_000),
    "evaluation.ngram_tokens": ("20M", 20_000_000),
    "evaluation.batch_tokens": ("16_000", 16_000),
    "train.context_length": ("4k", 4096),
    "evaluation.lengths": ("[1k,4096,1m]", [1024, 4096, 1 << 20]),
    "evaluation.piece": ("256k", 1 << 18),
}


@pytest.mark.parametrize("key", TOKENS)
def test_words_are_whole_numbers_of_tokens(key):
    word, tokens = TOKENS[key]
    config = compose([*SMALL, "train.tokens=64k", f"{key}={word}"])
    group, name = key.split(".")
    assert getattr(getattr(config, group), name) == tokens


def test_every_field_that_counts_tokens_takes_words():
    groups = {"train": TrainConfig, "data": DataConfig, "evaluation": EvaluationConfig}
    named = {f"{group}.{name}" for names_of in (COUNTS, LENGTHS) for group, names in names_of.items() for name in names}
    ends = ("tokens", "token_budget", "lengths", "context_length", "piece")
    there = {
        f"{group}.{each.name}" for group, cls in groups.items() for each in fields(cls) if each.name.endswith(ends)
    }
    assert named == there == {*TOKENS}


def test_an_experiment_of_ones_own_may_write_them_too(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nexperiment: {name: mine}\ntrain: {steps: null, tokens: 20M, context_length: 1k}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = compose(["model=tiny", "experiment=mine", f"--config-dir={tmp_path}"])
    assert (config.train.tokens, config.train.context_length) == (20_000_000, 1024)
    assert config.to_mapping()["train"]["tokens"] == 20_000_000  # what a run folder records


@pytest.mark.parametrize("word", ["many", "20X", "1.5", "0.0005k", "-5k", "1e400", "2k5", "[1M]x", "1e-3"])
def test_what_is_no_number_of_tokens_is_named(word):
    with pytest.raises(ConfigError, match=r"train\.tokens="):
        compose([*SMALL, f"train.tokens='{word}'"])


def test_types_are_still_checked():
    for words, message in (
        ("train.tokens=true", "train"),
        ("train.tokens={a: 1}", "train"),
        ("train.steps=2k", "'2k' is not a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose([*SMALL, words])
    assert count("x", None) is None and parse_length("8k") == 8192
    with pytest.raises(ConfigError, match=r"--length '8.5' is not a length"):
        parse_length("8.5")


def test_the_schema_of_words_is_the_same_class_in_the_processes_of_a_sweep():
    """A copy of it took `dataclasses.MISSING` for a default, and every sweep by joblib, the demo's too, was refused."""
    for cls in (SCHEMA, *(each.type for each in fields(SCHEMA))):
        if isinstance(cls, type):
            assert pickle.loads(pickle.dumps(cls)) is cls
