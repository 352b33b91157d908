"""Text to numbers: a registry of tokenizers, each a `tokenizers.Tokenizer`, so that one `tokenizer.json` says it all.

Ordinary text never becomes a special token: a document that spells out the beginning-of-document token (BOS) is encoded
letter by letter. BOS stands before each document because training puts it there, and for no other reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from posbench.config import ConfigError, TokenizerConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = "<|bos|>"
# A foreign tokenizer's own name for BOS; where it has none, the token that ends documents serves, as in GPT-2.
_BOS_NAMES = ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]")

_CONVERT = (
    "transformers converts a sentencepiece .model or a .tiktoken file to one: "
    "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('OUT')"
)
HUB_SECONDS = 5.0  # for the hub to answer one question: its downloads would retry for half a minute
MOST_UNKNOWN = 0.1  # of the tokens of a text, beyond which it is refused

PIECE_CHARACTERS = (
    1 << 16
)  # long documents are encoded in pieces of about this size: bounded memory, and work for every core


def train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE trained on `texts`: BOS, the 256 bytes, and as many merges as `vocab_size` leaves room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def plain_bytes(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Token b is byte b; BOS is 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS])
    return tokenizer


def file_content(config: TokenizerConfig) -> bytes:
    """What stands in `tokenizer.path`. Raises: ConfigError where it cannot be read."""
    try:
        return Path(str(config.path)).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home; ValueError: no such path can be
        raise ConfigError(
            f"tokenizer.path={config.path!r} cannot be read ({error}): give the path of a tokenizer.json, "
            "or use tokenizer=bpe"
        ) from error


def read_file(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """An existing `tokenizer.json`. Raises: ConfigError where it is missing or is none."""
    return _adapted(_parsed(file_content(config), f"tokenizer.path={config.path!r}"))


def _adapted(tokenizer: Tokenizer) -> Tokenizer:
    """Without what would cut or fill documents, and with a BOS."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if find_bos(tokenizer) is None:
        tokenizer.add_special_tokens([BOS])
    return tokenizer


def read_hub(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The `tokenizer.json` of a repository of the Hugging Face hub.

    Raises: ConfigError where there is none, or the hub cannot be reached and its cache has none either.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub import errors as hub_errors

    named, repository, is_reachable = f"tokenizer.name={config.name!r}", str(config.name), True
    try:
        HfApi().model_info(repository, revision=config.revision, timeout=HUB_SECONDS)
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        raise ConfigError(
            f"{constants.ENDPOINT} has no repository {config.name!r} at revision {config.revision!r} (or it asks for a "
            "login: hf auth login): check tokenizer.name and tokenizer.revision"
        ) from error
    except Exception:  # the HTTP client's own kinds; its cache may have the file
        is_reachable = False
    try:
        path = hf_hub_download(
            repository, "tokenizer.json", revision=config.revision, local_files_only=not is_reachable
        )
    except hub_errors.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"the Hugging Face hub cannot be reached ({constants.ENDPOINT}), and {named} is not in its cache: connect, "
            "set HF_ENDPOINT to a mirror, or use a file: tokenizer=file tokenizer.path=.../tokenizer.json"
        ) from error
    except hub_errors.EntryNotFoundError as error:
        raise ConfigError(f"the repository of {named} has no tokenizer.json: {_CONVERT}") from error
    return _adapted(_parsed(Path(path).read_bytes(), named))


TOKENIZERS: dict[str, Callable[[TokenizerConfig, Iterable[str]], Tokenizer]] = {
    "bpe": train_bpe,
    "bytes": plain_bytes,
    "file": read_file,
    "hub": read_hub,
}


