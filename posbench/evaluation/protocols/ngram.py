"""What a model of the last few tokens loses: Kneser-Ney models of the run's own batches, on its validation windows.

No trained model is asked, so all schemes of a seed share one result. It lies in the `eval/` folder of one of their
runs, with the fingerprint of the batches in its header.

A token and its context are what the run's model saw: an n-gram lies within one window of `train.context_length` + 1
tokens, and a target's context within the window that is scored. A stretch of text counts once, however many epochs or
overlapping windows brought it back. BOS stands in the context and is no target, as for the models.

The models are interpolated Kneser-Ney, modified (Chen & Goodman 1998, TR-10-98, section 3): three discounts an order.

For a context h of n - 1 tokens, whose last n - 2 are h':

    p_n(w | h) = (c(h w) - D(c(h w))) / c(h .)  +  (sum over v of D(c(h v))) / c(h .)  *  p_(n-1)(w | h')

In the model's own order c is how often h w was read; below it, how many different tokens were read before h w. p_0 is
1 / V, and a context that was never read leaves all to h'. A target with only k < n - 1 tokens before it in its window
is predicted by the model of order k + 1, which is the best that these counts can say there.

N-grams are exact, not hashed: one is known by the number of its first n - 1 tokens among all that were read, times V,
plus its last token. That stays below 2^63.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.data import Corpus, Split
from posbench.data.dataset import chained
from posbench.evaluation.protocols.protocol import EvalProtocol
from posbench.evaluation.protocols.windowed import Validation
from posbench.evaluation.windows import tabulate_windows
from posbench.runs import Run, find_runs
from posbench.runs.results import ResultKey
from posbench.system.console import Say

ORDERS = (2, 3, 5)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_FALLBACK = (0.5, 1.0, 1.5)  # where too few n-grams were read to estimate discounts, as in KenLM
_UNKNOWN = -1  # the number of an n-gram that was never read, or that begins before its window


class Ngram(EvalProtocol):
    """One row a window, document and order (n): the tokens that a model looks at, the predicted one included."""

    name = "ngram"
    rank = 7
    split: ClassVar[str] = "validation"
    columns: ClassVar[Mapping[str, tuple[str, str]]] = {"order": ("n of an n-gram model", "")}
    follows_lengths: ClassVar[bool] = False

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Split | None = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """None: it is not scored run by run."""
        return []

    def score(self, *_: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
        raise AssertionError("n-gram models are scored by `add_ngrams`")

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 0


def add_ngrams(runs: Sequence[Run], corpus_of: Callable[[Run], Corpus], notice: Say, again: bool = False) -> None:
    """Score what is lacking, once for all schemes of one seed; `notice` is called with a line that says so.

    A result lies in the first run of its batches in the experiment. Arguments: runs, finished; again, whether what is
    stored is scored once more.
    """
    done = set()

    @cache
    def finished_in(folder: Path) -> list[tuple[str | None, Run]]:  # each run.json is read once
        return [(run.manifest.fingerprints.batches, run) for run in find_runs(folder) if run.is_finished]

    for run in runs:
        folder, batches = run.path.parents[1], run.manifest.fingerprints.batches
        if run.manifest.continued or run.manifest.tokens > run.config.evaluation.ngram_tokens:
            continue  # one that continues another run read only a part of its batches itself
        if (folder, batches) in done:
            continue
        done.add((folder, batches))
        alike = [other for fingerprint, other in finished_in(folder) if fingerprint == batches]
        holder = next((other for other in alike if _has_ngrams(other)), run)
        if _has_ngrams(holder) and not again:
            continue
        which = f"{run.manifest.experiment}, seed {run.manifest.seed}"
        try:
            rows, header = ngram_scores(run, corpus_of(run))
        except ConfigError as why:
            notice(f"{which}: no n-gram models, because {why}")
            continue
        holder.store(ResultKey(Ngram.name, run.config.train.context_length), rows, header)
        shown = ", ".join(f"{loss:.4f}" for loss in header["losses"].values())
        orders, seconds = ", ".join(map(str, ORDERS)), header["seconds"]
        notice(f"{which}: Kneser-Ney {orders} on the same batches: {shown} nats/token ({seconds:.1f} s)")


def _has_ngrams(run: Run) -> bool:
    return any(key.protocol == Ngram.name for key in run.evaluated())


def ngram_scores(run: Run, corpus: Corpus) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rows and the header of all orders on the run's batches and validation windows.

    Raises: ConfigError where the run read other batches, or was validated on other windows, than would be chosen today.
    """
    config, manifest = run.config, run.manifest
    began = time.perf_counter()
    starts, batches = windows_read(config, corpus)
    if batches != manifest.fingerprints.batches:
        recorded = manifest.fingerprints.batches
        raise ConfigError(f"{run.name} was trained on other batches (fingerprint {recorded}, now {batches})")
    length = config.train.context_length
    tokens, depths = text_read(corpus.train.tokens, starts, length, max(ORDERS))
    probabilities = KneserNey(tokens, depths, corpus.vocab_size, max(ORDERS)).probabilities
    validation = Validation()
    windows = validation.windows(corpus.validation, length, validation.settings(config), length)
    read = np.stack([corpus.validation.tokens[w.start : w.start + w.length + 1] for w in windows]).astype(np.int64)
    losses = {order: -np.log(of_order) for order, of_order in probabilities(read).items()}
    tables = {o: tabulate_windows(losses[o], windows, corpus.validation, corpus.bos_id) for o in ORDERS}
    scored = ["document", "start", "targets", "bytes"]
    own = next((each.windows for each in run.results()[0] if each.key == ResultKey(validation.name, length)), None)
    if own is None or not np.array_equal(own[scored], tables[ORDERS[0]][scored]):
        raise ConfigError(f"{run.name} was validated on other windows or another text than this posbench would choose")
    means = {order: float(t["nll"].sum() / t["targets"].sum()) for order, t in tables.items()}
    targets, num_bytes = (int(own[name].sum()) for name in ("targets", "bytes"))
    longest = means[max(ORDERS)]
    return pd.concat([table.assign(order=order) for order, table in tables.items()], ignore_index=True), {
        "split": Ngram.split,
        "settings": {},
        "windows": len(windows),
        "documents": int(own["document"].nunique()),
        "targets_total": targets,
        "nll_mean": longest,
        "bits_per_byte": longest * targets / math.log(2) / num_bytes,
        "losses": {str(order): loss for order, loss in means.items()},
        "tokens": int((depths > 1).sum()),  # targets that were read, each once
        "batches": batches,
        "weights": manifest.weights,
        "seconds": round(time.perf_counter() - began, 2),
    }


def windows_read(config: Config, corpus: Corpus) -> tuple[Ints, str]:
    """Where the windows of a run begin, ascending, each once; and the fingerprint of its batches."""
    batches = corpus.batches(config.train, config.seed)
    starts: set[int] = set()
    chain = ""
    for n in range(config.train.num_steps):
        starts.update(batches.starts(n))
        chain = chained(chain, batches.batch(n))
    return np.array(sorted(starts), np.int64), chain[:16]


def text_read(tokens: NDArray[np.integer], starts: Ints, context_length: int, longest: int) -> tuple[Ints, Ints]:
    """The tokens that stand in any of the windows, in the order of the text, each once.

    Arguments: starts, ascending; longest, the most tokens that anybody looks back for.
    Returns: the tokens [N], and how many tokens up to and with each stand together in the window that reaches furthest
    back from it [N].
    """
    columns = np.arange(context_length + 1)
    places = starts[:, None] + columns
    ends_before = np.concatenate([[-1], starts[:-1] + context_length])
    is_new = places > ends_before[:, None]  # of the windows that hold a token the first reaches furthest back
    depths = np.broadcast_to(np.minimum(columns + 1, longest), places.shape)
    return tokens[places[is_new]].astype(np.int64), depths[is_new]


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
