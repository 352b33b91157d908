"""Measure how much of a text can be predicted by copying, which limits what long-range order can be worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.data.text.corpus import Split

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
