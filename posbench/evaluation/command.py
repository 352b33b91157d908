"""`posbench eval`: many runs, lengths and protocols, with a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from posbench.config import ConfigError
from posbench.data import Corpus, prepare
from posbench.data.preparation import is_cache
from posbench.evaluation.charts import log_evaluations
from posbench.evaluation.evaluate import evaluate_run, parse_length
from posbench.evaluation.protocols import PROTOCOLS, protocol_named
from posbench.runs import FINISHED, UNREADABLE, Run, state_of
from posbench.runs.checkpoint import any_written

_MOST_TOLD = 10  # failures


def evaluate_runs(
    runs: Sequence[Run],
    lengths: Sequence[str],
    protocols: Sequence[str],
    device: str,
    dtype: str,
    again: bool,
    console: Console,
    piece: int | None = None,
    named: bool = True,
) -> list[dict[str, Any]]:
    """Score every finished run of `runs` where it has no result yet, and print perplexity by scheme and length.

    Arguments: piece, tokens, instead of each run's own `evaluation.piece`; named, whether these runs were asked for by
    name: else those that have no weights, such as `runs/reference`, are left out.
    Returns: the summaries, those that were there already included.
    Raises: ConfigError for a length or a protocol that is none, or where no run can be scored; after the tables, what
    went wrong with one run and did not keep the others from being scored.
    """
    asked = [parse_length(word) for words in lengths for word in words.split(",")]
    names = [word for words in protocols for word in words.split(",")]
    for name in names:
        protocol_named(name)

    def notice(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    told: set[str] = set()

    def notice_once(text: str) -> None:
        if text not in told:
            notice(text)
        told.add(text)

    scorable = _scorable(runs, named, notice)
    corpora: dict[tuple[str, str], Corpus] = {}
    summaries: list[dict[str, Any]] = []
    failures: dict[str, Exception] = {}
    try:
        with Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[doing]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=len(scorable), doing="")
            for run in scorable:
                bar.update(task, description=run.name)
                before = len(summaries)
                scored: dict[str, list[str]] = {}

                def tell(summary: dict[str, Any], is_new: bool, run: Run = run, scored: Any = scored) -> None:
                    config = run.config
                    of_run = {"scheme": config.scheme.name, "seed": config.seed, "experiment": config.experiment_name}
                    summaries.append(summary | of_run)
                    if is_new:
                        scored.setdefault(summary["protocol"], []).append(short_length(summary["length"]))

                try:
                    corpus = _corpus_of(run, corpora, notice)
                    own = run.config.evaluation
                    context = run.config.train.context_length
                    wanted = {
                        name: protocol_named(name).lengths(asked or own.lengths, context, corpus.test)
                        for name in names or own.protocols
                    }
                    evaluate_run(
                        run,
                        corpus,
                        wanted,
                        replace(own, piece=piece) if piece else own,
                        device,
                        dtype,
                        again,
                        lambda tokens: bar.update(task, doing=f"{tokens} tokens"),
                        tell,
                        notice_once,
                    )
                    tracked = log_evaluations(run, notice)
                    if tracked is not None:
                        run.update_manifest(wandb=tracked)
                except Exception as error:  # the others are worth having
                    failures[run.name] = error
                bar.advance(task)
                parts = [f"{name} {', '.join(of_name)}" for name, of_name in scored.items()]
                parts = [f"scored {'; '.join(parts)}"] if parts else ["already there"] * (len(summaries) > before)
                notice(f"{run.name}: {', then '.join([*parts, *['failed'] * (run.name in failures)])}")
    finally:
        for experiment in dict.fromkeys(s["experiment"] for s in summaries):
            for protocol in dict.fromkeys(s["protocol"] for s in summaries):
                of_both = [s for s in summaries if (s["experiment"], s["protocol"]) == (experiment, protocol)]
                if of_both:
                    _show(console, experiment, protocol, of_both)
    if failures:
        raise _joined(failures, len(scorable))
    return summaries


def _scorable(runs: Sequence[Run], named: bool, notice: Callable[[str], None]) -> list[Run]:
    """Those that are finished, and those that cannot be read: what is wrong with them is said in their turn."""
    states = [(run, state_of(run)) for run in runs]
    for run, state in states:
        if state not in (FINISHED, UNREADABLE):
            notice(f"{run.name} is {state}: left out")
    found = [run for run, state in states if state in (FINISHED, UNREADABLE)]
    if not found:
        raise ConfigError("none of these runs is finished: give their train command again to finish them")
    if named:
        return found
    here = [run for run in found if state_of(run) == UNREADABLE or any_written(run.path / "checkpoints")]
    if len(here) < len(found):
        notice(f"left out for want of weights (no checkpoint): {len(found) - len(here)} of {len(runs)} runs")
    if not here:
        raise ConfigError("none of the finished runs has weights: train one first (posbench train scheme=vo_rope)")
    return here


def _corpus_of(run: Run, corpora: dict[tuple[str, str], Corpus], notice: Callable[[str], None]) -> Corpus:
    """The run's text, kept in `corpora` for others of the same. By its own fingerprints, not by what a run says."""
    key = run.manifest.fingerprints.data, run.manifest.fingerprints.tokenizer
    if key in corpora:
        return corpora[key]
    config = run.config
    if not is_cache(config.data.cache_dir):
        config.data.cache_dir = None  # nothing is begun where a run folder, perhaps another's, says
    corpus = prepare(config, notice=notice)
    corpora[corpus.fingerprint, corpus.tokenizer_fingerprint] = corpus
    return corpus


