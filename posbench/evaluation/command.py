"""`posbench eval`: many runs, lengths and protocols, with a table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from posbench.config import ConfigError
from posbench.data import Corpus, prepare
from posbench.data.preparation import is_cache
from posbench.evaluation.evaluate import evaluate_run, parse_length
from posbench.evaluation.protocols import protocol_named
from posbench.evaluation.windows import default_lengths
from posbench.runs import Run, state_of
from posbench.tracking import log_evaluation


def evaluate_runs(
    runs: Sequence[Run],
    lengths: Sequence[str],
    protocols: Sequence[str],
    device: str,
    dtype: str,
    again: bool,
    console: Console,
    piece: int | None = None,
) -> list[dict[str, Any]]:
    """Score every finished run of `runs` where it has no result yet, and print perplexity by scheme and length.

    Arguments: piece, tokens, instead of each run's own `evaluation.piece`.
    Returns: the summaries, those that were there already included.
    Raises: ConfigError for a length or a protocol that is none, or where no run is finished.
    """
    asked = [parse_length(word) for words in lengths for word in words.split(",")]
    names = [word for words in protocols for word in words.split(",")]
    for name in names:
        protocol_named(name)
    finished = [run for run in runs if run.is_finished]
    for run in runs:
        if run not in finished:
            console.print(f"{run.name} is {state_of(run)}: left out", highlight=False, markup=False)
    if not finished:
        raise ConfigError("none of these runs is finished: give their train command again to finish them")

    def notice(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    corpora: dict[str, Corpus] = {}
    summaries = []
    with Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[doing]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=len(finished), doing="")
        for run in finished:
            bar.update(task, description=run.name)
            config = run.config
            settings = replace(config.evaluation, piece=piece) if piece else config.evaluation
            key = "".join(run.trained_on[:2])
            if key not in corpora:
                if not is_cache(config.data.cache_dir):
                    config.data.cache_dir = None  # nothing is begun where a run folder, perhaps another's, says
                corpora[key] = prepare(config, notice=notice)
            corpus = corpora[key]
            of_run = names or config.evaluation.protocols
            context = config.train.context_length
            wanted = {
                name: asked or config.evaluation.lengths or default_lengths(context, corpus.test, name)
                for name in of_run
            }
            results = evaluate_run(
                run,
                corpus,
                wanted,
                settings,
                device,
                dtype,
                again,
                lambda tokens: bar.update(task, doing=f"{tokens} tokens"),
            )
            tracked = log_evaluation(run, notice)
            if tracked is not None:
                run.update_manifest(wandb=tracked)
            summaries += [
                {**summary, "scheme": config.scheme.name, "seed": config.seed, "experiment": config.experiment_name}
                for summary in results
            ]
            bar.advance(task)
            if not console.is_terminal:
                console.print(f"{run.name}: evaluated", highlight=False, markup=False)
    for experiment in dict.fromkeys(s["experiment"] for s in summaries):
        for protocol in dict.fromkeys(s["protocol"] for s in summaries):
            of_both = [s for s in summaries if (s["experiment"], s["protocol"]) == (experiment, protocol)]
            if of_both:
                _show(console, experiment, protocol, of_both)
    return summaries


def _show(console: Console, experiment: str, protocol: str, summaries: Sequence[dict[str, Any]]) -> None:
    """One figure by scheme and length, the mean over seeds: perplexity, or the benefit of repetition."""
    lengths = sorted({s["length"] for s in summaries})
    schemes = list(dict.fromkeys(s["scheme"] for s in summaries))
    targets = sorted({s["targets_total"] for s in summaries})
    scored = f"{targets[0]:,}" if len(targets) == 1 else f"{targets[0]:,} to {targets[-1]:,}"
    drop = protocol == "retrieval"
    what = "benefit of repetition, nats/token," if drop else "perplexity"
    console.print(f"\n{experiment}: {what} by length in tokens ({protocol}, {scored} targets)", highlight=False)
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
            mean = sum(s["drop" if drop else "nll_mean"] for s in of_cell) / max(1, len(of_cell))
            cells.append("" if not of_cell else f"{mean:z.3f}" if drop else perplexity(mean))
        table.add_row(scheme, *cells)
    console.print(table)
    if uneven:
        console.print("Each is the mean over its own seeds: `posbench report` compares over those that all have.")


def perplexity(nll: float) -> str:
    """`exp` of a mean loss in nats, in four figures or as a power of ten."""
    value = math.exp(min(nll, 700))
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.1e}"


def short_length(length: int) -> str:
    """`8k` for 8192, the number itself where it is no multiple of 1024."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
