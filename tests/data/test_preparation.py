"""Text is read once, found again at once, and a corpus that is not whole is never used."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prose import prose

import posbench
from posbench.config import Config, ConfigError
from posbench.data import Corpus, build, prepare, shards
from posbench.data.sources.stdlib import StandardLibrary
from posbench.data.splitting import SPLITS, split_of
from posbench.data.tokenization import BOS

Files = Callable[..., Config]


def book(number: int) -> str:
    """Some spell out the token that begins a document."""
    return prose(number) + (f" {BOS} and {BOS}" if number % 10 == 0 else "")


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A hundred and fifty different documents, a line each."""
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps({"text": book(n)}) + "\n" for n in range(150)))
    return path


@pytest.fixture
def told() -> list[str]:
    return []


def texts_of(corpus: Corpus) -> dict[str, list[str]]:
    """The documents back from the tokens."""
    return {
        name: [corpus.tokenizer.decode(split.document(n)[1:].tolist()) for n in range(split.num_documents)]
        for name, split in corpus.splits.items()
    }


def test_every_document_is_in_the_split_of_its_hash_in_order(files: Files, books: Path) -> None:
    corpus = prepare(files(path=books), quiet=True)
    found = texts_of(corpus)
    fractions = {"test": 0.10, "validation": 0.05}
    expected: dict[str, list[str]] = {name: [] for name in SPLITS}
    for n in range(150):
        expected[split_of(book(n).encode(), fractions)].append(book(n))
    assert found == expected and all(found.values())
    for split in corpus.splits.values():
        assert (split.tokens[split.starts[:-1]] == corpus.bos_id).all()
        assert (split.tokens == corpus.bos_id).sum() == split.num_documents
        assert split.num_tokens == split.starts[-1] == len(split.tokens)
        assert split.num_bytes == sum(len(text.encode()) for text in found[split.name])


def test_the_split_of_a_document_is_pinned() -> None:
    """SHA-256 begins with ca for "a", 3e for "b" and 2e for "c": 0.79, 0.24 and 0.18 of the way."""
    fractions = {"test": 0.2, "validation": 0.1}
    assert [split_of(text, fractions) for text in (b"a", b"b", b"c")] == ["train", "validation", "test"]


