"""Measure how much of the held-out text also occurs in train: the share of its 13-grams of words, by document.

GPT-3 also used 13 words in a row (Brown et al. 2020, appendix C). The result is stored with the corpus:

    "overlap": {"words": 13, "splits": {"validation": {
        "grams": 52_113,             # looked up
        "share": 0.0018,             # the share of these that also occur in train
        "documents_above": 0,        # documents with a share above `WARN_ABOVE`
        "worst": [{"name": ..., "grams": ..., "share": ...}, ...]}, "test": ...}}

Measured too: how much of a text can be predicted by copying earlier text, which limits what long-range order can be
worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from posbench.data.text.corpus import Corpus, Split
from posbench.data.text.tokenizer import pieces
from posbench.system.files import read_json, write_json

Hashes = NDArray[np.uint64]

GRAM_WORDS = 13
WARN_ABOVE = 0.05  # share of the 13-grams
_MOST_NAMED = 5  # how many documents are listed as worst, at most
_FEWEST_GRAMS = 100  # grams of a listed document, at least: the share of a shorter one says little
_BLOCK = 1 << 20  # tokens that are turned back into text at a time
_FILTER_BITS = 26  # a table of 64 MiB quickly rules out most grams that are not held out
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
# A word is a sequence of letters, digits and underscores, with its case; every character beyond ASCII is a letter.
_IS_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_" for byte in range(256)])
FAMILY_SHARE = 0.02  # two documents that share more of the smaller one's grams go to the same split
_NEIGHBOURS = 8  # how many documents that follow it in a gram's list a document is compared with


def gram_hashes(text: str) -> Hashes:
    """Return a hash of every 13 successive words, in order, uint64 [words - 12] (empty for shorter text)."""
    words = np.concatenate([_word_hashes(piece.encode()) for piece in pieces(text)])
    count = max(0, len(words) - GRAM_WORDS + 1)
    grams = np.zeros(count, np.uint64)
    for n in range(GRAM_WORDS):
        grams = _mixed(grams * _BASE + words[n : n + count])
    return grams


def _word_hashes(data: bytes) -> Hashes:
    """Return a hash of each word of a text in UTF-8, in order."""
    bytes_ = np.frombuffer(data, np.uint8)
    inside = np.concatenate(([False], _IS_WORD[bytes_], [False]))
    # Where a word begins or ends, in turn.
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, ends = edges[::2], edges[1::2]
    # The polynomial of the word's bytes in `_BASE`, modulo 2^64: a difference of two prefix sums, divided by a power.
    powers = np.cumprod(np.full(len(bytes_), _BASE))  # wraps around
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(powers * (bytes_ + np.uint64(1)))))
    inverses = np.cumprod(np.full(len(bytes_) + 1, _INVERSE))
    return _mixed((sums[ends] - sums[begins]) * inverses[begins])


def _mixed(hashes: Hashes) -> Hashes:
    # The last step of splitmix64: every bit spreads over all bits.
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def near_duplicates(documents: Sequence[Hashes], share: float = FAMILY_SHARE) -> list[int]:
    """Return for each document the index of the first document of its group of near-duplicates.

    Two documents are linked if more than `share` of the distinct grams of the smaller one are also in the other; a
    group contains everything that is linked to a member. Arguments: documents, the hashes of each document's 13-grams.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    distinct = [np.unique(grams) for grams in documents]
    sizes = np.array([len(grams) for grams in distinct])
    grams = np.concatenate(distinct)
    holders = np.repeat(np.arange(len(documents)), sizes)
    order = np.argsort(grams, kind="stable")
    grams, holders = grams[order], holders[order]
    pairs = []  # of documents with one gram in common, as one number per pair
    # Documents that contain the same common gram are only compared with the next few of them, to save time.
    for lag in range(1, _NEIGHBOURS + 1):
        is_same = grams[:-lag] == grams[lag:]  # equal grams are neighbours, because they are sorted
        pairs.append(holders[:-lag][is_same] * len(documents) + holders[lag:][is_same])
    codes, shared = np.unique(np.concatenate(pairs), return_counts=True)
    firsts, seconds = codes // len(documents), codes % len(documents)
    linked = shared > share * np.minimum(sizes[firsts], sizes[seconds])
    links = (np.ones(linked.sum()), (firsts[linked], seconds[linked]))
    _, groups = connected_components(coo_array(links, shape=(len(documents), len(documents))), directed=False)
    _, first_of_group = np.unique(groups, return_index=True)
    return first_of_group[groups].tolist()