def load_tokenizer(path: Path, expected: str | None = None) -> Tokenizer:
    """`tokenizer_in` a file. Raises: ConfigError where it cannot be read, is none, or another tokenizer's."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the tokenizer {path} cannot be read ({error.strerror or error}): restore it") from error
    return tokenizer_in(content, str(path), expected)


def tokenizer_in(content: bytes, named: str, expected: str | None = None) -> Tokenizer:
    """The tokenizer of a corpus or a run, set so that text cannot spell special tokens (its file does not say so).

    Arguments: named, for messages; expected, the fingerprint that it must have.
    Raises: ConfigError where the content is none, or another tokenizer's.
    """
    tokenizer = _parsed(content, named)
    if expected is not None and fingerprint(tokenizer) != expected:
        raise ConfigError(
            f"{named} is not the tokenizer that the run was trained with (fingerprint {expected[:12]}, this one's is "
            f"{fingerprint(tokenizer)[:12]}): restore the run's own"
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def _parsed(content: bytes, named: str) -> Tokenizer:
    """What a `tokenizer.json` holds, if it gives a text the same tokens every time. Raises: ConfigError."""
    from tokenizers import Tokenizer

    try:
        with panics_explained(named):
            tokenizer = Tokenizer.from_buffer(content)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{named} is not a tokenizer.json of the tokenizers library ({str(error)[:200]}): save one with "
            f"Tokenizer.save, or use tokenizer=bpe ({_CONVERT})"
        ) from error
    if getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"{named} chooses its merges at random (model.dropout={tokenizer.model.dropout:g}), so a text has other "
            'tokens each time:  set "dropout" to null in that file'
        )
    return tokenizer


@contextmanager
def panics_explained(named: str) -> Iterator[None]:
    """Raise a ConfigError about the tokenizer `named` where its library panics, on a pattern of too many ways, say."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which is no Exception and can be imported from nowhere
            raise
        raise ConfigError(
            f"{named} cannot tokenize this text ({str(error)[:200]}): simplify its patterns, or use tokenizer=bpe"
        ) from None


@dataclass(frozen=True)
class Loss:
    """What a tokenizer loses of a text."""

    unknown: float  # the share of tokens that stand for what it does not know
    changed: float  # the share of documents that decoding does not give back, a leading space aside

    def describe(self, named: str) -> str:
        """A line for a person, empty where nothing is lost."""
        if not self.unknown and not self.changed:
            return ""
        return (
            f"{named} does not give this text back: {self.unknown:.2%} of its tokens are unknown, and "
            f"{self.changed:.0%} of the documents come back changed (case, accents or whitespace). Losses are of the "
            "changed text, so they cannot be compared with those of other tokenizers, not even in bits per byte"
        )


def loss_of(tokenizer: Tokenizer, texts: Iterable[str], named: str) -> Loss:
    """What is lost of these texts. Raises: ConfigError where more than a tenth of the tokens are unknown."""
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id") if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    changed, documents, unknowns, tokens = 0, 0, 0, 0
    for text in texts:
        with panics_explained(named):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        documents += 1
        tokens += len(ids)
        unknowns += ids.count(unknown) if unknown is not None else 0
        changed += tokenizer.decode(ids, skip_special_tokens=False).removeprefix(" ") != text.removeprefix(" ")
    loss = Loss(unknowns / max(1, tokens), changed / max(1, documents))
    if loss.unknown > MOST_UNKNOWN:
        raise ConfigError(
            f"{named} does not know {loss.unknown:.0%} of the tokens of this text: choose text that it covers, or "
            "train with another tokenizer, such as tokenizer=bpe"
        )
    return loss


def find_bos(tokenizer: Tokenizer) -> int | None:
    """The id of the special token that stands before a document, or None where the tokenizer has none fit for it."""
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return next((special[name] for name in (*_BOS_NAMES, *_EOS_NAMES) if name in special), None)


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id (a foreign vocabulary may have holes)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of the content of its `tokenizer.json`."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about `PIECE_CHARACTERS`, which encode to the same tokens as the whole.

    A cut falls before a space that follows a visible character: no tokenizer in use joins the two, so neither piece
    sees a difference. Text without spaces is cut before a line break, and text without either where the piece is full:
    a token border may then lie where the whole text would have none, and nothing is lost.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, low: int, high: int) -> int:
    for space in (" ", "\n"):
        place = text.rfind(space, low, high)
        while place > low:
            if not text[place - 1].isspace():
                return place
            place = text.rfind(space, low, place)
    return high


def byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int32] | None:
    """Bytes of text each token of a byte-level vocabulary stands for, [V], special tokens 0. None for other kinds."""
    if (json.loads(tokenizer.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    letters = set(_byte_letters())
    lengths = np.zeros(vocab_size(tokenizer), np.int32)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if not letters.issuperset(token):
            return None
        lengths[number] = len(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _byte_letters() -> list[str]:
    """The letter by which a byte-level vocabulary writes each of the 256 bytes (Radford et al. 2019, GPT-2).

    Printable Latin-1 characters stand for themselves, the others in order for the code points from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters, others = [], iter(range(256, 512))
    for byte in range(256):
        letters.append(chr(byte if byte in printable else next(others)))
    return letters
