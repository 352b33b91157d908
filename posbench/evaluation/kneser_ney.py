"""Interpolated Kneser-Ney, modified (Chen & Goodman 1998, TR-10-98, section 3): three discounts an order.

For a context h of n - 1 tokens, whose last n - 2 are h':

    p_n(w | h) = (c(h w) - D(c(h w))) / c(h .)  +  (sum over v of D(c(h v))) / c(h .)  *  p_(n-1)(w | h')

In the model's own order c is how often h w was read; below it, how many different tokens were read before h w. p_0 is
1 / V, and a context that was never read leaves all to h'. A target with only k < n - 1 tokens before it in its window
is predicted by the model of order k + 1, which is the best that these counts can say there.

N-grams are exact, not hashed: one is known by the number of its first n - 1 tokens among all that were read, times V,
plus its last token. That stays below 2^63.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_FALLBACK = (0.5, 1.0, 1.5)  # where too few n-grams were read to estimate discounts, as in KenLM
_UNKNOWN = -1  # the number of an n-gram that was never read, or that begins before its window


class KneserNey:
    """The n-grams of a text, and the probabilities that models of order 2 to `longest` give to a target."""

    def __init__(self, tokens: Ints, depths: Ints, vocab_size: int, longest: int) -> None:
        """Count.

        Arguments: tokens [N], the text; depths [N], how many tokens up to and with this one stood together in a window
        that was read, so that an n-gram is counted there if that is n or more; vocab_size, V; longest, an order.
        """
        self.vocab_size, self.longest = vocab_size, longest
        self._keys: dict[int, Ints] = {}  # order -> its n-grams, ascending: context * V + token
        self._whole: dict[int, _Level] = {}  # order -> by how often an n-gram was read
        self._below: dict[int, _Level] = {}  # order -> by how many different tokens were read before it
        shorter, contexts, num_contexts = tokens.astype(np.int64), np.zeros(vocab_size, np.int64), 1
        num_shorter = vocab_size
        for order in range(2, longest + 1):
            ends = np.flatnonzero(depths >= order)
            keys, numbers, counts = np.unique(
                shorter[ends - 1] * vocab_size + tokens[ends], return_inverse=True, return_counts=True
            )
            suffixes = np.empty(len(keys), np.int64)  # an n-gram without its first token
            suffixes[numbers] = shorter[ends]
            befores = np.bincount(suffixes, minlength=num_shorter)
            self._below[order - 1] = _Level.of(befores, contexts, num_contexts)
            contexts, num_contexts, num_shorter = keys // vocab_size, num_shorter, len(keys)
            self._keys[order], self._whole[order] = keys, _Level.of(counts, contexts, num_contexts)
            shorter = np.full(len(tokens), _UNKNOWN, np.int64)
            shorter[ends] = numbers

    def probabilities(self, windows: Ints) -> dict[int, Floats]:
        """Order -> the probability of each target in its context: [W, T] of windows [W, T + 1], all but the first."""
        targets = windows[:, 1:].astype(np.int64)
        empty, uniform = np.zeros_like(targets), np.full(targets.shape, 1 / self.vocab_size)
        lower = self._below[1].mixed(empty, targets, uniform)
        numbers, models = windows.astype(np.int64), {1: lower}  # numbers: of the n-gram that ends at each token
        for order in range(2, self.longest + 1):
            contexts = numbers[:, :-1]
            found = self._find(order, contexts, targets)
            model = self._whole[order].mixed(contexts, found, lower)
            model[:, : order - 2] = models[order - 1][:, : order - 2]  # the context is cut off by the window
            models[order] = model
            if order < self.longest:
                lower = self._below[order].mixed(contexts, found, lower)
            numbers = np.concatenate([np.full((len(windows), 1), _UNKNOWN), found], axis=1)
        return {order: models[order] for order in range(2, self.longest + 1)}

    def _find(self, order: int, contexts: Ints, targets: Ints) -> Ints:
        """The number of the n-gram of each context and target."""
        keys = self._keys[order]
        if not len(keys):
            return np.full_like(targets, _UNKNOWN)
        wanted = np.where(contexts == _UNKNOWN, _UNKNOWN, contexts * self.vocab_size + targets)
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[places] == wanted, places, _UNKNOWN)


@dataclass(frozen=True)
class _Level:
    """One order as numbers: what an n-gram has of its own, and what its context leaves to the order below."""

    own: Floats  # [n-grams]: (c - D(c)) / c(h .)
    left: Floats  # [contexts]: the rest of 1

    @classmethod
    def of(cls, counts: Ints, contexts: Ints, num_contexts: int) -> _Level:
        """Arguments: counts [n-grams], which may be 0; contexts [n-grams], the number of each one's context."""
        taken = discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(contexts, counts, num_contexts)
        left: Floats = np.where(totals > 0, np.bincount(contexts, taken, num_contexts) / np.maximum(totals, 1), 1.0)
        return cls((counts - taken) / np.maximum(totals, 1)[contexts], left)

    def mixed(self, contexts: Ints, found: Ints, lower: Floats) -> Floats:
        """The probabilities of this order, on those of the order below."""
        if not len(self.own):
            return lower.copy()
        own = np.where(found == _UNKNOWN, 0.0, self.own[found])
        return np.where(contexts == _UNKNOWN, lower, own + self.left[contexts] * lower)


def discounts(counts: Ints) -> Floats:
    """What is taken from a count of 0, 1, 2, and 3 or more: equation 26 of the paper, at least 0, at most the count.

    Returns: float64 [4]. 0.5, 1 and 1.5 where no n-gram has a count of 1, of 2, of 3 or of 4.
    """
    ones, twos, threes, fours = (int(np.count_nonzero(counts == n)) for n in (1, 2, 3, 4))
    if not (ones and twos and threes and fours):
        return np.array([0.0, *_FALLBACK])
    y = ones / (ones + 2 * twos)
    estimates = (1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes)
    return np.array([0.0, *np.clip(estimates, 0.0, (1.0, 2.0, 3.0))])
