"""Files are read as documents; a file that is no text is named with what to do, at once, with nothing left behind."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prose import prose

from posbench.config import Config, ConfigError, DataConfig
from posbench.data import prepare
from posbench.data.sources import SOURCES
from posbench.data.sources.base import joined_articles

Files = Callable[..., Config]


def documents(config: Config) -> dict[str, list[str]]:
    """What the source yields, by stream."""
    return {name: list(texts) for name, texts in SOURCES[config.data.source](config.data).streams().items()}


def write_lines(path: Path, texts: list[str], column: str = "text") -> Path:
    data = "".join(json.dumps({"id": n, column: text}) + "\n" for n, text in enumerate(texts)).encode()
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(data))
    return path


def zstandard(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return bytes(sink.getvalue())


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}


def write_parquet(path: Path, texts: list[str | None], column: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path)
    return path


TEXTS = ["one\n", "two é\r\nlines", "  three  "]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a [1]*.parquet", "A.PARQUET"])
def test_a_row_is_a_document(files: Files, tmp_path: Path, name: str) -> None:
    write = write_parquet if name.lower().endswith(".parquet") else write_lines
    path = write(tmp_path / name, [*TEXTS, None])
    assert documents(files(path=path)) == {"train": TEXTS}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_rows_and_texts_are_read(files: Files, tmp_path: Path, suffix: str) -> None:
    rows = write_lines(tmp_path / f"a.jsonl{suffix}", TEXTS)
    (tmp_path / f"b.md{suffix}").write_bytes(COMPRESS[suffix](b"# prose"))
    assert documents(files(path=[rows, tmp_path / f"b.md{suffix}"])) == {"train": [*TEXTS, "# prose"]}
    torn = tmp_path / f"c.txt{suffix}"
    torn.write_bytes(b"not compressed at all")
    with pytest.raises(ConfigError, match=rf"c\.txt\{suffix} cannot be read"):
        documents(files(path=torn))


def test_what_datasets_saved_to_disk_is_read_as_it_is(files: Files, tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "text": [*TEXTS, None]})
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    assert documents(files(path=tmp_path / "one")) == {"train": TEXTS}
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "several")
    with pytest.raises(
        ConfigError, match=r"several splits \(test, train\): name one for each split, as in data\.train_path="
    ):
        files(path=tmp_path / "several") and SOURCES["files"](files(path=tmp_path / "several").data)
    paths = {f"{name}_path": tmp_path / "several" / name for name in ("train", "test")}
    assert documents(files(validation_path=tmp_path / "one", **paths))["test"] == TEXTS
    with pytest.raises(ConfigError, match=r"\.arrow: column 'id' holds int64, not text"):
        documents(files("data.text_column=id", path=tmp_path / "one"))


def test_arrow_files_of_both_forms_are_read(files: Files, tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS})
    for name, writer in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, writer(sink, table.schema) as written:
            written.write_table(table)
        assert documents(files(path=tmp_path / name)) == {"train": TEXTS}
    (tmp_path / "torn.arrow").write_bytes((tmp_path / "file.arrow").read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"torn\.arrow is cut off or damaged"):
        documents(files(path=tmp_path / "torn.arrow"))


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv.gz", "\t")])
def test_a_column_of_a_csv_file_is_read(files: Files, tmp_path: Path, name: str, comma: str) -> None:
    rows = [["id", "body"], *([str(n), text] for n, text in enumerate(["a, b", 'he said "no"\nand left', ""]))]
    lines = (
        comma.join(rows[0])
        + "\r\n"
        + "".join(f'{n}{comma}"{t.replace(chr(34), 2 * chr(34))}"\r\n' for n, t in rows[1:])
    )
    (tmp_path / name).write_bytes(COMPRESS.get(Path(name).suffix, bytes)(b"\xef\xbb\xbf" + lines.encode()))
    config = files("data.text_column=body", path=tmp_path / name)
    assert documents(config)["train"] == ["a, b", 'he said "no"\nand left']
    with pytest.raises(ConfigError, match=r"no column 'text' \(columns: id, body\): set data\.text_column"):
        documents(files(path=tmp_path / name))


def test_a_folder_says_what_it_read_and_what_it_skipped(files: Files, tmp_path: Path) -> None:
    for name in ("a.md", "b.rst", "deep/c.py", "d.png", "e.png", "LICENSE", ".git/f.txt"):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(f"text of {name}")
    config = files(path=tmp_path / "text")
    assert documents(config)["train"] == [f"text of {name}" for name in ("a.md", "b.rst", "deep/c.py")]
    (remark,) = SOURCES["files"](config.data).remarks()
    assert remark.startswith("reading 3 files (1 .md, 1 .rst, 1 .py); skipped 3 files (2 .png, 1 no suffix)")
    assert SOURCES["files"](files(path=tmp_path / "text" / "a.md").data).remarks() == [], "one file that was named"


def test_text_files_are_cut_at_blank_lines_when_asked(files: Files, tmp_path: Path) -> None:
    paragraphs = [prose(n, 60) for n in range(40)]
    text = "\n\n".join(paragraphs) + "é" * 5000
    (tmp_path / "book.txt").write_text(text)
    found = documents(files("data.cut_bytes=1000", path=tmp_path / "book.txt"))["train"]
    assert "".join(found) == text and len(found) > 10
    whole, rest = found[:-6], found[-6:]  # the last line is longer than a document: cut between characters
    assert all(1000 <= len(piece) < 2500 and piece.endswith("\n\n") for piece in whole[:-1])
    assert all(len(piece.encode()) <= 4000 for piece in rest)
    corpus = prepare(files("data.cut_bytes=1000", path=tmp_path / "book.txt"), quiet=True)
    assert all(split.num_documents > 0 for split in corpus.splits.values())


def test_the_mark_that_windows_puts_before_utf_8_is_no_part_of_a_row(files: Files, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert documents(files(path=path)) == {"train": TEXTS}


def test_a_text_file_is_a_document_and_globs_lists_and_folders_are_files(files: Files, tmp_path: Path) -> None:
    paths = [tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "deep" / "c.txt.gz"]
    paths[2].parent.mkdir()
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    (tmp_path / "deep" / ".hidden.txt").write_text("hidden")
    (tmp_path / "deep" / "notes.odt").write_text("no text file by its name")
    one, two, three = TEXTS
    assert documents(files(path=tmp_path / "*.txt"))["train"] == [two, one], "in the order of their names"
    assert documents(files(path=[paths[0], paths[1], tmp_path / "*.txt"]))["train"] == [one, two], (
        "as listed, each once"
    )
    assert documents(files(path=tmp_path))["train"] == [two, one, three]
    assert documents(files(path=tmp_path / "**" / "*.gz"))["train"] == [three]


def test_a_column_by_name_and_mixed_formats(files: Files, tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / "a.jsonl", ["x"], "body"), write_parquet(tmp_path / "b.parquet", ["y"], "body")]
    assert documents(files("data.text_column=body", path=paths))["train"] == ["x", "y"]


def test_files_of_each_split(files: Files, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text(prose(len(name), 500))
    told: list[str] = []
    config = files(train_path=tmp_path / "train.txt", validation_path=tmp_path / "validation.txt")
    corpus = prepare(config, notice=told.append)
    assert {name: split.num_documents for name, split in corpus.splits.items()} == {
        "train": 1,
        "validation": 1,
        "test": 0,
    }
    assert told[0] == "reading 2 files (2 .txt)" and "no test text (data.test_path (not given))" in told[1]


def test_rows_of_wikitext_are_joined_to_articles() -> None:
    rows = [
        "",
        " = First = \n",
        "",
        " Words , with = signs = within\n",
        " = = Section = = \n",
        " x = y = z \n",
        " = Not a title = \n",
        "",
        " = Second ( the = sign ) = \n",
        "",
        " End .\n",
    ]
    articles = [article for article in joined_articles(rows) if article.strip()]
    assert [article.splitlines()[0] for article in articles] == [" = First = ", " = Second ( the = sign ) = "]
    assert " = Not a title = " in articles[0], "a title follows a blank line"
    assert "".join("".join(articles).split()) == "".join("".join(rows).split()), "nothing is lost"
    whole = "\n".join(row.rstrip("\n") for row in rows)
    assert list(joined_articles([whole])) == list(joined_articles(rows)), "rows or a whole file, it is the same"


def parquet_of(table: pa.Table) -> Callable[[Path], object]:
    return lambda path: pq.write_table(table, path)


def torn_parquet(path: Path) -> None:
    write_parquet(path, [prose(n) for n in range(50)])
    os.truncate(path, path.stat().st_size - 100)


def rotten_parquet(path: Path) -> None:
    write_parquet(path, [prose(n) for n in range(50)])
    data = bytearray(path.read_bytes())
    data[50:3000] = bytes(2950)
    path.write_bytes(data)


def wild_arrow(path: Path) -> None:
    """A row that ends where a file has other bytes, or none: Arrow itself would give what lies there in memory."""
    table = pa.table({"text": ["abc", "def"]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    offsets, wild = (struct.pack("<3i", *each) for each in ((0, 3, 6), (0, 3, 900)))
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, wild))


def latin1(path: Path) -> None:
    path.write_bytes(b"x" * 70_000 + "é".encode("latin1") + b" and on")


def line(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(b'{"text": "fine"}\n' + content + b"\n")


BAD = {
    "missing.txt": (None, r"data\.path='.*missing\.txt' does not exist.*give a file, a glob"),
    "empty.txt": (lambda p: p.write_bytes(b""), r"empty\.txt' has no text, every document is empty or blank"),
    "empty.jsonl": (lambda p: p.write_bytes(b""), r"empty\.jsonl' has no text"),
    "empty.parquet": (lambda p: p.write_bytes(b""), r"empty\.parquet is not a parquet file"),
    "blank.txt": (lambda p: p.write_text(" \n\t\u3000\n"), r"blank\.txt' has no text"),
    "blank.jsonl": (lambda p: p.write_text('{"text": " "}\n\n'), r"blank\.jsonl' has no text"),
    "norows.parquet": (parquet_of(pa.table({"text": pa.array([], pa.string())})), r"has no text"),
    "binary.txt": (lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"), r"binary\.txt is binary.*byte 8 is zero"),
    "binary.parquet": (lambda p: p.write_bytes(os.urandom(5000)), r"binary\.parquet is not a parquet file"),
    "utf16.txt": (lambda p: p.write_text("words", "utf-16"), r"begins like UTF-16.*iconv"),
    "latin1.txt": (latin1, r"latin1\.txt is not UTF-8: byte 70,000 is 0xe9.*iconv"),
    "latin1.jsonl": (line(b'{"text": "caf\xe9"}'), r"latin1\.jsonl is not UTF-8: byte 30 is 0xe9"),
    "array.jsonl": (lambda p: p.write_text('["text"]\n'), r"line 1 of .*array\.jsonl is not a JSON object but list"),
    "torn.jsonl": (line(b'{"text": "wo'), r"line 2 of .*torn\.jsonl is not JSON .*one JSON object per line"),
    "other.jsonl": (
        line(b'{"texts": "x", "id": 1}'),
        r"no column 'text'; did you mean 'texts'\? \(columns: texts, id\)",
    ),
    "number.jsonl": (line(b'{"text": 3}'), r"line 2 .*'text' holds int, not text; set data\.text_column"),
    "half.jsonl": (line(rb'{"text": "\ud800"}'), r"line 2 .* half a surrogate pair \('\\ud800'\)"),
    "other.parquet": (
        parquet_of(pa.table({"title": ["a"], "body": ["b"]})),
        r"other\.parquet has no column 'text' \(columns: title, body\): set data\.text_column",
    ),
    "number.parquet": (parquet_of(pa.table({"text": [1, 2]})), r"column 'text' holds int64, not text"),
    "torn.parquet": (torn_parquet, r"torn\.parquet is not a parquet file, or is damaged"),
    "rotten.parquet": (rotten_parquet, r"rotten\.parquet is cut off or damaged"),
    "torn.txt.gz": (lambda p: p.write_bytes(gzip.compress(prose(1).encode())[:-30]), r"torn\.txt\.gz cannot be read"),
    "no.txt.gz": (lambda p: p.write_text("not gzipped"), r"no\.txt\.gz cannot be read \(Not a gzipped file"),
    "wild.arrow": (wild_arrow, r"wild\.arrow is cut off or damaged \(Offset invariant failure"),
    "folder": (lambda p: p.mkdir(), r"folder' is a folder without text files"),
    "none-*.txt": (None, r"none-\*\.txt' does not exist"),
    "x" * 5000: (None, r"cannot be looked up \(.*File name too long"),
    "~nobody-of-this-name/x.txt": (None, r"cannot be looked up|does not exist"),
}


@pytest.mark.parametrize("name", BAD, ids=lambda name: name[:20])
def test_bad_input_is_named_at_once_and_leaves_nothing(
    files: Files, tmp_path: Path, name: str, left: Callable[[], list[str]]
) -> None:
    make, message = BAD[name]
    path = Path(name) if name.startswith("~") else tmp_path / name
    if make is not None:
        make(path)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        prepare(files(path=path), quiet=True)
    assert time.monotonic() - started < 5
    assert left() == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_one_document_cannot_be_split(files: Files, tmp_path: Path, left: Callable[[], list[str]]) -> None:
    (tmp_path / "shakespeare.txt").write_text(prose(1))
    with pytest.raises(ConfigError, match=r"has 1 document \(.*whole documents.*no \w+ text.*data\.validation_path="):
        prepare(files(path=tmp_path / "shakespeare.txt"), quiet=True)
    (tmp_path / "marlowe.txt").write_text(prose(2))
    with pytest.raises(ConfigError, match=r"has 2 documents .*no test text: set data\.cut_bytes=100000"):
        prepare(files(path=tmp_path), quiet=True)
    assert left() == []


def test_held_out_files_must_not_be_trained_on(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.txt is in both data\.train_path=.* and data\.validation_path="):
        prepare(files(train_path=tmp_path / "*.txt", validation_path=tmp_path / "a.txt"), quiet=True)


def test_an_empty_held_out_file_is_named(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(1))
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"data\.validation_path='.*b\.txt' has no text"):
        prepare(files(train_path=tmp_path / "a.txt", validation_path=tmp_path / "b.txt"), quiet=True)


@pytest.mark.parametrize("words", [[], [""], 3, {"a": "b"}, [["x"]], "a\0b"])
def test_what_is_no_path_is_refused(files: Files, words: object) -> None:
    config = files(path="unset")
    config.data.path = words
    with pytest.raises(ConfigError, match=r"data\.path=.* (is not a path|cannot be looked up|does not exist)"):
        prepare(config, quiet=True)


def test_without_the_datasets_library_the_error_says_what_to_install(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(prose(300))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="datasets is not installed: pip install datasets"):
        prepare(files(path=tmp_path / "*.txt"))


def test_a_path_for_a_source_that_reads_none_is_answered_with_the_line_for_a_yaml_file() -> None:
    with pytest.raises(ConfigError, match=r"the source is 'stdlib'.*data=files.*'- override /data: files'"):
        DataConfig(name="packages", source="stdlib", path="books.jsonl")