def test_the_second_time_reads_nothing_and_imports_no_datasets(files: Files, books: Path, told: list[str]) -> None:
    first = prepare(files(path=books), notice=told.append)
    assert len(told) == 1 and "prepared" in told[0]
    code = (
        "import sys, time, json, posbench; from posbench.data import prepare\n"
        "config = posbench.compose(['data=files', f'data.path={sys.argv[1]}', 'tokenizer=bytes'])\n"
        "start = time.perf_counter(); corpus = prepare(config); seconds = time.perf_counter() - start\n"
        "loaded = [name for name in ('datasets', 'pyarrow', 'pandas', 'torch', 'wandb') if name in sys.modules]\n"
        "print(json.dumps([corpus.fingerprint, seconds, loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(books)], capture_output=True, text=True, check=True)
    fingerprint, seconds, loaded = json.loads(done.stdout)
    assert (fingerprint, loaded, done.stderr) == (first.fingerprint, [], "")
    assert seconds < 1


def test_changed_text_is_prepared_anew(files: Files, books: Path, told: list[str]) -> None:
    before = prepare(files(path=books), notice=told.append)
    stat = books.stat()
    books.write_text(books.read_text().replace("Chapter", "Kapitel"))  # as long as before
    os.utime(books, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    after = prepare(files(path=books), notice=told.append)
    assert len(told) == 2 and before.fingerprint != after.fingerprint


def test_fingerprints_tell_text_tokenizer_and_splits_apart(files: Files, books: Path) -> None:
    plain = prepare(files(path=books), quiet=True)
    merged = prepare(files("tokenizer=bpe", "tokenizer.vocab_size=300", path=books), quiet=True)
    halves = prepare(files("data.test_fraction=0.3", path=books), quiet=True)
    assert plain.fingerprint == merged.fingerprint != halves.fingerprint
    assert plain.tokenizer_fingerprint == halves.tokenizer_fingerprint != merged.tokenizer_fingerprint
    copy = books.with_name("copy.jsonl")
    copy.write_bytes(books.read_bytes())
    assert prepare(files(path=copy), quiet=True).folder == plain.folder


@pytest.mark.parametrize("damage", ["truncated", "missing", "torn manifest", "torn index", "flipped"])
def test_a_damaged_cache_is_made_again(files: Files, books: Path, told: list[str], damage: str, cache: Path) -> None:
    whole = prepare(files(path=books), quiet=True)
    expected, tokens = texts_of(whole), whole.folder / "train.tokens"
    if damage == "truncated":
        os.truncate(tokens, 1000)
    elif damage == "missing":
        (whole.folder / "test.starts").unlink()
    elif damage == "torn manifest":
        os.truncate(whole.folder / "manifest.json", 100)
    elif damage == "torn index":
        next((cache / "index").iterdir()).write_bytes(b'{"corpus": "../../..')
    else:  # a size does not tell
        data = bytearray(tokens.read_bytes())
        data[len(data) // 2] ^= 4
        tokens.write_bytes(data)
        prepare(files(path=books), notice=told.append)
        assert told == []
    again = prepare(files(path=books), notice=told.append, check=damage == "flipped")
    assert texts_of(again) == expected and "prepared" in told[-1]
    assert damage == "torn index" or "is damaged" in told[0]
    prepare(files(path=books), notice=told.append, check=True)
    assert "prepared" in told[-1] and len(told) <= 2, "and the third time finds it"


def test_a_full_disk_is_named_and_leaves_nothing(
    files: Files, books: Path, left: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards._HashedFile, "write", full)
    with pytest.raises(ConfigError, match=r"cache .* cannot be written \(No space left on device\).*data\.cache_dir"):
        prepare(files(path=books), quiet=True)
    assert left() == []


_PREPARE = (
    "import sys, posbench; from posbench.data import build, prepare\n"
    "config = posbench.compose(['data=files', f'data.path={sys.argv[1]}', 'tokenizer=bytes'])\n"
    "print(prepare(config).fingerprint)"
)


@pytest.mark.slow
def test_two_processes_at_once_do_the_work_once(books: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", _PREPARE, str(books)], stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in running]
    assert len({fingerprint for fingerprint, _ in outputs}) == 1 and outputs[0][0]
    assert sum("prepared" in notices for _, notices in outputs) == 1, outputs


@pytest.mark.slow
def test_what_a_killed_process_left_is_cleared_away(books: Path, cache: Path, left: Callable[[], list[str]]) -> None:
    slow = _PREPARE.replace("config =", "import time; build.write_manifest = lambda *a: time.sleep(60)\nconfig =")
    process = subprocess.Popen([sys.executable, "-c", slow, str(books)])
    deadline = time.monotonic() + 30
    while not any(name.endswith("tokenizer.json") for name in left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(".tmp" in name for name in left())
    subprocess.run([sys.executable, "-c", _PREPARE, str(books)], check=True, capture_output=True)
    assert not any(".tmp" in name for name in left())
    assert len(list((cache / "corpora").iterdir())) == 1


def test_the_token_budget_stops_the_train_text_alone(files: Files, tmp_path: Path) -> None:
    for name, numbers in (("train", range(100)), ("validation", range(100, 110)), ("test", range(110, 120))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": prose(n)}) + "\n" for n in numbers))
    paths = {f"{name}_path": tmp_path / f"{name}.jsonl" for name in SPLITS}
    full = prepare(files(**paths), quiet=True)
    cut = prepare(files("data.token_budget=5000", **paths), quiet=True)
    assert cut.train.num_tokens >= 5000 > cut.train.starts[-2], "the document that reached it is the last"
    assert np.array_equal(cut.train.tokens, full.train.tokens[: cut.train.num_tokens])
    assert (cut.validation.num_documents, cut.test.num_documents) == (10, 10)


def test_a_long_text_is_read_once_and_not_held(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's sample is kept; of the rest, only a batch at a time."""
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 2_000)
    alive = {"now": 0, "most": 0, "read": 0}

    class Text(str):
        def __del__(self) -> None:
            alive["now"] -= 1

    def read(*arguments: object) -> object:
        for n in range(300):
            alive["now"] += 1
            alive["read"] += 1
            alive["most"] = max(alive["most"], alive["now"])
            yield Text(prose(n))

    path = tmp_path / "long.txt"
    path.write_text("stands for a long text")
    monkeypatch.setattr("posbench.data.sources.files.read_texts", read)
    words = ("tokenizer=bpe", "tokenizer.vocab_size=300", "tokenizer.training_bytes=10000", "data.cut_bytes=1000")
    prepare(files(*words, path=path), quiet=True)
    assert alive["read"] == 300 and alive["most"] < 40


def test_bytes_of_text_are_exact_within_a_document(files: Files, books: Path) -> None:
    corpus = prepare(files("tokenizer=bpe", "tokenizer.vocab_size=300", path=books), quiet=True)
    assert corpus.has_exact_bytes
    split, tokenizer = corpus.train, corpus.tokenizer
    for lo in range(0, split.num_tokens - 100, 97):
        text = tokenizer.decode([int(t) for t in split.tokens[lo : lo + 100]], skip_special_tokens=True)
        assert split.token_bytes(lo, lo + 100) == len(text.encode())
    assert split.token_bytes(0, split.num_tokens) == split.num_bytes
    assert split.token_bytes(0, 1) == 0, "BOS stands for no text"


def test_bytes_of_text_are_shared_out_where_the_vocabulary_does_not_tell(
    files: Files, tmp_path: Path, books: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for n in range(150) for word in book(n).replace(".", " .").split()})
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(files("tokenizer=file", f"tokenizer.path={tmp_path}/tokenizer.json", path=books), quiet=True)
    assert not corpus.has_exact_bytes
    split = corpus.train
    for n in range(split.num_documents):
        lo, hi = int(split.starts[n]), int(split.starts[n + 1])
        assert split.token_bytes(lo, hi) == split.document_bytes[n]
        half = (hi - lo) // 2
        assert abs(split.token_bytes(lo, lo + half) + split.token_bytes(lo + half, hi) - split.document_bytes[n]) <= 1
    assert split.token_bytes(0, split.num_tokens) == split.num_bytes
    assert split.token_bytes(5, 5) == 0


def test_a_changed_tokenizer_file_is_seen(files: Files, tmp_path: Path, books: Path, told: list[str]) -> None:
    from posbench.config import TokenizerConfig
    from posbench.data.tokenization import plain_bytes, train_bpe

    path = tmp_path / "tokenizer.json"
    for make in (plain_bytes, train_bpe):
        make(TokenizerConfig(kind="bpe", vocab_size=280), [prose(1)]).save(str(path))
        prepare(files("tokenizer=file", f"tokenizer.path={path}", path=books), notice=told.append)
    assert len(told) == 2


@pytest.mark.slow
def test_the_standard_library_has_no_tables_and_hardly_a_copy_across_its_splits(cache: Path) -> None:
    config = posbench.compose(["data=stdlib", "tokenizer=bytes"])
    corpus = prepare(config, quiet=True)
    held_out = (corpus.validation.num_documents, corpus.test.num_documents)
    assert corpus.train.num_documents > 300 and min(held_out) > 10  # Debian's Python lacks the library's tests: 19
    for split in ("validation", "test"):
        measured = corpus.overlap["splits"][split]
        assert measured["grams"] > 1000 and measured["share"] < 0.01, measured
        assert all(worst["name"].endswith(".py") for worst in measured["worst"])
    names = {
        StandardLibrary(config.data)._name(path)
        for paths in StandardLibrary(config.data).files_of.values()
        for path in paths
    }
    assert "argparse.py" in names and len(names) > 300
    assert not {"html/entities.py", "stringprep.py", "encodings/cp437.py", "pydoc_data/topics.py"} & names
    assert not [name for name in names if "site-packages" in name]