def _joined(failures: Mapping[str, Exception], total: int) -> Exception:
    """One error of all, a line for each different one: the user's to mend if all of them are."""
    if total == 1:
        return next(iter(failures.values()))
    runs: dict[str, list[str]] = {}
    for name, error in failures.items():
        own = isinstance(error, ConfigError)
        runs.setdefault(str(error) if own else f"{type(error).__name__}: {error}", []).append(name)
    lines = [f"{', '.join(names[:3]) + ', ...' * (len(names) > 3)}: {message}" for message, names in runs.items()]
    more = [f"and {len(lines) - _MOST_TOLD} more"] if len(lines) > _MOST_TOLD else []
    text = "\n  ".join([f"{len(failures)} of {total} runs failed", *lines[:_MOST_TOLD], *more])
    mendable = all(isinstance(error, (ConfigError, OSError)) for error in failures.values())
    return ConfigError(text) if mendable else RuntimeError(text)


def _show(console: Console, experiment: str, protocol: str, summaries: Sequence[dict[str, Any]]) -> None:
    """One figure by scheme and length, the mean over seeds: perplexity, or the benefit of repetition."""
    lengths = sorted({s["length"] for s in summaries})
    schemes = list(dict.fromkeys(s["scheme"] for s in summaries))
    targets = sorted({s["targets_total"] for s in summaries})
    scored = f"{targets[0]:,}" if len(targets) == 1 else f"{targets[0]:,} to {targets[-1]:,}"
    asked = PROTOCOLS[protocol]
    console.print(
        f"\n{experiment}: {asked.headline} by length in tokens ({protocol}, {scored} targets)", highlight=False
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("scheme")
    seeds = {scheme: sorted({s["seed"] for s in summaries if s["scheme"] == scheme}) for scheme in schemes}
    uneven = len(set(map(tuple, seeds.values()))) > 1
    if uneven:
        table.add_column("seeds")
    for length in lengths:
        table.add_column(short_length(length), justify="right")
    for scheme in schemes:
        cells = [",".join(map(str, seeds[scheme]))] if uneven else []
        for length in lengths:
            of_cell = [s for s in summaries if (s["scheme"], s["length"]) == (scheme, length)]
            cells.append(asked.headline_of(of_cell) if of_cell else "")
        table.add_row(scheme, *cells)
    console.print(table)
    if uneven:
        console.print("Each is the mean over its own seeds: `posbench report` compares over those that all have.")


def short_length(length: int) -> str:
    """`8k` for 8192, the number itself where it is no multiple of 1024."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
