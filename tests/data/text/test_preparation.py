"""Text is read once, found again at once, and a corpus that is not whole is never used."""

import json
import os
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from prose import prose
from test_tokenizer import word_level

from posbench.config import ConfigError
from posbench.data import prepare
from posbench.data.text.corpus import SPLITS
from posbench.data.text.preparation import prepare_held_out
from posbench.data.text.sources import split_of
from posbench.data.text.tokenizer import BOS
from tests.refusals import refuses


def book(number):
    """Return document `n`; some spell out the token that begins a document."""
    return prose(number) + (f" {BOS} and {BOS}" if number % 10 == 0 else "")


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def books(tmp_path):
    """Return a hundred and fifty different documents, a line each."""
    return write_rows(tmp_path / "books.jsonl", [book(n) for n in range(150)])


@pytest.fixture
def notes():
    return []


def texts_of(corpus):
    """Return the documents of each split, decoded from their tokens."""
    return {
        name: [corpus.tokenizer.decode(split.document(n)[1:].tolist()) for n in range(split.num_documents)]
        for name, split in corpus.splits.items()
    }


def test_every_document_is_in_the_split_of_its_hash_in_order(files, books):
    corpus = prepare(files(path=books))
    texts = texts_of(corpus)
    fractions = {"test": 0.10, "validation": 0.05}
    expected = {name: [] for name in SPLITS}
    for n in range(150):
        expected[split_of(book(n).encode(), fractions)].append(book(n))
    assert texts == expected and all(texts.values())
    for split in corpus.splits.values():
        assert (split.tokens[split.starts[:-1]] == corpus.bos_id).all()
        assert (split.tokens == corpus.bos_id).sum() == split.num_documents
        assert split.num_tokens == split.starts[-1] == len(split.tokens)
        assert split.num_bytes == sum(len(text.encode()) for text in texts[split.name])


def test_the_split_of_a_document_is_pinned():
    """SHA-256 begins with ca for "a", 3e for "b" and 2e for "c": 0.79, 0.24 and 0.18 of the way."""
    fractions = {"test": 0.2, "validation": 0.1}
    assert [split_of(text, fractions) for text in (b"a", b"b", b"c")] == ["train", "validation", "test"]


_PREPARE = """
import json, sys, posbench
from posbench.data import prepare
from posbench.data.text import preparation
config = posbench.compose(['data=files', f'data.path={sys.argv[1]}', 'tokenizer=bytes'])
corpus = prepare(config)
loaded = [name for name in ('datasets', 'pyarrow', 'pandas', 'torch', 'wandb') if name in sys.modules]
print(json.dumps([corpus.fingerprint, loaded]))
"""


