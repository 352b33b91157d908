"""Kneser-Ney models beside the trained ones: counted in the windows that a run read, scored where the run is scored.

A token and its context are what the run's model saw: an n-gram lies within one window of `train.context_length` + 1
tokens, and a target's context within the window that is scored. A stretch of text counts once, however many epochs or
overlapping windows brought it back. BOS stands in the context and is no target, as for the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config, ConfigError
from posbench.data import Batches, Corpus
from posbench.data.batches import chained
from posbench.evaluation.kneser_ney import KneserNey
from posbench.evaluation.protocols import VALIDATION
from posbench.evaluation.windows import tabulate_windows
from posbench.runs import Run
from posbench.runs.ngrams import NgramLosses, Task, experiment_of, ngrams_of, store, task_of

ORDERS = (2, 3, 5)

Ints = NDArray[np.int64]
Notice = Callable[[str], object]


def add_ngrams(
    runs: Sequence[Run], corpus_of: Callable[[Run], Corpus], notice: Notice, again: bool = False
) -> dict[str, Exception]:
    """Compute and store what is lacking, once for all schemes of one seed; `notice` is called with a line that says so.

    Arguments: runs, finished and with their validation losses; again, whether what is stored is made once more.
    Returns: what went wrong, by the name of the run.
    """
    done: set[Task] = set()
    failures: dict[str, Exception] = {}
    for run in runs:
        task = _task(run)
        if task is None or task in done or (not again and any(each.task == task for each in ngrams_of(run)[0])):
            continue
        done.add(task)
        which = f"{run.manifest.experiment}, seed {run.manifest.seed}"
        try:
            losses = ngram_losses(run, task, corpus_of(run))
            store(run, losses)
        except NotTheSame as why:
            notice(f"{which}: no n-gram models, because {why}")
        except (ConfigError, OSError) as error:
            failures[run.name] = error
        else:
            orders = ", ".join(map(str, ORDERS))
            shown = ", ".join(f"{losses.losses[order]:.4f}" for order in ORDERS)
            notice(f"{which}: Kneser-Ney {orders} on the same batches: {shown} nats/token ({losses.seconds:.1f} s)")
    return failures


def _task(run: Run) -> Task | None:
    """What is to be computed for a run; None where it has no loss, lies in no experiment or read too many tokens."""
    results = [each for each in run.results()[0] if each.protocol == VALIDATION.name and not each.reading.under]
    is_small = run.manifest.tokens <= run.config.evaluation.ngram_tokens
    return task_of(run.manifest, results[0]) if results and is_small and experiment_of(run) else None


class NotTheSame(Exception):
    """Why n-gram models of today cannot be compared with a run."""


def ngram_losses(run: Run, task: Task, corpus: Corpus) -> NgramLosses:
    """The losses of all orders on the run's batches and validation windows. Raises: NotTheSame; ConfigError."""
    config = run.config
    began = time.perf_counter()
    starts, batches = windows_read(config, corpus)
    if batches != task.batches:
        raise NotTheSame(f"{run.name} was trained on other batches (fingerprint {task.batches}, now {batches})")
    tokens, depths = text_read(corpus.train.tokens, starts, config.train.context_length, max(ORDERS))
    probabilities = KneserNey(tokens, depths, corpus.vocab_size, max(ORDERS)).probabilities
    length = config.train.context_length
    windows = VALIDATION.windows(corpus.validation, length, VALIDATION.settings(config), length)
    rows = np.stack([corpus.validation.tokens[w.start : w.start + w.length + 1] for w in windows]).astype(np.int64)
    losses = {order: -np.log(of_order) for order, of_order in probabilities(rows).items()}
    tables = {o: tabulate_windows(losses[o], windows, corpus.validation, corpus.bos_id) for o in ORDERS}
    table = tables[ORDERS[0]]
    if Task.of(run.manifest, table) != task:
        raise NotTheSame(f"{run.name} was validated on other windows or another text than this posbench would choose")
    return NgramLosses(
        task=task,
        losses={order: float(t["nll"].sum() / t["targets"].sum()) for order, t in tables.items()},
        tokens=int((depths > 1).sum()),
        targets=int(table["targets"].sum()),
        bytes=int(table["bytes"].sum()),
        seconds=round(time.perf_counter() - began, 2),
    )


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
