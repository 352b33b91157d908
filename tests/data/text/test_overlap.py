"""The share of held-out 13-grams that also occur in train equals a count with sets of words."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.data import prepare
from posbench.data.text import overlap
from posbench.data.text.corpus import SPLITS
from posbench.data.text.installed import is_table
from posbench.data.text.overlap import GRAM_WORDS, gram_hashes, near_duplicates, overlap_lines


def grams_by_hand(text):
    words = re.findall(r"[A-Za-z0-9_\u0080-\U0010ffff]+", text)
    return [tuple(words[n : n + GRAM_WORDS]) for n in range(len(words) - GRAM_WORDS + 1)]


def sentence(seed, words):
    return " ".join(f"w{random.Random(f'{seed} {n}').randrange(10**6)}" for n in range(words))


@given(st.lists(st.sampled_from(["a", "b", "ab", "é", "x_1", "12"]), max_size=60), st.sampled_from([" ", ", ", "\n"]))
def test_equal_grams_have_equal_hashes_and_others_have_others(words, between):
    text = between.join(words)
    by_hand, hashes = grams_by_hand(text), gram_hashes(text).tolist()
    assert len(hashes) == len(by_hand)
    assert len(set(zip(by_hand, hashes, strict=True))) == len(set(by_hand)) == len(set(hashes))


def test_near_duplicates_are_copies_and_copies_of_copies():
    a, b, c = (sentence(n, 100) for n in range(3))
    texts = [a, c, f"{a} {b}", sentence(9, 100), f"{b} {sentence(8, 300)}"]
    assert near_duplicates([gram_hashes(text) for text in texts], 0.05) == [0, 1, 0, 3, 0]


@pytest.fixture
def leaky(tmp_path, files):
    """Return a configuration of files: half of one validation document also occurs in train."""
    texts = {
        "train": [sentence(1, 400), sentence(2, 400)],
        "validation": [sentence(3, 300), f"{sentence(4, 200)} {sentence(1, 200)}"],
        "test": [sentence(5, 300)],
    }
    for name, documents in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return files("tokenizer=bpe", "tokenizer.vocab_size=300", **{f"{n}_path": tmp_path / f"{n}.jsonl" for n in SPLITS})


def test_the_overlap_is_that_of_a_count_by_hand_and_is_kept(leaky, monkeypatch):
    notices = []
    measured = prepare(leaky, notice=notices.append).overlap
    expected = (200 - GRAM_WORDS + 1) / (300 + 400 - 2 * (GRAM_WORDS - 1))
    validation = measured["splits"]["validation"]
    assert validation["share"] == pytest.approx(expected, abs=0)
    assert measured["splits"]["test"]["share"] == 0
    assert "warning: data=files: " in notices[-1] and "of validation also occur in train" in notices[-1]
    monkeypatch.setattr(overlap, "measure_overlap", None)
    assert prepare(leaky, notice=notices.append).overlap == measured and len(notices) == 1, "kept with the corpus"
    assert validation["documents_above"] == 1
    assert validation["worst"][0]["name"].startswith("document 1, which begins 'w")
    lines = "\n".join(overlap_lines(measured))
    assert re.search(r"validation +27.81% of +676   1 documents above 5%\n +48.5% of document 1, which", lines)


def test_rows_of_literals_are_a_table_and_code_and_prose_are_not():
    table = "codes = {\n" + "".join(f"    0x{n:04x}: '\\u{n:04x}',  # letter {n}\n" for n in range(99)) + "}\n"
    code = "def area(sides):\n    return sides[0] * sides[1]  # of a rectangle\n" * 50
    assert is_table(table) and not is_table(code) and is_table(table + code[: len(table) // 2])
    assert not is_table('"""' + "A docstring is prose, though it is a literal.\n" * 50 + '"""')