def test_the_second_time_reads_nothing_and_imports_no_datasets(files, books, notes):
    first = prepare(files(path=books), notice=notes.append)
    assert len(notes) == 1 and "prepared" in notes[0]
    done = subprocess.run([sys.executable, "-c", _PREPARE, str(books)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [first.fingerprint, []] and "prepared" not in done.stderr


@pytest.mark.slow
def test_changed_text_and_a_changed_tokenizer_are_prepared_anew(files, books, tmp_path):
    plain = prepare(files(path=books))
    merged = prepare(files("tokenizer=bpe", "tokenizer.vocab_size=300", path=books))
    halves = prepare(files("data.test_fraction=0.3", path=books))
    assert plain.fingerprint == merged.fingerprint != halves.fingerprint
    assert plain.tokenizer_fingerprint == halves.tokenizer_fingerprint != merged.tokenizer_fingerprint
    stat = books.stat()
    books.write_text(books.read_text().replace("Chapter", "Kapitel"))  # as long as before
    os.utime(books, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    assert prepare(files(path=books)).fingerprint != plain.fingerprint
    from_file = files("tokenizer=file", f"tokenizer.path={tmp_path}/tokenizer.json", path=books)
    for corpus in (plain, merged):
        corpus.tokenizer.save(f"{tmp_path}/tokenizer.json")
        assert prepare(from_file).vocab_size == corpus.vocab_size
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<first>"}')
    assert prepare(from_file).bos_id == merged.vocab_size


@pytest.mark.parametrize("damage", ["truncated", "missing", "torn contents", "flipped"])
def test_a_damaged_cache_is_made_again(files, books, notes, damage):
    whole = prepare(files(path=books))
    expected, tokens = texts_of(whole), whole.folder / "train.tokens"
    if damage == "truncated":
        os.truncate(tokens, 1000)
    elif damage == "missing":
        (whole.folder / "test.starts").unlink()
    elif damage == "torn contents":
        os.truncate(whole.folder / "corpus.json", 100)
    else:  # sizes do not tell: only `posbench prepare --check` sees it
        data = bytearray(tokens.read_bytes())
        data[len(data) // 2] ^= 4
        tokens.write_bytes(data)
        prepare(files(path=books), notice=notes.append)
        assert notes == []
    again = prepare(files(path=books), notice=notes.append, check=damage == "flipped")
    assert texts_of(again) == expected and "is damaged" in notes[0] and "prepared" in notes[1]
    prepare(files(path=books), notice=notes.append, check=True)
    assert len(notes) == 2, "the third time finds it"


def rewritten(path, old, new):
    """Replace text in a file, which keeps its size and its times."""
    stat = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size


def test_text_that_was_changed_in_place_is_read_again(files, books, notes, monkeypatch):
    first = prepare(files(path=books))
    rewritten(books, "Chapter", "Kapitel")
    second = prepare(files(path=books), notice=notes.append)
    assert second.fingerprint != first.fingerprint
    assert "the text has changed, though its files have the same sizes and times" in notes[0]
    prepare(files(path=books), notice=notes.append)
    assert len(notes) == 2, "it is found again"
    # Of a long text only some blocks are compared when a run begins.
    monkeypatch.setattr("posbench.data.text.sources._SHORT", 1000)
    monkeypatch.setattr("posbench.data.text.sources._BLOCK", 8)
    monkeypatch.setattr("posbench.data.text.sources._BLOCKS", 4)
    third = prepare(files("data.test_fraction=0.3", path=books))
    rewritten(books, "Kapitel", "Chapter")
    assert prepare(files("data.test_fraction=0.3", path=books)).fingerprint == third.fingerprint
    changed = prepare(files("data.test_fraction=0.3", path=books), check=True)
    assert changed.fingerprint != third.fingerprint


def test_a_cache_of_an_older_version_is_found_and_made_again_by_a_check(files, books, notes):
    first = prepare(files(path=books))
    contents = json.loads((first.folder / "corpus.json").read_text())
    del contents["files"]["content.json"]
    (first.folder / "content.json").unlink()
    (first.folder / "corpus.json").write_text(json.dumps(contents))
    assert prepare(files(path=books), notice=notes.append).fingerprint == first.fingerprint and notes == []
    assert prepare(files(path=books), notice=notes.append, check=True).fingerprint == first.fingerprint
    assert "it does not say what its text was" in notes[0] and (first.folder / "content.json").is_file()


@pytest.mark.slow
def test_two_processes_at_once_do_the_work_once(books):
    command = [sys.executable, "-c", _PREPARE, str(books)]
    running = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in running]
    assert len({json.loads(output)[0] for output, _ in outputs}) == 1
    assert sum("prepared" in notices for _, notices in outputs) == 1, outputs


def test_a_split_of_few_documents_is_said_loudly(files, tmp_path, notes):
    for n in range(13):
        (tmp_path / f"{n}.txt").write_text(prose(n))
    corpus = prepare(
        files("data.validation_fraction=0.1", "data.test_fraction=0.25", path=tmp_path), notice=notes.append
    )
    assert (corpus.validation.num_documents, corpus.test.num_documents) == (1, 5)
    assert "warning: data=files: validation has 1 of 13 documents, so" in notes[-1]
    assert "raise data.validation_fraction" in notes[-1] and "test" not in notes[-1].split("so a loss")[1]
    assert "cut_bytes" not in notes[-1], "documents are short already"


@pytest.mark.parametrize("texts", [[prose(1)], 9 * ["two", "texts"]])
def test_fewer_documents_than_splits_are_refused(files, tmp_path, files_left, texts):
    with pytest.raises(
        ConfigError, match=rf"no \w+ text in {len(texts)} documents .*give more text, or files"
    ) as raised:
        prepare(files(path=write_rows(tmp_path / "rows.jsonl", texts)))
    assert files_left() == [] and len(str(raised.value).split()) < 40


def test_a_long_file_is_cut_at_blank_lines_by_itself(files, tmp_path, notes):
    text, path = "\n\n".join(prose(n, 40) for n in range(400)), tmp_path / "book.txt"
    path.write_text(text)
    splits = texts_of(prepare(files(path=path), notice=notes.append))
    assert "too few text files for 3 splits (1), so text is cut at blank lines" in notes[0]
    assert sum(map(len, splits.values())) > 40 and all(splits.values())
    assert sorted("".join(chain(*splits.values()))) == sorted(text), "nothing is lost"
    assert prepare_held_out(files(path=path)).test.num_documents == 1, "a text to score stays whole"
    uncut = prepare(files("data.validation_fraction=0", "data.test_fraction=0", path=path))
    assert uncut.train.num_documents == 1, "and so does one that needs no other split"


def test_a_few_long_files_are_cut_if_train_would_get_far_less_than_asked(files, tmp_path, notes):
    """Two of these three books would be held out by their hashes, and train would get a tenth of the text."""
    folder = tmp_path / "books"
    folder.mkdir()
    paragraphs = {"small": 30, "large": 130, "larger": 140}
    for name, count in paragraphs.items():
        text = "\n\n".join(f"{name} {prose(n)}" for n in range(count))
        (folder / f"{name}.txt").write_text(text + _suffix_for(text, "train" if name == "small" else "test"))
    corpus = prepare(files(path=folder), notes.append)
    [note] = [note for note in notes if "by whole files" in note]
    assert "train would get 10% of the text, so long files are cut at blank lines into documents of about" in note
    sizes = {name: split.num_bytes for name, split in corpus.splits.items()}
    assert 0.75 < sizes["train"] / sum(sizes.values()) < 0.95  # 0.85 was asked for
    assert sum(sizes.values()) == sum(path.stat().st_size for path in folder.glob("*.txt"))
    notes.clear()
    refuses(
        r"raise data.validation_fraction, cut text files",
        prepare,
        files("data.cut_bytes=100000000", path=folder),
        notes.append,
    )
    assert not notes, "the user's own size is kept"


def _suffix_for(text, split):
    """Return words to append to `text` so that its hash puts it into `split`."""
    fractions = {"test": 0.1, "validation": 0.05}
    endings = (f"\nEnd {n}.\n" for n in range(1000))
    return next(ending for ending in endings if split_of((text + ending).encode(), fractions) == split)


def test_a_test_split_may_be_left_out(files, tmp_path, notes):
    paths = {f"{name}_path": write_rows(tmp_path / f"{name}.jsonl", [prose(3)]) for name in ("train", "validation")}
    assert prepare(files(**paths), notice=notes.append).test.num_documents == 0
    assert "has no test text" in notes[0]


def test_the_token_budget_stops_the_train_text_alone(files, tmp_path):
    numbers = {"train": range(100), "validation": range(100, 110), "test": range(110, 120)}
    paths = {f"{name}_path": write_rows(tmp_path / f"{name}.jsonl", list(map(prose, numbers[name]))) for name in SPLITS}
    full = prepare(files(**paths))
    cut = prepare(files("data.token_budget=5000", **paths))
    assert cut.train.num_tokens >= 5000 > cut.train.starts[-2], "the document that reached it is the last"
    assert np.array_equal(cut.train.tokens, full.train.tokens[: cut.train.num_tokens])
    assert (cut.validation.num_documents, cut.test.num_documents) == (10, 10)


def test_bytes_of_text_are_exact_within_a_document(files, books):
    corpus = prepare(files("tokenizer=bpe", "tokenizer.vocab_size=300", path=books))
    assert corpus.has_exact_bytes
    split = corpus.train
    for lo in range(0, split.num_tokens - 100, 97):
        text = corpus.tokenizer.decode(split.tokens[lo : lo + 100].tolist(), skip_special_tokens=True)
        assert split.token_bytes(lo, lo + 100) == len(text.encode())
    assert split.token_bytes(0, split.num_tokens) == split.num_bytes
    assert split.token_bytes(0, 1) == 0, "BOS stands for no text"


def test_a_tokenizer_that_loses_text_is_told_of_and_shares_out_bytes(files, tmp_path, notes):
    texts = ["a b c d e f g h " * 20 + f"\n\n{'a ' * n}" for n in range(40)]
    words = ["tokenizer=file", f"tokenizer.path={word_level(tmp_path / 'words.json').path}"]
    corpus = prepare(files(*words, path=write_rows(tmp_path / "rows.jsonl", texts)), notice=notes.append)
    assert "words.json changes 100% of the documents" in notes[0]
    split = corpus.train
    assert not corpus.has_exact_bytes and split.token_bytes(0, split.num_tokens) == split.num_bytes
    for n in range(split.num_documents):
        lo, hi = int(split.starts[n]), int(split.starts[n + 1])
        half = (lo + hi) // 2
        assert split.token_bytes(lo, hi) == split.document_bytes[n]
        assert abs(split.token_bytes(lo, half) + split.token_bytes(half, hi) - split.document_bytes[n]) <= 1


def test_text_without_splits_is_scored_whole_and_train_text_is_not_read(files, books, tmp_path, notes):
    prepare(files(path=books)).tokenizer.save(f"{tmp_path}/bytes.json")
    words = ["tokenizer=file", f"tokenizer.path={tmp_path}/bytes.json"]
    corpus = prepare_held_out(files(*words, path=books), notes.append)
    assert corpus.validation is corpus.test
    assert (corpus.test.name, corpus.test.num_documents) == ("whole", 150)
    assert ": whole 150 documents, " in notes[-1]
    short = prepare_held_out(files(*words, "data.token_budget=900", path=books), notes.append)
    assert 900 <= short.test.num_tokens < 3000
    unread = tmp_path / "train.jsonl"
    unread.write_text("this would be refused")
    split = prepare_held_out(files(*words, train_path=unread, validation_path=books), notes.append)
    assert split.validation.num_documents == split.test.num_documents == 150 and split.train.num_documents == 0