def measure_overlap(tokenizer: Tokenizer, splits: Mapping[str, Split]) -> dict[str, Any]:
    """Return how much of the validation and test splits also occurs in train, as in `corpus.json`."""
    held_out = {key: split for key, split in splits.items() if key != "train" and split.num_documents}
    # The hashes of the held-out text stay in memory while the train text is streamed.
    grams = {}
    for key, split in held_out.items():
        documents = map(split.document, range(split.num_documents))
        grams[key] = [gram_hashes("".join(_decoded(tokenizer, document))) for document in documents]
    all_grams = chain.from_iterable(grams.values())
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *all_grams]))
    in_train = _in_train(known, tokenizer, splits["train"])
    measured = {}
    for key, split in held_out.items():
        hits = np.array([int(in_train[np.searchsorted(known, hashes)].sum()) for hashes in grams[key]])
        totals = np.array([len(hashes) for hashes in grams[key]])
        shares = hits / np.maximum(totals, 1)
        long_enough = np.flatnonzero(totals >= _FEWEST_GRAMS)
        worst = long_enough[np.argsort(-shares[long_enough], kind="stable")][:_MOST_NAMED]
        worst_documents = []
        for n in worst.tolist():
            opening = tokenizer.decode(split.document(n)[1:100].tolist())
            text = " ".join(opening.split())
            name = f"document {n:,}, which begins {text[:60]!r}"
            worst_documents.append({"name": name, "grams": int(totals[n]), "share": float(shares[n])})
        measured[key] = {
            "grams": int(totals.sum()),
            "share": float(hits.sum() / max(1, totals.sum())),
            "documents_above": int((shares[long_enough] > WARN_ABOVE).sum()),
            "worst": worst_documents,
        }
    return {"words": GRAM_WORDS, "splits": measured}


def find_overlap(trained_on: Corpus, held_out: Corpus) -> dict[str, float]:
    """Return {split of `held_out` but train: share of its 13-grams that also occur in the train split of `trained_on`}.

    Both texts have the same tokenizer.
    """
    # Measured once, and stored with the held-out text.
    file = held_out.folder / f"overlap-{trained_on.folder.name}.json"
    with suppress(OSError, ValueError):
        return dict(read_json(file))
    splits = {"train": trained_on.train, **{split.name: split for split in (held_out.validation, held_out.test)}}
    measured = measure_overlap(held_out.tokenizer, splits)
    shares = {name: split["share"] for name, split in measured["splits"].items()}
    with suppress(OSError):  # if the cache cannot be written, measure again the next time
        write_json(file, shares)
    return shares


def _decoded(tokenizer: Tokenizer, document: NDArray[Any]) -> Iterator[str]:
    # Block by block, so that a long document needs little memory.
    for start in range(1, len(document), _BLOCK):
        yield tokenizer.decode(document[start : start + _BLOCK].tolist(), skip_special_tokens=False)


def _in_train(known: Hashes, tokenizer: Tokenizer, train: Split) -> NDArray[np.bool_]:
    """Return which of the hashes `known`, in ascending order, also occur in the train text."""
    is_in_train = np.zeros(len(known), bool)
    mask = np.uint64((1 << _FILTER_BITS) - 1)
    # Indexed by the last bits of a hash: a quick first test, before the search.
    may_be_known = np.zeros(1 << _FILTER_BITS, bool)
    may_be_known[known & mask] = True
    for number in range(train.num_documents):
        for text in _decoded(tokenizer, train.document(number)):
            grams = gram_hashes(text)
            grams = grams[may_be_known[grams & mask]]
            places = np.searchsorted(known, grams)
            inside = places < len(known)
            is_in_train[places[inside][known[places[inside]] == grams[inside]]] = True
    return is_in_train


def overlap_lines(overlap: Mapping[str, Any]) -> list[str]:
    """Return lines to print on how much held-out text also occurs in train."""
    if not overlap["splits"]:
        return []
    lines = [f"held-out text that also occurs in train, in sequences of {overlap['words']} words:"]
    for key, split in overlap["splits"].items():
        many = f"{split['documents_above']:,} documents above {WARN_ABOVE:.0%}"
        lines.append(f"{key:<10} {split['share']:>7.2%} of {split['grams']:>12,}   {many}")
        lines += [f"           {worst['share']:>7.1%} of {worst['name']}" for worst in split["worst"] if worst["share"]]
    return lines


