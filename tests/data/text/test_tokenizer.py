"""Tokens say exactly what the text said, on every machine, and text never becomes a special token."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prose import prose
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from posbench.config import TokenizerConfig
from posbench.data import prepare
from posbench.data.text import tokenizer as module
from posbench.data.text.tokenizer import BOS, TOKENIZERS, byte_lengths, encoded, find_bos, vocab_size
from tests.refusals import refuses


@cache
def tokenizer_of(kind):
    config = TokenizerConfig(kind=kind, vocab_size=300, path="unset")
    tokenizer = TOKENIZERS[kind](config, [prose(n) for n in range(20)])
    tokenizer.encode_special_tokens = True
    return tokenizer


# Any text, with what is most likely to go wrong mixed in.
texts = st.lists(
    st.one_of(st.text(), st.sampled_from([BOS, " ", "\n\n", "\r\n", "  x", "e\u0301", "\U0001f642", "\0"]))
).map("".join)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(text=texts)
def test_the_round_trip_is_exact(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert find_bos(tokenizer) not in ids
    lengths = byte_lengths(tokenizer)
    assert lengths is not None and lengths[ids].sum() == len(text.encode())


def test_bytes_are_their_own_numbers_and_a_bpe_has_the_size_asked_for():
    tokenizer, merged = tokenizer_of("bytes"), tokenizer_of("bpe")
    assert tokenizer.encode("aé\0\n").ids == list("aé\0\n".encode())
    assert (find_bos(tokenizer), vocab_size(tokenizer)) == (256, 257)
    assert vocab_size(merged) == 300 and set(pre_tokenizers.ByteLevel.alphabet()) <= set(merged.get_vocab())


def test_text_that_spells_the_bos_is_only_text():
    """Also for a tokenizer that was read back: its file does not say so."""
    tokenizer = module.tokenizer_in(tokenizer_of("bpe").to_str().encode(), "it")
    bos = find_bos(tokenizer)
    assert tokenizer.id_to_token(bos) == BOS
    text = f"before {BOS} after {BOS}{BOS}"
    ((_, document, tokens),) = encoded(tokenizer, bos, [("train", text)])
    assert tokens[0] == bos and bos not in tokens[1:] and document == text.encode()
    assert tokenizer.decode(tokens[1:].tolist(), skip_special_tokens=False) == text


def word_piece():
    """Return a WordPiece model of common words and of single characters."""
    pieces = ["<s>", "[UNK]", *COMMON_WORDS, *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    return models.WordPiece(vocabulary, unk_token="[UNK]")


def unigram():
    """Return a Unigram model of common words, a phrase and single characters, each with a score of its own."""
    words = ["▁of▁the", *(f"▁{word}" for word in COMMON_WORDS), "▁"]
    scored = [(word, -5 - n / 128) for n, word in enumerate(words)]
    scored += [(character, -10 - n / 128) for n, character in enumerate(CHARACTERS)]
    return models.Unigram([("<s>", 0.0), ("[UNK]", 0.0), *scored], unk_id=1)


# Trainers of these two kinds give another vocabulary each time.
TEXTS = [prose(n) + " < / s >" for n in range(20)]
CHARACTERS = sorted(set("".join(TEXTS)) - {" ", "\n"})
COMMON_WORDS = [word for word, _ in Counter(sorted(" ".join(TEXTS).split())).most_common(80) if len(word) > 1]


@cache
def trained(kind):
    """Return a tokenizer of a kind that other people have. All but `wordpiece` put a space before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=kind != "unigram of phrases")
    if kind == "wordpiece":
        tokenizer.model, tokenizer.pre_tokenizer = word_piece(), pre_tokenizers.BertPreTokenizer()
    elif kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind.startswith("unigram"):
        tokenizer.model = unigram()
    tokenizer.add_special_tokens(["<s>", "[UNK]"])
    if isinstance(tokenizer.model, models.BPE):
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "[UNK]"], show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
    if kind == "llama":  # its normalizer puts a space before any text, even before another space
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # reading rounds the scores of a Unigram model
    tokenizer.encode_special_tokens = True
    return tokenizer


_KINDS = ["wordpiece", "byte-level", "metaspace", "llama", "unigram", "unigram of phrases"]
_words = st.one_of(
    st.sampled_from(prose(0).split()), st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=6)
)


@pytest.mark.parametrize("kind", ["bpe", *_KINDS])
@given(words=st.lists(_words, min_size=1))
@example(words=["<s>"])  # the entry of a special token, which text never becomes
@example(words=["it", "<s>"])
def test_a_long_document_has_the_same_tokens_as_in_one_piece(kind, words):
    text, tokenizer = " ".join(words), tokenizer_of(kind) if kind == "bpe" else trained(kind)
    ((_, _, whole),) = encoded(tokenizer, 999, [("train", text)])
    special = {tokenizer.token_to_id(entry) for entry in (BOS, "<s>")}
    assert special.isdisjoint(whole[1:].tolist())
    if "<s>" not in text:
        assert whole[1:].tolist() == tokenizer.encode(text).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARACTERS", 16)
        patch.setattr(module, "_PIECES_AT_ONCE", 4)
        ((_, _, tokens),) = encoded(tokenizer, 999, [("train", text)])
    assert tokens.tolist() == whole.tolist()


