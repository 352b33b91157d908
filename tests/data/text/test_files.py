"""Every format gives the same documents, and what cannot be read is named with what to do."""

import bz2
import gzip
import io
import json
import lzma
import shutil
import tarfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from prose import prose

from posbench.config import ConfigError, DataConfig
from posbench.data import prepare
from posbench.data.text.preparation import SOURCES
from posbench.data.text.sources import joined_articles
from tests.refusals import refuses

TEXTS = ["one\n", "two é\r\nlines", '  "three", with a comma', "12", "NA", "2020-01-01"]
TABLE = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
LINES = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()


def documents(config):
    """Return the texts that the source yields, by stream."""
    return {name: list(texts) for name, texts in SOURCES[config.data.source](config.data).streams().items()}


def zstandard(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return bytes(sink.getvalue())


def parquet(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def tar(data):
    """Pack one file into an archive."""
    archive, member = io.BytesIO(), tarfile.TarInfo("a.txt")
    member.size = len(data)
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.addfile(member, io.BytesIO(data))
    return archive.getvalue()


def write_arrow(open_writer):
    def write(path):
        with pa.OSFile(str(path), "wb") as sink, open_writer(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)

    return write


FORMATS = {
    "a.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "array.json": lambda path: path.write_text(json.dumps(TABLE.to_pylist())),
    "indented.json": lambda path: path.write_text("\n" + json.dumps(TABLE.to_pylist(), indent=1)),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard(LINES)),
    "A [1]*.PARQUET": lambda path: pq.write_table(TABLE, path, row_group_size=2),
    "a.csv": lambda path: pyarrow.csv.write_csv(TABLE, path),
    "a.tsv": lambda path: pyarrow.csv.write_csv(TABLE, path, pyarrow.csv.WriteOptions(delimiter="\t")),
    "file.arrow": write_arrow(pa.ipc.new_file),
    "stream.arrow": write_arrow(pa.ipc.new_stream),
    "file.feather": write_arrow(pa.ipc.new_file),
    "a.jsonlines": lambda path: path.write_bytes(LINES),
    "a.pq": lambda path: pq.write_table(TABLE, path),
    "utf-16.jsonl": lambda path: path.write_text(LINES.decode(), encoding="utf-16"),
    "saved": lambda path: datasets.Dataset(TABLE).save_to_disk(path, num_shards=2),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(files, tmp_path, name):
    FORMATS[name](tmp_path / name)
    assert documents(files(path=tmp_path / name)) == {"train": TEXTS}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("cut", [[], ["data.cut_bytes=1000"]])
def test_a_byte_order_mark_tells_the_encoding_and_is_no_text(files, tmp_path, encoding, cut):
    text = "Grüße, “one” line\r\nand another"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode(encoding)))
    assert documents(files(*cut, path=tmp_path)) == {"train": [text, text]}


