"""Kneser-Ney models beside the trained ones: counted in the windows that a run read, scored where the run is scored.

A token and its context are what the run's model saw: an n-gram lies within one window of `train.context_length` + 1
tokens, and a target's context within the window that is scored. A stretch of text counts once, however many epochs or
overlapping windows brought it back. BOS stands in the context and is no target, as for the models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from posbench.config import Config, ConfigError
from posbench.data import Batches, Corpus
from posbench.data.batches import chained
from posbench.evaluation.kneser_ney import KneserNey
from posbench.evaluation.protocols import NGRAM, VALIDATION
from posbench.evaluation.windows import tabulate_windows
from posbench.runs import Run, find_runs
from posbench.runs.results import ResultKey, store

ORDERS = (2, 3, 5)

Ints = NDArray[np.int64]
Notice = Callable[[str], object]


def add_ngrams(runs: Sequence[Run], corpus_of: Callable[[Run], Corpus], notice: Notice, again: bool = False) -> None:
    """Score what is lacking, once for all schemes of one seed; `notice` is called with a line that says so.

    A result lies in the first run of its batches in the experiment. Arguments: runs, finished; again, whether what is
    stored is scored once more.
    """
    done = set()
    for run in runs:
        folder, batches = run.path.parents[1], run.manifest.fingerprints.batches
        if (folder, batches) in done or run.manifest.tokens > run.config.evaluation.ngram_tokens:
            continue
        done.add((folder, batches))
        beside = [
            each for each in find_runs(folder) if each.is_finished and each.manifest.fingerprints.batches == batches
        ]
        holder = next((each for each in beside if _has_ngrams(each)), run)
        if _has_ngrams(holder) and not again:
            continue
        which = f"{run.manifest.experiment}, seed {run.manifest.seed}"
        try:
            rows, header = ngram_scores(run, corpus_of(run))
        except ConfigError as why:
            notice(f"{which}: no n-gram models, because {why}")
            continue
        store(holder, ResultKey(NGRAM.name, run.config.train.context_length), rows, header)
        shown = ", ".join(f"{loss:.4f}" for loss in header["losses"].values())
        orders, seconds = ", ".join(map(str, ORDERS)), header["seconds"]
        notice(f"{which}: Kneser-Ney {orders} on the same batches: {shown} nats/token ({seconds:.1f} s)")


def _has_ngrams(run: Run) -> bool:
    return any(key.protocol == NGRAM.name for key in run.evaluated())


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
    windows = VALIDATION.windows(corpus.validation, length, VALIDATION.settings(config), length)
    read = np.stack([corpus.validation.tokens[w.start : w.start + w.length + 1] for w in windows]).astype(np.int64)
    losses = {order: -np.log(of_order) for order, of_order in probabilities(read).items()}
    tables = {o: tabulate_windows(losses[o], windows, corpus.validation, corpus.bos_id) for o in ORDERS}
    scored = ["document", "start", "targets", "bytes"]
    own = next((each.windows for each in run.results()[0] if each.key == ResultKey(VALIDATION.name, length)), None)
    if own is None or not np.array_equal(own[scored], tables[ORDERS[0]][scored]):
        raise ConfigError(f"{run.name} was validated on other windows or another text than this posbench would choose")
    means = {order: float(t["nll"].sum() / t["targets"].sum()) for order, t in tables.items()}
    targets, num_bytes = (int(own[name].sum()) for name in ("targets", "bytes"))
    longest = means[max(ORDERS)]
    return pd.concat([table.assign(order=order) for order, table in tables.items()], ignore_index=True), {
        "split": NGRAM.split,
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
    train = config.train
    batches = Batches(corpus.train, train.context_length, train.batch_size, config.seed)
    starts: set[int] = set()
    chain = ""
    for n in range(train.num_steps):
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
