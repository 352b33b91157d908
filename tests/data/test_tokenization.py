"""Tokens say exactly what the text said, on every machine, and text never becomes a special token."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from prose import prose
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from posbench import compose
from posbench.config import ConfigError, TokenizerConfig
from posbench.data import build, prepare, tokenization
from posbench.data.tokenization import BOS, TOKENIZERS, byte_lengths, find_bos, pieces, vocab_size


@cache
def made(kind: str) -> Tokenizer:
    config = TokenizerConfig(kind=kind, vocab_size=300, path="unset")
    tokenizer = TOKENIZERS[kind](config, [prose(n) for n in range(20)])
    tokenizer.encode_special_tokens = True
    return tokenizer


kinds = pytest.mark.parametrize("kind", ["bpe", "bytes"])
# Any text, with what is most likely to go wrong mixed in.
texts = st.lists(
    st.one_of(st.text(), st.sampled_from([BOS, " ", "\n\n", "\r\n", "  x", "e\u0301", "\U0001f642", "\0"]))
).map("".join)


@kinds
@given(text=texts)
def test_the_round_trip_is_exact(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert find_bos(tokenizer) not in ids
    lengths = byte_lengths(tokenizer)
    assert lengths is not None and lengths[ids].sum() == len(text.encode())


def test_bytes_are_their_own_numbers() -> None:
    tokenizer = made("bytes")
    assert tokenizer.encode("aé\0\n").ids == list("aé\0\n".encode())
    assert (find_bos(tokenizer), vocab_size(tokenizer)) == (256, 257)


def test_a_bpe_has_the_size_asked_for_and_every_byte() -> None:
    tokenizer = made("bpe")
    assert vocab_size(tokenizer) == 300
    assert set(tokenization._byte_letters()) <= set(tokenizer.get_vocab())
    assert set(tokenization._byte_letters()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_text_that_spells_the_bos_is_only_text() -> None:
    tokenizer = made("bpe")
    bos = find_bos(tokenizer)
    assert tokenizer.id_to_token(bos) == BOS
    text = f"before {BOS} after {BOS}{BOS}"
    ((_, document, tokens),) = build.encoded(tokenizer, bos, [("train", text)])
    assert tokens[0] == bos and bos not in tokens[1:] and document == text.encode()
    assert tokenizer.decode(tokens[1:].tolist(), skip_special_tokens=False) == text


def test_a_tokenizer_read_back_still_refuses_to_spell_the_bos(tmp_path: Path) -> None:
    made("bpe").save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenization.load_tokenizer(tmp_path / "tokenizer.json")
    assert find_bos(tokenizer) not in tokenizer.encode(BOS).ids


@given(words=st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=6), min_size=1))
def test_a_long_document_has_the_same_tokens_as_in_one_piece(words: list[str]) -> None:
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "PIECE_CHARACTERS", 16)
        patch.setattr(build, "_BATCH_CHARACTERS", 64)
        ((_, _, tokens),) = build.encoded(made("bpe"), 0, [("train", text)])
    assert tokens[1:].tolist() == made("bpe").encode(text).ids


@given(text=st.text(st.sampled_from("ab \n\t漢"), max_size=200))
def test_pieces_are_the_text_and_bounded(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "PIECE_CHARACTERS", 16)
        cut = list(pieces(text))
    assert "".join(cut) == text and max(map(len, cut)) <= 16


def test_documents_come_back_in_order_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [("test" if n % 3 else "train", prose(n, words=n * 9)) for n in range(30)]
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 500)
    monkeypatch.setattr(tokenization, "PIECE_CHARACTERS", 200)
    tokenizer = made("bpe")
    for (split, text), (name, document, tokens) in zip(documents, build.encoded(tokenizer, 0, documents), strict=True):
        assert (split, text.encode()) == (name, document)
        assert tokens.tolist() == [0, *tokenizer.encode(text).ids]


def test_training_gives_the_same_tokenizer_on_one_core_and_on_many() -> None:
    code = (
        "from prose import prose\n"
        "from posbench.config import TokenizerConfig; from posbench.data.tokenization import *\n"
        "texts = [prose(n, 400)[n % 9:] for n in range(400)]\n"
        "print(fingerprint(train_bpe(TokenizerConfig(kind='bpe', vocab_size=900), texts)))"
    )
    found = set()
    for threads in ("1", "2", "7"):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parent)}
        found.add(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)
    assert len(found) == 1


def foreign(path: Path, special: list[str], **changes: object) -> TokenizerConfig:
    """Somebody else's byte-level tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(tokenization._byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    tokenizer.save(str(path))
    return TokenizerConfig(kind="file", path=str(path))