def test_json_rows_may_be_null_and_have_other_keys_of_other_types(files, tmp_path):
    rows = [{"text": "a" * 12_000_000, "id": 1}, {"text": None}, {"id": "x", "new": [1], "text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [text[:2] for text in documents(files(path=tmp_path / "a.jsonl"))["train"]] == ["aa", "b"]


def test_half_a_surrogate_pair_is_replaced_and_counted(files, tmp_path):
    rows = [r'{"text": "half \ud83d"}', r'{"text": "\ude00\ud83d\ude00 \u00e9"}', r'{"text": "\ud83d\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = SOURCES["files"](files(path=tmp_path).data)
    assert list(source.streams()["train"]) == ["half \ufffd", "\ufffd\U0001f600 é", "\U0001f600"]
    assert source.repaired == 2


def test_a_quote_in_tsv_is_a_character(files, tmp_path):
    texts = ['"Yes, he said.', 'No "quotes" end', '"', "NA"]
    (tmp_path / "a.tsv").write_text("".join(f"{row}\n" for row in ["text\tid", *(f"{text}\t1" for text in texts)]))
    assert documents(files(path=tmp_path))["train"] == texts


def test_globs_lists_and_folders_are_read_in_order_each_file_once(files, tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt.gz", "deep/d.png", "LICENSE", ".git/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    config = files(path=tmp_path)
    assert documents(config)["train"] == ["a.txt", "b.txt", "deep/c.txt.gz"]
    assert SOURCES["files"](config.data).skipped == {"no suffix": 1, ".png": 1}
    listed = files(path=[tmp_path / "b.txt", tmp_path / "*.txt", tmp_path / "**" / "*.gz", tmp_path / "LICENSE"])
    assert documents(listed)["train"] == ["b.txt", "a.txt", "deep/c.txt.gz", "LICENSE"]


@pytest.mark.parametrize("name", [name for name in FORMATS if "." in name])
def test_the_name_of_a_link_tells_the_format_and_not_what_it_leads_to(files, tmp_path, name):
    """As in a hub's cache, where `snapshots/0123/train.jsonl` leads to a blob without a suffix."""
    FORMATS[name](tmp_path / name)
    (tmp_path / "blobs").mkdir()
    (tmp_path / name).rename(tmp_path / "blobs" / "9f86d081")
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    link = tmp_path / "snapshots" / "0123" / name
    link.symlink_to("../../blobs/9f86d081")
    for path in (link, link.parent, link.parent / "*", tmp_path / "snapshots"):
        assert documents(files(path=path))["train"] == TEXTS
    plain = files(path=tmp_path / "blobs" / "9f86d081")
    identities = [SOURCES["files"](config.data).identity() for config in (plain, files(path=link))]
    assert identities[0] != identities[1], "the same bytes read in another way are another text"


def test_linked_folders_and_broken_links_are_counted_as_skipped(files, tmp_path):
    for name in ("notes/a.txt", "other/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    for name, target in {"more": "../other", "up": "..", "gone.txt": "nowhere", ".hidden": "../other"}.items():
        (tmp_path / "notes" / name).symlink_to(target)
    source = SOURCES["files"](files(path=tmp_path / "notes").data)
    assert [path.name for path in source.files()] == ["a.txt"]
    assert source.kinds_skipped() == "2 linked folders, 1 broken link"
    followed = SOURCES["files"](files(path=tmp_path / "notes" / "**" / "*.txt").data)
    assert [path.name for path in followed.files()] == ["a.txt", "b.txt"]
    (tmp_path / "notes" / "a.txt").unlink()
    refuses(
        r"has no text and no rows \(skipped: 2 linked folders, 1 broken link\)",
        SOURCES["files"],
        files(path=tmp_path / "notes").data,
    )


@pytest.mark.parametrize("path", ["saved", ".", "saved/*.arrow"])
def test_caches_and_stale_shards_beside_a_saved_data_set_are_not_its_rows(files, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_dict({"text": ["stale"] * 3}).save_to_disk("saved", num_shards=3)
    saved = datasets.Dataset(TABLE)
    saved.save_to_disk("saved", num_shards=2)
    Path("saved", "dataset_info.json").rename("dataset_dict.json")  # not needed to read rows
    for name in ("saved/cache-0.arrow", "cache-1.arrow"):
        shutil.copy("saved/data-00000-of-00003.arrow", name)
    assert documents(files(path=path))["train"] == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "deep/a.json.gz", "a.csv"])
def test_text_beside_rows_is_not_the_data_set(files, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    FORMATS[name.removeprefix("deep/")](tmp_path / name)
    for file_name in ("README.md", "deep_load.py", "dataset_infos.json"):
        (tmp_path / file_name).write_text("{}")
    config = files(path=tmp_path)
    assert documents(config)["train"] == TEXTS
    assert SOURCES["files"](config.data).skipped == {".md": 1, ".py": 1}


def test_text_files_are_cut_at_blank_lines_when_asked(files, tmp_path):
    text = "\n\n".join(prose(n, 60) for n in range(40)) + "é" * 5000
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "other.txt").write_bytes(b"Another file\r\nis another document.")
    pieces = documents(files("data.cut_bytes=1000", path=tmp_path))["train"]
    assert pieces.pop() == "Another file\r\nis another document."
    assert "".join(pieces) == text and len(pieces) > 10
    whole, rest = pieces[:-6], pieces[-6:]  # the last line is longer than a document: cut between characters
    assert all(1000 <= len(piece) < 2500 and piece.endswith("\n\n") for piece in whole[:-1])
    assert all(len(piece.encode()) <= 4000 for piece in rest)


def test_rows_of_wikitext_are_joined_to_articles():
    rows = ["", " = First = \n", "", " Words , with = signs = within\n", " = = Section = = \n", " x = y = z \n"]
    rows += [" = Not a title = \n", "", " = Second ( the = sign ) = \n", "", " End .\n"]
    articles = [article for article in joined_articles(rows) if article.strip()]
    assert [article.splitlines()[0] for article in articles] == [" = First = ", " = Second ( the = sign ) = "]
    assert " = Not a title = " in articles[0], "a title follows a blank line"
    assert "".join("".join(articles).split()) == "".join("".join(rows).split()), "nothing is lost"
    whole = "\n".join(row.rstrip("\n") for row in rows)
    assert list(joined_articles([whole])) == list(joined_articles(rows)), "rows or a whole file, it is the same"


BAD = {
    "missing.txt": (None, "there are no text files at .*missing.txt"),
    "blank.txt": (b" \n\t\n", "no train text in 0 documents"),
    "latin1.txt": (b"x" * 70_000 + b"caf\xe9 and on", r"latin1\.txt cannot be read \(UnicodeDecodeError"),
    "torn.jsonl": (b'{"text": "a"}\n{"text": "wo', r"torn\.jsonl, line 2, is not JSON"),
    "other.jsonl": (b'\n{"id": 1, "body": "a"}\n', r"line 2, has no field 'text': set data\.text_column .* id, body"),
    "texts.jsonl": (b'"a"\n', "line 1, holds str, not an object"),
    "indented.json": (b'{\n "text": "a"\n}', "line 1, is not JSON .*one object a line"),
    "torn.json": (b'[{"text": "a"},\n', "line 1, is not JSON .*one array"),
    "number.jsonl": (b'{"text": 3}\n', r"data\.text_column=text holds int, not text"),
    "other.csv": (b"id,body\n1,a\n", r"other\.csv has no field 'text': set data\.text_column .* id, body"),
    "comma.csv": (b"id,text\n1,a, b\n", r"comma\.csv, line 2, has 3 fields, but the first line has 2"),
    "break.tsv": (b'id\ttext\n1\t"a\nb"\n', r"break\.tsv, line 3, has 1 fields"),
    "other.parquet": (parquet(TABLE.rename_columns(["id", "body"])), "no field 'text': set .* id, body"),
    "list.parquet": (parquet(pa.table({"text": [["a"]]})), r"data\.text_column=text holds list, not text"),
    "torn.parquet": (b"PAR1 and on", r"torn\.parquet cannot be read"),
    "a.tar.gz": (gzip.compress(tar(prose(1).encode())), r"a\.tar\.gz is an archive.*unpack it"),
    "tar.txt": (tar(b"a"), r"tar\.txt is an archive"),
    "a.docx": (b"PK\x03\x04 and on", r"a\.docx is an archive"),
    "a.pdf": (b"%PDF-1.4 and on", r"a\.pdf is an archive, an office document or a PDF.*convert it to text"),
    "a.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + 600 * b"\0", r"a\.doc is an archive, an office document or a PDF"),
    "a.rtf": (b"{\\rtf1 text}", r"a\.rtf is an archive, an office document"),
    "bz2.txt": (bz2.compress(b"a"), r"bz2\.txt is an archive.*unpack it"),
    "a.parquet.gz": (gzip.compress(parquet(TABLE)), r"a\.parquet\.gz is a compressed table: decompress it"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\noid", r"pointer\.parquet .*git lfs pull"),
    "nul.txt": (b"a" * 70_000 + b"\0", r"nul\.txt has NUL bytes"),
    "torn.txt.gz": (gzip.compress(prose(1).encode())[:-30], r"torn\.txt\.gz cannot be read \(EOFError"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_and_leaves_nothing(files, tmp_path, name, files_left):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refuses(message, prepare, files(path=tmp_path / name))
    assert files_left() == []


@pytest.mark.parametrize(("name", "skipped"), [("a.pdf", "1 .pdf"), (".hidden.txt", "nothing")])
def test_a_folder_without_text_says_what_it_skipped(files, tmp_path, name, skipped):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"has no text and no rows \(skipped: {skipped}\)") as raised:
        prepare(files(path=tmp_path))
    assert "did you mean" not in str(raised.value)


def test_held_out_files_must_not_be_trained_on(files, tmp_path):
    (tmp_path / "a.txt").write_text(prose(1))
    refuses(r"a\.txt is named for two splits", prepare, files(train_path=tmp_path, validation_path=tmp_path / "a.txt"))
    refuses(r"the source is 'stdlib'.*data=files", DataConfig, name="packages", source="stdlib", path="books.jsonl")
