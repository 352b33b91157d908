"""Text for runs that were trained on other text: what of it is read, and what the tokenizer makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from posbench.config import Config, ConfigError
from posbench.data.preparation import prepare_held_out

Files = Callable[..., Config]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer of words of one letter, which loses what stands between them."""
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(["[UNK]", *"abcd"])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    return f"tokenizer.path={tmp_path}/words.json"


def rows(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_a_text_without_splits_is_both_of_them_as_far_as_the_budget_goes(
    files: Files, words: str, tmp_path: Path
) -> None:
    file = rows(tmp_path / "rows.jsonl", ["a b c d"] * 5)
    told: list[str] = []
    corpus = prepare_held_out(files("tokenizer=file", words, path=file), told.append)
    assert corpus.validation is corpus.test and (corpus.validation.name, corpus.validation.num_documents) == (
        "whole",
        5,
    )
    assert "prepared data=files in" in told[-1] and ": whole 5 documents, 25 tokens; vocabulary" in told[-1]
    short = prepare_held_out(files("tokenizer=file", words, "data.token_budget=9", path=file), told.append)
    assert short.test.num_tokens == 10 and short.fingerprint != corpus.fingerprint


def test_what_the_tokenizer_loses_of_it_is_said_and_too_much_is_refused(
    files: Files, words: str, tmp_path: Path
) -> None:
    told: list[str] = []
    file = rows(tmp_path / "rows.jsonl", [f"{'a b c d ' * 9} {'x ' * (n == 0)}" for n in range(9)])
    prepare_held_out(files("tokenizer=file", words, path=file), told.append)
    assert "words.json does not give this text back: " in told[0]
    unknown = rows(tmp_path / "unknown.jsonl", ["x y z"] * 9)
    with pytest.raises(ConfigError, match=r"does not know 100% of the tokens of this text: choose text that it covers"):
        prepare_held_out(files("tokenizer=file", words, path=unknown), told.append)


def test_a_text_that_holds_nothing_is_refused(files: Files, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no text, every document is empty or blank"):
        prepare_held_out(files("tokenizer=file", words, path=rows(tmp_path / "rows.jsonl", [" ", ""])), print)