@pytest.mark.parametrize(
    ("special", "bos"),
    [
        (["<|endoftext|>", "<s>"], "<s>"),
        (["<pad>", "<|endoftext|>"], "<|endoftext|>"),
        (["<pad>"], BOS),
        ([], BOS),
    ],
)
def test_a_foreign_tokenizer_keeps_its_own_bos_or_is_given_one(tmp_path: Path, special: list[str], bos: str) -> None:
    tokenizer = TOKENIZERS["file"](foreign(tmp_path / "tokenizer.json", special), [])
    assert tokenizer.id_to_token(find_bos(tokenizer)) == bos


def test_a_foreign_template_truncation_and_padding_do_not_reach_the_tokens(tmp_path: Path) -> None:
    template = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 256)])
    config = foreign(tmp_path / "tokenizer.json", ["<s>"], post_processor=template)
    tokenizer = TOKENIZERS["file"](config, [])
    tokenizer.encode_special_tokens = True
    found = [tokens.tolist() for _, _, tokens in build.encoded(tokenizer, 256, [("train", "abcdefgh"), ("train", "i")])]
    assert found == [[256, *b"abcdefgh"], [256, *b"i"]]


def test_a_vocabulary_with_holes_counts_to_its_largest_number(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    assert vocab_size(tokenizer) == 70_001 and byte_lengths(tokenizer) is None


def test_a_tokenizer_whose_words_include_the_bos_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "word": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.encode_special_tokens = True
    with pytest.raises(ConfigError, match=r"turns ordinary text into '<s>'"):
        list(build.encoded(tokenizer, 0, [("train", "word <s> word")]))


def word_level(path: Path) -> TokenizerConfig:
    """Words of one letter; what stands between them is lost."""
    vocabulary = {letter: n for n, letter in enumerate(["[UNK]", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path))
    return TokenizerConfig(kind="file", path=str(path))


def test_what_a_tokenizer_loses_of_a_text_is_measured_and_too_much_is_refused(tmp_path: Path) -> None:
    lossy = TOKENIZERS["file"](word_level(tmp_path / "words.json"), [])
    loss = tokenization.loss_of(lossy, ["a b", "c d e f g h a b  c", *["a b c d"] * 5, "x a b c d e f g h a b"], "it")
    assert (loss.unknown, loss.changed) == (1 / 42, 2 / 8)
    assert re.search(
        r"it does not give this text back: 2\.38% .* unknown, and 25% of the documents", loss.describe("it")
    )
    with pytest.raises(ConfigError, match=r"it does not know 50% of the tokens of this text: .*tokenizer=bpe"):
        tokenization.loss_of(lossy, ["a x"], "it")
    exact = TOKENIZERS["file"](foreign(tmp_path / "tokenizer.json", ["<s>"]), [])
    assert tokenization.loss_of(exact, ["a b\n c é", "[UNK]"], "it").describe("it") == ""


def test_a_preparation_says_what_the_tokenizer_loses(tmp_path: Path) -> None:
    letters = ["a b c d e f g h " * 20 + f"\n\n{'a ' * n}" for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in letters))
    words = [f"data.path={tmp_path}/rows.jsonl", f"data.cache_dir={tmp_path}/cache", "tokenizer=file"]
    word_level(tmp_path / "words.json")
    told: list[str] = []
    prepare(compose(["data=files", *words, f"tokenizer.path={tmp_path}/words.json"]), notice=told.append)
    assert "words.json does not give this text back: 0.00% of its tokens are unknown, and 100%" in told[0]


_FETCH = """
import sys
from posbench.config import ConfigError, TokenizerConfig
from posbench.data.tokenization import TOKENIZERS
for name in sys.argv[1:]:
    try:
        print(TOKENIZERS["hub"](TokenizerConfig(kind="hub", name=name), []).encode("abc").ids)
    except ConfigError as error:
        print(error)
"""


def test_a_tokenizer_of_the_hub_is_fetched_by_its_name_and_then_kept(tmp_path: Path) -> None:
    foreign(tmp_path / "tokenizer.json", ["<s>"])
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()

    def fetched(*names: str, files: dict[str, bytes]) -> list[str]:
        with HubServer("someone/model", files) as server:
            env = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
            if not files:
                env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
            command = [sys.executable, "-c", _FETCH, *names]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.splitlines()

    lacking, unknown = fetched("someone/model", "someone/other", files={"tokenizer.model": b""})
    assert re.search(r"'someone/model' has no tokenizer\.json: transformers converts .*save_pretrained", lacking)
    assert "has no repository 'someone/other' at revision None" in unknown
    assert fetched("someone/model", files={"tokenizer.json": tokenizer}) == ["[97, 98, 99]"]
    kept, unreachable = fetched("someone/model", "someone/other", files={})
    assert kept == "[97, 98, 99]" and "cannot be reached (http://127.0.0.1:9), and tokenizer.name=" in unreachable


def test_a_tokenizer_of_the_hub_has_a_name() -> None:
    for name in ("", "../x", "a/b/c", "https://x.org"):
        with pytest.raises(ConfigError, match=r"tokenizer\.name=.* is not a repository of the hub: give its name"):
            compose(["tokenizer=hub", f"tokenizer.name='{name}'"])


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x80\x81", b'{"version": "1.0"}'])
def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.path=.*tokenizer\.json.*tokenizer=bpe"):
        TOKENIZERS["file"](TokenizerConfig(kind="file", path=str(path)), [])


def test_an_error_in_the_text_passes_through_the_training() -> None:
    def broken():
        yield from islice(map(prose, range(100)), 3)
        raise ConfigError("line 4 is bad")

    with pytest.raises(ConfigError, match="line 4 is bad"):
        TOKENIZERS["bpe"](TokenizerConfig(kind="bpe", vocab_size=300), broken())


def test_lengths_of_a_normalizing_tokenizer_do_not_add_up(tmp_path: Path) -> None:
    """The reason why a corpus compares them document by document before it calls them exact."""
    config = foreign(tmp_path / "tokenizer.json", ["<s>"], normalizer=normalizers.NFC())
    tokenizer = TOKENIZERS["file"](config, [])
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    assert int(lengths[np.array(tokenizer.encode("e\u0301").ids)].sum()) != len("e\u0301".encode())


def test_a_tokenizer_of_chance_is_refused(tmp_path: Path) -> None:
    """BPE dropout merges other pairs each time, under one fingerprint."""
    content = json.loads(made("bpe").to_str())
    content["model"]["dropout"] = 0.1
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"chooses its merges at random \(model\.dropout=0\.1\)"):
        tokenization.read_file(TokenizerConfig(kind="file", path=str(file)), [])
    with pytest.raises(ConfigError, match="chooses its merges at random"):
        tokenization.load_tokenizer(file)


def test_a_pattern_that_panics_is_an_error_in_words(tmp_path: Path) -> None:
    content = json.loads(made("bpe").to_str())
    pattern = {"type": "Split", "pattern": {"Regex": "(?:(?:a|aa)+)+b"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = pattern
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    tokenizer = tokenization.read_file(TokenizerConfig(kind="file", path=str(file)), [])
    with pytest.raises(ConfigError, match=r"mine cannot tokenize this text \(.*retry-limit-in-match over\)"):
        list(build.encoded(tokenizer, 0, [("train", "a" * 40 + "c")], "mine"))


def test_a_tokenizer_is_held_to_its_fingerprint(tmp_path: Path) -> None:
    tokenizer = made("bpe")
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_str(pretty=True))
    assert tokenization.load_tokenizer(file, tokenization.fingerprint(tokenizer)).to_str() == tokenizer.to_str()
    with pytest.raises(ConfigError, match="is not the tokenizer that the run was trained with"):
        tokenization.load_tokenizer(file, "0" * 64)
