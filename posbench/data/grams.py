"""Text as hashes of its 13-grams of words, and the documents that share them.

A word is a run of letters, digits and underscores, with its case; every character beyond ASCII counts as a letter.
13 words in a row are the unit by which GPT-3 looked for test text in its training text (Brown et al. 2020, appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.data.tokenization import pieces

Hashes = NDArray[np.uint64]

WORDS = 13
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_IS_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_" for byte in range(256)])
_NEIGHBOURS = 8  # documents beside it in the list of a gram that each document is compared with


def gram_hashes(text: str) -> Hashes:
    """A hash of every 13 words in a row of `text`, in their order, uint64 [words - 12] (empty for shorter text)."""
    words = np.concatenate([_word_hashes(piece.encode()) for piece in pieces(text)])
    count = len(words) - WORDS + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    grams = np.zeros(count, np.uint64)
    for n in range(WORDS):
        grams = _mixed(grams * _BASE + words[n : n + count])
    return grams


def _word_hashes(data: bytes) -> Hashes:
    """Of each word: the polynomial of its bytes in `_BASE`, modulo 2^64."""
    bytes_ = np.frombuffer(data, np.uint8)
    inside = np.concatenate(([False], _IS_WORD[bytes_], [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, ends = edges[::2], edges[1::2]
    powers = np.cumprod(np.full(len(bytes_), _BASE))  # wraps around
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(powers * (bytes_ + np.uint64(1)))))
    inverses = np.cumprod(np.full(len(bytes_) + 1, _INVERSE))
    return _mixed((sums[ends] - sums[begins]) * inverses[begins])


def _mixed(hashes: Hashes) -> Hashes:
    """Every bit spread over all bits (the end of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def families(documents: Sequence[Hashes], share: float) -> list[int]:
    """Documents in groups of near-duplicates: for each document the number of the first one of its group.

    Two documents are siblings if more than `share` of the distinct grams of the smaller one stand in the other. A group
    holds the siblings of its members. A gram that many documents hold is looked at in neighbouring ones only, which
    costs little and loses nothing but links between documents that are linked through others.
    """
    distinct = [np.unique(grams) for grams in documents]
    sizes = np.array([len(grams) for grams in distinct])
    grams = np.concatenate(distinct)
    owners = np.repeat(np.arange(len(documents)), sizes)
    order = np.argsort(grams, kind="stable")
    grams, owners = grams[order], owners[order]
    pairs = [
        owners[:-lag][same] * len(documents) + owners[lag:][same]
        for lag in range(1, _NEIGHBOURS + 1)
        for same in [grams[:-lag] == grams[lag:]]
    ]
    codes, shared = np.unique(np.concatenate(pairs), return_counts=True)
    firsts, seconds = codes // len(documents), codes % len(documents)
    siblings = shared > share * np.minimum(sizes[firsts], sizes[seconds])
    heads = list(range(len(documents)))
    for first, second in zip(firsts[siblings].tolist(), seconds[siblings].tolist(), strict=True):
        low, high = sorted((_head(heads, first), _head(heads, second)))
        heads[high] = low
    return [_head(heads, number) for number in range(len(documents))]


def _head(heads: list[int], number: int) -> int:
    while heads[number] != number:
        number = heads[number]
    return number