MATCHES = (4, 8, 16)  # fewest tokens before the copied one that must match
DISTANCES = (8, 32, 64, 128)  # tokens; the copied token is further back than this
_TOKENS = 1 << 17  # tokens of the text to sample


def copied_share(split: Split, length: int) -> NDArray[np.float64]:
    """Return the share of tokens that copying earlier text predicts correctly, [len(MATCHES), len(DISTANCES)].

    The copier looks through the last `length` tokens for the longest match of the tokens just read, more than DISTANCES
    tokens back and at least MATCHES tokens long, and predicts the token after it.
    """
    size = min(2 * length, len(split.tokens))
    count = max(1, min(_TOKENS, len(split.tokens)) // size)
    # Sequences spread evenly over the split.
    starts = np.linspace(0, len(split.tokens) - size, count).astype(int)
    windows = split.tokens[starts[:, None] + np.arange(size)]
    hits = np.zeros((len(MATCHES), len(DISTANCES)), np.int64)
    distances = [distance for distance in DISTANCES if distance < length]
    for i, distance, longest, is_right in _copies(windows, length, distances):
        if i >= length:  # so that every predicted token has the whole length before it
            hits[:, DISTANCES.index(distance)] += [int((is_right & (longest >= least)).sum()) for least in MATCHES]
    return hits / max(1, count * (size - length))


def copied(windows: NDArray[np.integer], distance: int, least: int) -> NDArray[np.bool_]:
    """Return which tokens the copier predicts correctly from their own window, bool, as `windows` [N, tokens].

    Arguments: distance, tokens that the copied one is further back than; least, tokens that must match before it.
    """
    is_copied = np.zeros(windows.shape, bool)
    for i, _, longest, is_right in _copies(windows, windows.shape[1], [distance]):
        is_copied[:, i] = is_right & (longest >= least)
    return is_copied


def _copies(
    windows: NDArray[np.integer], length: int, distances: Sequence[int]
) -> Iterator[tuple[int, int, NDArray[np.int32], NDArray[np.bool_]]]:
    """Yield (i, distance, length of the longest match, is the prediction right) for token i of all windows, [N] each.

    The copier looks through the `length` tokens before i, more than `distance` tokens back. Tokens with nothing so far
    back are left out.
    """
    windows = windows.astype(np.int32)
    rows = np.arange(len(windows))
    matched = np.zeros(windows.shape, np.int32)  # tokens before position j that match those before i
    for i in range(1, windows.shape[1]):
        matched[:, 1 : i + 1] = np.where(windows[:, :i] == windows[:, i - 1 : i], matched[:, :i] + 1, 0)
        first = max(0, i - length)  # first position that the copier can see
        for distance in distances:
            count = i - distance - first  # positions that it may copy from
            if count <= 0:
                continue
            # A match cannot be longer than what the copier sees before it.
            visible = np.minimum(matched[:, first : first + count], np.arange(count, dtype=np.int32))
            nearest = count - 1 - visible[:, ::-1].argmax(axis=1)  # of several, the nearest counts
            is_right = windows[rows, first + nearest] == windows[:, i]
            yield i, distance, visible[rows, nearest], is_right


def copying_lines(split: Split, length: int) -> list[str]:
    """Return lines to print: bytes of an average token, and how many tokens a copier predicts."""
    size = split.num_bytes / max(1, split.num_tokens)
    share = copied_share(split, length)
    shown = [n for n, distance in enumerate(DISTANCES) if distance < length]
    lines = [
        f"a token is {size:.2f} bytes of text, a context of {length} tokens {length * size:.0f} bytes",
        f"tokens that a copier of the last {length} gets right, if it copies from more than",
        f"{'':<26}" + "".join(f"{f'{DISTANCES[n]} back':>10}" for n in shown),
    ]
    for least, shares in zip(MATCHES, share, strict=True):
        lines.append(f"{f'after {least} matching tokens':<26}" + "".join(f"{shares[n]:>10.2%}" for n in shown))
    return lines
