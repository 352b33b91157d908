"""Which split a document goes to: decided by a hash of its text.

So it is the same on every machine and in any order of reading, and two copies of a document never stand on both sides.
"""

from __future__ import annotations

from hashlib import sha256

SPLITS = ("train", "validation", "test")
WHOLE = "whole"  # a text that is scored and was not split


def tuning_split(split: str, document: bytes, fraction: float) -> str | None:
    """The split that a document of `split` has in a text to tune by, which holds out `fraction` of train.

    None where it is not in that text: what others are scored on is not read. With a fraction of 0, `split`.
    """
    if fraction == 0:
        return split
    return split_of(b"tuning\0" + document, {"validation": fraction}) if split == "train" else None


def split_of(document: bytes, fractions: dict[str, float]) -> str:
    """The split of a document (UTF-8): each of `fractions` gets about its part of all documents, train the rest.

    Example: `split_of(text.encode(), {"validation": 0.05, "test": 0.1})`.
    """
    draw = int.from_bytes(sha256(document).digest()[:8], "big") / 2**64
    for name, fraction in fractions.items():
        if draw < fraction:
            return name
        draw -= fraction
    return "train"