def merged_into_bos():
    """Return a BPE whose merges spell its BOS, as some converters of sentencepiece models wrote them."""
    vocabulary = {entry: n for n, entry in enumerate(["<s>", "<", "s", ">", "s>", "a", "▁"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("s", ">"), ("<", "s>")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [trained("unigram"), merged_into_bos()], ids=["unigram", "bpe"])
def test_text_that_spells_a_special_token_is_written_with_others(tokenizer):
    ((_, _, tokens),) = encoded(tokenizer, 0, [("train", "a <s> a")])
    assert "".join(map(tokenizer.id_to_token, tokens)) == "<s>▁a▁<s>▁a" and 0 not in tokens[1:]


@pytest.mark.slow
def test_training_gives_the_same_tokenizer_on_one_core_and_on_many():
    code = (
        "from prose import prose\n"
        "from posbench.config import TokenizerConfig; from posbench.data.text.tokenizer import *\n"
        "texts = [prose(n, 400)[n % 9:] for n in range(400)]\n"
        "print(fingerprint(train_bpe(TokenizerConfig(kind='bpe', vocab_size=900), texts)))"
    )
    outputs = set()
    for threads in ("1", "7"):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        outputs.add(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)
    assert len(outputs) == 1


def foreign(path, special, **changes):
    """Return a byte-level tokenizer read from another program's tokenizer.json."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    tokenizer.save(str(path))
    return TOKENIZERS["file"](TokenizerConfig(kind="file", path=str(path)), [])


@pytest.mark.parametrize(
    ("special", "bos"),
    [(["<|endoftext|>", "<s>"], "<s>"), (["<pad>", "<|endoftext|>"], "<|endoftext|>"), (["<pad>"], BOS), ([], BOS)],
)
def test_a_foreign_tokenizer_keeps_its_own_bos_or_is_given_one(tmp_path, special, bos):
    tokenizer = foreign(tmp_path / "tokenizer.json", special)
    assert tokenizer.id_to_token(find_bos(tokenizer)) == bos


@pytest.mark.parametrize("bos", ["<first>", {"content": "<first>", "special": True}])
def test_the_bos_is_the_one_that_tokenizer_config_names(tmp_path, bos):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    tokenizer = foreign(tmp_path / "tokenizer.json", ["<s>", "<first>"])
    assert (find_bos(tokenizer), vocab_size(tokenizer)) == (257, 258)
    assert find_bos(module.tokenizer_in(tokenizer.to_str().encode(), "it")) == 257


def test_a_bos_with_a_usual_name_leaves_the_tokenizer_as_it_is(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = foreign(tmp_path / "tokenizer.json", ["<s>"])
    assert (find_bos(tokenizer), tokenizer.post_processor) == (256, None)


def test_a_broken_tokenizer_config_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": ')
    refuses(r"tokenizer_config\.json cannot be read", foreign, tmp_path / "tokenizer.json", ["<s>"])


def test_a_foreign_template_truncation_and_padding_do_not_reach_the_tokens(tmp_path):
    template = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 256)])
    tokenizer = foreign(tmp_path / "tokenizer.json", ["<s>"], post_processor=template)
    tokenizer.encode_special_tokens = True
    expected = [[256, *tokenizer.encode(text, add_special_tokens=False).ids] for text in ("abcdefgh", "i")]
    token_lists = [tokens.tolist() for _, _, tokens in encoded(tokenizer, 256, [("train", "abcdefgh"), ("train", "i")])]
    assert token_lists == expected and [len(tokens) for tokens in token_lists] == [9, 2]


def test_dropout_is_off_when_text_is_encoded(tmp_path, files):
    tokenizer = tokenizer_of("bpe")
    content = json.loads(tokenizer.to_str())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    random = TOKENIZERS["file"](TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json")), [])
    text = [("train", prose(n)) for n in range(20)]
    plain, first, again = (
        [tokens.tolist() for _, _, tokens in encoded(kind, find_bos(kind), text)]
        for kind in (tokenizer, random, random)
    )
    assert plain == first == again
    rows, notes = tmp_path / "rows.jsonl", []
    rows.write_text("".join(json.dumps({"text": prose(n)}) + "\n" for n in range(60)))
    prepare(
        files("tokenizer=file", f"tokenizer.path={tmp_path}/tokenizer.json", path=rows),
        notice=notes.append,
    )
    assert any("the tokenizer has dropout=0.5: it is off here" in note for note in notes)


def test_a_vocabulary_with_holes_counts_to_its_largest_number():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    assert vocab_size(tokenizer) == 70_001 and byte_lengths(tokenizer) is None


def word_level(path):
    """Return a tokenizer of one-letter words that loses the text between them."""
    vocabulary = {letter: n for n, letter in enumerate(["[UNK]", *"abcdefgh", "<s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path))
    return TokenizerConfig(kind="file", path=str(path))


def test_a_document_is_named_if_its_unknown_words_become_the_bos():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    refuses(
        r"the test document that begins with 'a b' into '<s>'",
        list,
        encoded(tokenizer, 0, [("train", "a a"), ("test", "a b")]),
    )


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x80\x81"])
def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    refuses(
        r"tokenizer\.path=.*tokenizer\.json.*tokenizer=bpe",
        TOKENIZERS["file"],
        TokenizerConfig(kind="file", path=str(path)),
        [],
    )


def test_a_tokenizer_is_held_to_its_fingerprint():
    tokenizer = tokenizer_of("bpe")
    content = tokenizer.to_str(pretty=True).encode()
    assert module.tokenizer_in(content, "it", module.fingerprint(tokenizer)).to_str() == tokenizer.to_str()
    refuses("it is not the tokenizer that the run was trained with", module.tokenizer_in, content, "it", "0" * 64)
