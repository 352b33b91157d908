"""How much of the held-out text also occurs in train: the share of its 13-grams of words, by document.

The hashes of the held-out grams are held in memory; train streams past them. Measured once, when a corpus is made, and
kept in its manifest:

    "overlap": {"words": 13, "one_in": 1, "splits": {"validation": {
        "grams": 52_113,             # looked up (one in `one_in`, chosen by their hashes, where there are very many)
        "share": 0.0018,             # of these, how many occur in train
        "documents_above": 0,        # documents with a share above `WARN_ABOVE`
        "worst": [{"name": ..., "grams": ..., "share": ...}, ...]}, "test": ...}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posbench.data.grams import WORDS, Hashes, gram_hashes
from posbench.data.shards import Corpus, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WARN_ABOVE = 0.05  # of the 13-grams
MOST_GRAMS = 1 << 24  # held in memory: 128 MiB
_MOST_NAMED = 5  # documents
_FEWEST_GRAMS = 100  # of a document that is named: of shorter ones the share says little
_BLOCK = 1 << 20  # tokens that are turned back into text at a time
_FILTER_BITS = 26  # a table of 64 MiB that tells of most grams at once that they are not held out

Name = Callable[[str, int, str], str]  # split, number of the document, its text -> what to call it
Shares = dict[str, float]  # split -> how much of it occurs in train


def measure_overlap(tokenizer: Tokenizer, splits: Mapping[str, Split], name: Name) -> dict[str, Any]:
    """What the manifest holds about the splits that are not train."""
    held_out = {key: split for key, split in splits.items() if key != "train" and split.num_documents}
    one_in = 1
    grams: dict[str, list[Hashes]] = {key: [] for key in held_out}
    for key, split in held_out.items():
        for number in range(split.num_documents):
            grams[key].append(_sampled(gram_hashes("".join(texts(tokenizer, split.document(number)))), one_in))
            while sum(len(each) for of_split in grams.values() for each in of_split) > MOST_GRAMS:
                one_in *= 2
                grams = {k: [_sampled(each, one_in) for each in of_split] for k, of_split in grams.items()}
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *(each for some in grams.values() for each in some)]))
    in_train = _seen(known, tokenizer, splits["train"], one_in)
    measured = {}
    for key, split in held_out.items():
        hits = np.array([int(in_train[np.searchsorted(known, each)].sum()) for each in grams[key]])
        totals = np.array([len(each) for each in grams[key]])
        shares = hits / np.maximum(totals, 1)
        long_enough = np.flatnonzero(totals >= _FEWEST_GRAMS)
        worst = long_enough[np.argsort(-shares[long_enough], kind="stable")][:_MOST_NAMED]
        measured[key] = {
            "grams": int(totals.sum()),
            "share": float(hits.sum() / max(1, totals.sum())),
            "documents_above": int((shares[long_enough] > WARN_ABOVE).sum()),
            "worst": [
                {
                    "name": name(key, int(n), next(texts(tokenizer, split.document(n)), "")),
                    "grams": int(totals[n]),
                    "share": float(shares[n]),
                }
                for n in worst
            ],
        }
    return {"words": WORDS, "one_in": one_in, "splits": measured}


def overlap_between(trained_on: Corpus, held_out: Corpus) -> Shares:
    """How much of the held-out splits of one text occurs in the train split of another; they share a tokenizer."""
    splits = {split.name: split for split in (held_out.validation, held_out.test)}
    measured = measure_overlap(
        held_out.tokenizer, {**splits, "train": trained_on.train}, lambda split, number, text: f"document {number:,}"
    )
    return {name: split["share"] for name, split in measured["splits"].items()}


def parsed_shares(content: Any) -> Shares:
    """Shares as they were stored. Raises: ValueError where these are none."""
    if not isinstance(content, dict) or not all(isinstance(share, float) for share in content.values()):
        raise ValueError("it holds no shares")
    return dict(content)


def texts(tokenizer: Tokenizer, document: NDArray[Any]) -> Iterator[str]:
    """The text of a document's tokens (its BOS first), a block at a time."""
    for start in range(1, len(document), _BLOCK):
        yield tokenizer.decode(document[start : start + _BLOCK].tolist(), skip_special_tokens=False)


def _sampled(hashes: Hashes, one_in: int) -> Hashes:
    """Those of one in `one_in` possible hashes (a power of two), the same ones in every text."""
    return hashes[(hashes >> np.uint64(32)) & np.uint64(one_in - 1) == 0] if one_in > 1 else hashes


def _seen(known: Hashes, tokenizer: Tokenizer, train: Split, one_in: int) -> NDArray[np.bool_]:
    """Which of the `known` hashes (ascending) are those of grams of the train text."""
    seen = np.zeros(len(known), bool)
    mask = np.uint64((1 << _FILTER_BITS) - 1)
    may_be_known = np.zeros(1 << _FILTER_BITS, bool)
    may_be_known[known & mask] = True
    for number in range(train.num_documents):
        for text in texts(tokenizer, train.document(number)):
            grams = _sampled(gram_hashes(text), one_in)
            grams = grams[may_be_known[grams & mask]]
            places = np.searchsorted(known, grams)
            inside = places < len(known)
            seen[places[inside][known[places[inside]] == grams[inside]]] = True
    return seen


def overlap_lines(overlap: Mapping[str, Any], data: str) -> list[str]:
    """What was measured, in lines to print: a table by split, the worst documents, and a warning where it is much."""
    if not overlap["splits"]:
        return []
    sampled = f", one in {overlap['one_in']} of them" if overlap["one_in"] > 1 else ""
    lines = [f"held-out text that also occurs in train, in sequences of {overlap['words']} words{sampled}:"]
    for key, split in overlap["splits"].items():
        above = f"{split['documents_above']:,} documents above {WARN_ABOVE:.0%}"
        lines.append(f"{key:<10} {split['share']:>7.2%} of {split['grams']:>12,}   {above}")
        lines += [f"           {worst['share']:>7.1%} of {worst['name']}" for worst in split["worst"] if worst["share"]]
    return [*lines, *overlap_warning(overlap, data)]


def overlap_warning(overlap: Mapping[str, Any], data: str) -> list[str]:
    """One line where more than `WARN_ABOVE` of a split's text also occurs in train, else none."""
    much = [f"{split['share']:.1%} of {key}" for key, split in overlap["splits"].items() if split["share"] > WARN_ABOVE]
    if not much:
        return []
    return [
        f"warning: data={data}: {' and '.join(much)} also occur{'s' * (len(much) == 1)} in train (more than "
        f"{WARN_ABOVE:.0%}), so a low loss there is partly memory: remove copies of documents, or keep them in one "
        "split (posbench prepare names the worst documents)"
    ]
