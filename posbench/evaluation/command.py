"""`posbench eval`: many runs, lengths and protocols, with a table at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import joblib
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from posbench.config import ConfigError
from posbench.console import Say, plain_table
from posbench.evaluation.evaluate import evaluate_run
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.ngram import add_ngrams
from posbench.evaluation.request import Request
from posbench.evaluation.texts import corpus_for, dataset_for
from posbench.runs import FINISHED, UNREADABLE, Run, state_of
from posbench.runs.pack import PackedRun
from posbench.runs.results import Result, row_name
from posbench.scheme_file import name_file
from posbench.tracking import offline_hint, open_tracker
from posbench.units import short_length


def evaluate_runs(
    runs: Sequence[Run], request: Request, console: Console, named: bool = True, jobs: int = 1
) -> list[tuple[Run, Result]]:
    """Score every finished run of `runs` where it has no result yet, and print perplexity by scheme and length.

    Arguments: named, whether these runs were asked for by name: else those that have no weights, such as
    `runs/reference`, are skipped; jobs, how many runs are scored side by side, each in a process of its own (-1: as
    many as there are cores).
    Returns: the results, those that were there already included.
    Raises: ConfigError where no run can be scored; after the tables, what went wrong with one run and did not keep the
    others from being scored.
    """
    if jobs < 1 and jobs != -1:
        raise ConfigError(f"--jobs {jobs} is not a number of runs: give 1 or more, or -1 for one on each core")
    say_once = cache(console.out)  # what would be the same for every run is said for the first
    scorable = _with_options(_scorable(runs, named, console.out), request.variants[0].under, console.out)
    evaluations: list[tuple[Run, Result]] = []
    failures: dict[str, list[str]] = {}  # what went wrong -> the runs
    try:
        with _progress(console) as bar:
            task = bar.add_task("", total=len(scorable), doing="")
            here = jobs == 1  # in this process, which can show how far a run is
            advance = (lambda n: bar.update(task, doing=f"{n} tokens")) if here else (lambda n: None)
            score = partial(_evaluate, request=request, advance=advance, say=say_once if here else None)
            scored = joblib.Parallel(n_jobs=jobs, return_as="generator")(map(joblib.delayed(score), scorable))
            for run, scoring in zip(scorable, scored, strict=True):
                bar.update(task, advance=1, description=run.name)
                for text in scoring.notices:
                    say_once(text)
                if scoring.error is not None:  # the others are worth having
                    failures.setdefault(scoring.error, []).append(run.name)
                evaluations += [(run, result) for result, _ in scoring.results]
                console.out(f"{run.name}: {_outcome(scoring.results, scoring.error is not None)}")
        if request.wants_ngrams:
            own_text = partial(corpus_for, data=None, notice=say_once)
            failed = [name for names in failures.values() for name in names]
            of_text = [run for run in scorable if run.name not in failed and not run.config.is_task]
            add_ngrams(of_text, own_text, console.out, request.again)
    finally:
        tables: dict[tuple[str, str], list[tuple[Run, Result]]] = {}
        for run, result in evaluations:
            text = f" on {result.key.data}" if result.key.data else ""
            tables.setdefault((run.config.experiment_name + text, result.protocol), []).append((run, result))
        for (title, protocol), of_table in tables.items():
            _show(console, title, protocol, of_table)
    if failures:
        lines = [f"{', '.join(names)}: {error}" for error, names in failures.items()]
        raise ConfigError(
            "\n  ".join(["not all runs could be scored", *lines]) if scorable[1:] else next(iter(failures))
        )
    return evaluations


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[doing]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@dataclass
class _Scoring:
    """What came of one run: its results and whether each is new, those before a failure too."""

    results: list[tuple[Result, bool]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # to be printed
    error: str | None = None  # a user's; any other ends the evaluation


def _evaluate(run: Run, request: Request, advance: Callable[[int], object], say: Say | None) -> _Scoring:
    """Score one run. `say` prints what there is to say at once; without it the notices are returned."""
    scoring = _Scoring()
    say = say or scoring.notices.append
    try:
        for file in request.scheme_files:
            name_file(file)
        run.check_scheme_files(request.scheme_changed)  # before a task's file is imported
        corpus = dataset_for(run, request.data, say)
        tell = scoring.results.append
        for variant in request.variants:
            evaluate_run(run, corpus, variant, advance, lambda result, is_new: tell((result, is_new)), say)
        if not isinstance(run, PackedRun):
            _track(run, say)
    except (ConfigError, OSError) as error:
        scoring.error = str(error)
    return scoring


def _track(run: Run, say: Say) -> None:
    """Send all stored results to the run's wandb run, as figures `eval/<protocol>/<figure>@<length>`."""
    manifest = run.manifest
    tracker = open_tracker(run.config, run, manifest, say)
    if tracker.record is None:
        return
    figures = dict(manifest.figures)  # those of training too: an offline recording replaces its summary
    for result in (each for each in run.results()[0] if each.protocol in PROTOCOLS):
        own = PROTOCOLS[result.protocol].figures(result.header)
        place = "@".join(map(str, (result.length, *result.key.under)))
        figures |= {f"eval/{result.protocol}/{name}@{place}": value for name, value in own.items()}
    tracker.summary(figures)
    tracker.finish()
    run.update_manifest(wandb=tracker.record)
    if tracker.record["mode"] == "offline":
        say(offline_hint(tracker.record["folder"]))


