"""Score n-gram models on the text that an experiment's models read, which gives losses a scale.

    python -m benchmarks.ngrams runs/mine                   losses of orders 2, 3 and 5 for each seed, nats per token
    python -m benchmarks.ngrams runs/reference/headline     those that its pack holds

The n-gram models see what a run's model saw: an n-gram never crosses the border of a training window of
`train.context_length` + 1 tokens, nor a target's context the border of the scored window. Text counts once, even if
several epochs or overlapping windows contain it. BOS can be in the context and is not a target. Scored are the windows
of the run's last validation.

The models are interpolated modified Kneser-Ney (Chen & Goodman 1998, TR-10-98, section 3): three discounts per order.
For a context h of n - 1 tokens, whose last n - 2 are h':

    p_n(w | h) = (c(h w) - D(c(h w))) / c(h .)  +  (sum over v of D(c(h v))) / c(h .)  *  p_(n-1)(w | h')

D is the discount, and c(h .) is the sum of c over all next tokens. In the highest order of a model, c counts how often
h w was read; in lower orders, how many different tokens were read before h w. p_0 is 1 / V, V being the vocabulary
size, and after a context that was never read, p_n is p_(n-1). A target with only k < n - 1 tokens before it in its
window is predicted by the model of order k + 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config, ConfigError
from posbench.data import Corpus, prepare
from posbench.data.dataset import chained
from posbench.evaluation.protocols.validation import Validation
from posbench.evaluation.windows import tabulate_windows
from posbench.runs import Run, find_runs

ORDERS = (2, 3, 5)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_FALLBACK = (0.5, 1.0, 1.5)  # discounts if too few n-grams were read to estimate them, as in KenLM
_UNKNOWN = -1  # the number of an n-gram that was never read, or that begins before its window


def losses_of(run: Run) -> dict[int, float]:
    """Return {order: loss in nats per token}, stored with the run or counted now.

    Raises: ConfigError if this version would choose other batches.
    """
    stored = [result for result in run.results()[0] if result.protocol == "ngram"]
    if stored:
        return {int(order): loss for order, loss in stored[0].header["losses"].items()}
    config, corpus = run.config, prepare(run.config)
    starts, batches = windows_read(config, corpus)
    if batches != run.manifest.fingerprints.batches:
        raise ConfigError(f"{run.name} was trained on other batches: give its text and its version of posbench")
    length, validation = config.train.context_length, Validation()
    tokens, depths = text_read(corpus.train.tokens, starts, length, max(ORDERS))
    windows = validation.windows(corpus.validation, length, validation.settings(config), anchor=length)
    window_tokens = np.stack([corpus.validation.tokens[w.start : w.start + w.length + 1] for w in windows])
    probabilities = KneserNey(tokens, depths, corpus.vocab_size, max(ORDERS)).probabilities(
        window_tokens.astype(np.int64)
    )
    losses = {}
    for order in ORDERS:
        table = tabulate_windows(-np.log(probabilities[order]), windows, corpus.validation, corpus.bos_id)
        losses[order] = float(table["nll"].sum() / table["targets"].sum())
    return losses


def holders(place: str | Path) -> list[Run]:
    """Return a finished run for each different batches of these runs: one that holds a result, if any does."""
    chosen: dict[str | None, Run] = {}
    for run in find_runs(place):
        batches = run.manifest.fingerprints.batches
        holds_result = any(key.protocol == "ngram" for key in run.evaluated())
        if run.is_finished and (batches not in chosen or holds_result):
            chosen[batches] = run
    return list(chosen.values())


def main() -> None:
    """Print the losses for each seed of the experiments on the command line."""
    for run in chain.from_iterable(map(holders, sys.argv[1:])):
        losses = ", ".join(f"{loss:.4f} (n={order})" for order, loss in losses_of(run).items())
        print(f"{run.experiment_folder}, seed {run.manifest.seed}, {run.manifest.tokens:,} tokens: {losses}")


def windows_read(config: Config, corpus: Corpus) -> tuple[Ints, str]:
    """Return the different starts of a run's training windows, ascending, and the fingerprint of its batches."""
    batches = corpus.batches(config.train, config.seed)
    starts: set[int] = set()
    batches_digest = ""
    for n in range(config.train.num_steps):
        starts.update(batches.starts(n))
        batches_digest = chained(batches_digest, batches.batch(n))
    return np.array(sorted(starts), np.int64), batches_digest[:16]


def text_read(tokens: NDArray[np.integer], starts: Ints, context_length: int, longest: int) -> tuple[Ints, Ints]:
    """Return the tokens that are in any of the training windows, in the order of the text, each position once.

    Arguments: starts, the windows', ascending; context_length, a window's tokens less one; longest, the order of the
    longest n-grams.
    Returns: the tokens [N], and the depth of each [N]: its place, counted from 1, in the earliest window that has it,
    but at most `longest`.
    """
    columns = np.arange(context_length + 1)
    indices = starts[:, None] + columns
    # Text counts once, even if several epochs or overlapping windows contain it: in the first window that has it, which
    # reaches furthest back from it. No token is before the first window, so its previous end is -1.
    previous_ends = np.concatenate([[-1], starts[:-1] + context_length])
    is_new = indices > previous_ends[:, None]
    depths = np.broadcast_to(np.minimum(columns + 1, longest), indices.shape)
    return tokens[indices[is_new]].astype(np.int64), depths[is_new]


