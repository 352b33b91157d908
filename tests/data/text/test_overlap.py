"""The share of held-out 13-grams that also occur in train equals a count with sets of words.

The share that a copier predicts equals a loop that follows the definition word by word.
"""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.data import prepare
from posbench.data.text import overlap
from posbench.data.text.corpus import SPLITS, Split
from posbench.data.text.installed import is_table
from posbench.data.text.overlap import (
    DISTANCES,
    GRAM_WORDS,
    MATCHES,
    copied_share,
    gram_hashes,
    near_duplicates,
    overlap_lines,
)


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


LENGTH = 48


def split_of(tokens):
    ends = np.array([0, len(tokens)])
    return Split("train", tokens.astype(np.uint16), ends, ends[1:], None)


def predicted(window, distance, least):
    """Predict the last token by the longest match in the window before it."""
    *context, target = window.tolist()
    best = (-1, -1)
    for place in range(len(context) - distance):
        match = 0
        while match < place and context[place - 1 - match] == context[-1 - match]:
            match += 1
        best = max(best, (match, place))
    return best[0] >= least and context[best[1]] == target


def test_the_share_is_that_of_a_plain_loop():
    tokens = np.random.default_rng(0).integers(0, 3, 5 * 2 * LENGTH)
    tokens[60:90] = tokens[40:70]
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
    targets = [start + n for start in range(0, len(tokens), 2 * LENGTH) for n in range(LENGTH)]
    share = copied_share(split_of(tokens), LENGTH)
    for m, least in enumerate(MATCHES):
        for n, distance in enumerate(DISTANCES[:2]):
            hits = [predicted(windows[start], distance, least) for start in targets]
            assert share[m, n] == np.mean(hits), (least, distance)
    assert share[0, 0] > 0.1 and not share[:, 2:].any()  # 64 tokens back is out of sight


def test_text_shorter_than_two_contexts_has_no_share():
    assert not copied_share(split_of(np.arange(30)), LENGTH).any()