def _outcome(results: Sequence[tuple[Result, bool]], has_failed: bool) -> str:
    """`scored fixed 64, 128; fixed · yarn 128, then failed`"""
    lengths: dict[str, list[str]] = {}
    for result, is_new in results:
        if is_new:
            lengths.setdefault(row_name(result.protocol, result.key.under), []).append(short_length(result.length))
    scored = "; ".join(f"{protocol} {', '.join(of_protocol)}" for protocol, of_protocol in lengths.items())
    done = f"scored {scored}" if scored else "already there" if results else ""
    return ", then ".join(filter(None, [done, "failed" * has_failed])) or "nothing to score"


def _scorable(runs: Sequence[Run], named: bool, notice: Say) -> list[Run]:
    """Those that are finished. One that cannot be read is skipped; where it was named, it fails in its turn."""
    states = [(run, state_of(run)) for run in runs]
    wanted = (FINISHED, UNREADABLE) if named else (FINISHED,)
    for run, state in states:
        if state not in wanted:
            notice(f"{run.name} is {state}: skipped")
    finished = [run for run, state in states if state in wanted]
    if not finished:
        raise ConfigError("none of these runs is finished: run their train command again to finish them")
    if named:
        return finished
    with_weights = [run for run in finished if run.has_weights]
    if len(with_weights) < len(finished):
        notice(f"skipped, since they have no checkpoint: {len(finished) - len(with_weights)} of {len(runs)} runs")
    if not with_weights:
        raise ConfigError("none of the finished runs has weights: train one first (posbench train scheme=vo_rope)")
    return with_weights


def _with_options(runs: list[Run], under: Sequence[str], notice: Say) -> list[Run]:
    """Those whose schemes have the options of `under`. Raises: ConfigError where none has."""
    from posbench.model import shape_of
    from posbench.schemes import build_scheme

    taken, refused = [], {}
    for run in runs if under else ():
        try:
            config = run.config_under(under)
            build_scheme(config.scheme, shape_of(config))
            taken.append(run)
        except ConfigError as error:
            refused[run.path.parent.name] = str(error)
    for scheme, why in refused.items():
        if not taken:
            of_scheme = any(option.startswith("scheme=") for option in under)
            raise ConfigError(
                why if of_scheme else f"{why}. Name runs of a scheme that has it (rotations have rescale)"
            )
        notice(f"{scheme} is skipped: {why}")
    return taken if under else runs


def _show(console: Console, title: str, protocol: str, evaluations: Sequence[tuple[Run, Result]]) -> None:
    """A table of one figure by scheme and length, over all seeds. A scheme with `--under` options has its own row."""
    lengths = sorted({result.length for _, result in evaluations})
    of_row: dict[str, list[tuple[int, Result]]] = {}  # each result with its seed
    for run, result in evaluations:
        name = row_name(run.config.scheme.name, result.key.options)
        of_row.setdefault(name, []).append((run.config.seed, result))
    rows = list(of_row)
    targets = sorted({result.header["targets_total"] for _, result in evaluations})
    scored = f"{targets[0]:,}" if len(targets) == 1 else f"{targets[0]:,} to {targets[-1]:,}"
    asked = PROTOCOLS[protocol]
    heading = f"{title}: {asked.headline} by length in {asked.unit} ({protocol}, {scored} {asked.count_column})"
    console.out(f"\n{heading}")
    seeds = {row: sorted({seed for seed, _ in of}) for row, of in of_row.items()}
    uneven = len(set(map(tuple, seeds.values()))) > 1
    fitting = max(2, (console.width - max(map(len, rows)) - 8 * uneven) // 8)
    shown = lengths[:: -math.ceil(len(lengths) / fitting)][::-1]
    table = plain_table("scheme", *(["seeds"] if uneven else []), *map(short_length, shown))
    for row in rows:
        cells = [",".join(map(str, seeds[row]))] if uneven else []
        for length in shown:
            headers = [result.header for _, result in of_row[row] if result.length == length]
            cells.append(asked.headline_of(headers) if headers else "–")
        table.add_row(row, *cells)
    console.print(table)
    if len(shown) < len(lengths):
        console.out(f"{len(shown)} of {len(lengths)} lengths fit this terminal; all are stored, for `posbench report`.")
    if uneven:
        console.print(
            "Each row is the mean over its own seeds; `posbench report` compares over the seeds that all rows have."
        )