class KneserNey:
    """The n-grams of a text, and the probabilities that models of order 2 to `longest` give to a target."""

    def __init__(self, tokens: Ints, depths: Ints, vocab_size: int, longest: int) -> None:
        """Count the n-grams of a text.

        Arguments: tokens [N]; depths [N], of `text_read`; vocab_size, V.
        """
        self.vocab_size, self.longest = vocab_size, longest
        # N-grams are exact, not hashed: the key of an n-gram is V times the number of its first n - 1 tokens (among all
        # that were read), plus its last token. Keys stay below 2^63.
        self._keys: dict[int, Ints] = {}  # order -> its n-grams, ascending: context * V + token
        self._highest: dict[int, _Level] = {}  # order -> level for a model's highest order, from counts of n-grams
        self._lower: dict[int, _Level] = {}  # order -> level for lower orders, from numbers of different tokens before
        shorter_numbers = tokens.astype(np.int64)  # number of the (order - 1)-gram that ends at each token
        num_shorter = vocab_size  # how many different ones there are
        contexts = np.zeros(vocab_size, np.int64)  # of each (order - 1)-gram, the number of its tokens before the last
        num_contexts = 1  # a single token has the empty context
        for order in range(2, longest + 1):
            # An n-gram counts if the depth of its last token is n or more, so it crosses no border of a window.
            ends = np.flatnonzero(depths >= order)
            keys, numbers, counts = np.unique(
                shorter_numbers[ends - 1] * vocab_size + tokens[ends], return_inverse=True, return_counts=True
            )
            suffixes = np.empty(len(keys), np.int64)  # an n-gram without its first token
            suffixes[numbers] = shorter_numbers[ends]
            continuations = np.bincount(suffixes, minlength=num_shorter)  # numbers of different tokens before
            self._lower[order - 1] = _Level.build(continuations, contexts, num_contexts)
            # The n-grams of this order are the shorter ones of the next.
            contexts, num_contexts, num_shorter = keys // vocab_size, num_shorter, len(keys)
            self._keys[order] = keys
            self._highest[order] = _Level.build(counts, contexts, num_contexts)
            shorter_numbers = np.full(len(tokens), _UNKNOWN, np.int64)
            shorter_numbers[ends] = numbers

    def probabilities(self, windows: Ints) -> dict[int, Floats]:
        """Return {order n: probabilities [W, T]} of all tokens but the first of windows [W, T + 1] of token ids."""
        targets = windows[:, 1:].astype(np.int64)
        empty, uniform = np.zeros_like(targets), np.full(targets.shape, 1 / self.vocab_size)
        lower = self._lower[1].mixed(empty, targets, uniform)
        ngrams_ending = windows.astype(np.int64)  # the number of the n-gram that ends at each token
        models = {1: lower}  # order -> the probabilities by the model of this order
        for order in range(2, self.longest + 1):
            contexts = ngrams_ending[:, :-1]
            ngrams = self._find(order, contexts, targets)
            model = self._highest[order].mixed(contexts, ngrams, lower)
            # The first targets have too few tokens before them in the window, so lower orders predict them.
            model[:, : order - 2] = models[order - 1][:, : order - 2]
            models[order] = model
            if order < self.longest:
                lower = self._lower[order].mixed(contexts, ngrams, lower)
            ngrams_ending = np.concatenate([np.full((len(windows), 1), _UNKNOWN), ngrams], axis=1)
        return {order: models[order] for order in range(2, self.longest + 1)}

    def _find(self, order: int, contexts: Ints, targets: Ints) -> Ints:
        # An n-gram's number is its index in the sorted keys of its order, _UNKNOWN if it was never read.
        keys = self._keys[order]
        if not len(keys):
            return np.full_like(targets, _UNKNOWN)
        sought = np.where(contexts == _UNKNOWN, _UNKNOWN, contexts * self.vocab_size + targets)
        numbers = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
        return np.where(keys[numbers] == sought, numbers, _UNKNOWN)


@dataclass(frozen=True)
class _Level:
    discounted: Floats  # [n-grams]: (c - D(c)) / c(h .)
    backoff: Floats  # [contexts]: the probability that remains for the lower order

    @classmethod
    def build(cls, counts: Ints, contexts: Ints, num_contexts: int) -> _Level:
        """Return the level of n-grams with these counts. Arguments: contexts, the number of each n-gram's context."""
        # Counts of 3 or more share a discount.
        subtracted = discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(contexts, counts, num_contexts)
        freed_mass = np.bincount(contexts, subtracted, num_contexts)
        # Nothing was read after this context: the lower order has all the weight.
        backoff: Floats = np.where(totals > 0, freed_mass / np.maximum(totals, 1), 1.0)
        return cls((counts - subtracted) / np.maximum(totals, 1)[contexts], backoff)

    def mixed(self, contexts: Ints, ngrams: Ints, lower: Floats) -> Floats:
        """Return p_n of targets. Arguments: contexts and ngrams, numbers or _UNKNOWN; lower, their p_(n-1)."""
        # No n-gram of this order was read.
        if not len(self.discounted):
            return lower.copy()
        # A context that was never read leaves all to the lower order.
        discounted = np.where(ngrams == _UNKNOWN, 0.0, self.discounted[ngrams])
        return np.where(contexts == _UNKNOWN, lower, discounted + self.backoff[contexts] * lower)


def discounts(counts: Ints) -> Floats:
    """Return the Kneser-Ney discounts of counts 0, 1, 2, and 3 or more, float64 [4], each between 0 and the count.

    Equation 26 of Chen & Goodman 1998 (TR-10-98); the last three are 0.5, 1 and 1.5 if any of the counts 1 to 4 does
    not occur.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == n)) for n in (1, 2, 3, 4))
    if not (n1 and n2 and n3 and n4):
        return np.array([0.0, *_FALLBACK])
    y = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return np.array([0.0, *np.clip(estimates, 0.0, (1.0, 2.0, 3.0))])


if __name__ == "__main__":
    main()
