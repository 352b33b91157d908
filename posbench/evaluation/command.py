"""Run `posbench eval`: score many runs at many lengths by many protocols, and print tables at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mode
from tempfile import TemporaryDirectory

import joblib
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from posbench.catalogue.own_files import trust_file
from posbench.config import ConfigError
from posbench.config.units import short_length
from posbench.evaluation.evaluate import Begin, evaluate_run
from posbench.evaluation.protocols import protocol_of
from posbench.evaluation.protocols.protocol import EvalProtocol
from posbench.evaluation.request import Request
from posbench.evaluation.texts import dataset_for
from posbench.runs import FINISHED, UNREADABLE, Run, state_of
from posbench.runs.pack import PackedRun
from posbench.runs.results import Result, row_name
from posbench.runs.tracking import offline_hint, open_tracker
from posbench.system.console import Say
from posbench.system.signals import CommandSignals, Stopped, ending_with_command


def evaluate_runs(
    runs: Sequence[Run], request: Request, console: Console, by_name: bool = True
) -> list[tuple[Run, Result]]:
    """Score every finished run of `runs` that has no result yet, and print perplexity by scheme and length.

    If the request changes options of the scheme, runs are scored as trained too, on the same windows.

    Arguments: by_name, whether the user named these runs; if not, runs without weights are skipped.
    Returns: each requested result, new or stored earlier, with its run.
    Raises: ConfigError if no run can be scored, or after all others were scored, with the errors.
    """
    if (jobs := request.jobs) < 1 and jobs != -1:
        raise ConfigError(f"--jobs {jobs} is not a number of runs: give 1 or more, or -1 for one on each core")
    # A cached call does nothing, so a line that is the same for many runs is printed once.
    say_once = cache(console.out)
    scorable = _scorable(runs, by_name, console.out)
    requests = _requests(scorable, request, console.out)
    evaluations: list[tuple[Run, Result]] = []
    failures: dict[str, list[str]] = {}  # error -> names of the runs
    try:
        with _progress(console) as bar, ExitStack() as context:
            task = bar.add_task("", total=len(scorable))
            # Only runs in this process can move a second bar, which shows the progress of one length.
            signals: CommandSignals | None = None  # None: no workers, so Ctrl-C interrupts this process
            if joblib.effective_n_jobs(jobs) == 1:
                length = bar.add_task("", total=None)
                begin = partial(bar.reset, length)
                score: Callable[[Run, Request], _Scoring]
                score = partial(_evaluate, begin=begin, advance=partial(bar.advance, length), say=say_once)
            else:
                folder = Path(context.enter_context(TemporaryDirectory(prefix="posbench-eval-")))
                signals = context.enter_context(CommandSignals("the evaluation", folder, speaks=False))
                score = partial(_evaluate_in_worker, folder)
            for run, scoring in zip(scorable, _scored(jobs, score, scorable, requests, signals), strict=True):
                bar.update(task, advance=1, description=run.name)
                for line in scoring.notices:
                    say_once(line)
                # Errors are raised at the end, so that all other runs are scored.
                if scoring.error is not None:
                    failures.setdefault(scoring.error, []).append(run.name)
                evaluations += [(run, result) for result, _ in scoring.results]
                console.out(f"{run.name}: {_outcome(scoring.results, scoring.error is not None)}")
    # Also after Ctrl-C: what was scored is shown.
    finally:
        _show_tables(console, evaluations, request.lengths)
    if failures:
        error, names = next(iter(failures.items()))
        # All runs have the same error, so it needs no names.
        if len(names) == len(scorable):
            raise ConfigError(error)
        lines = [f"{', '.join(names)}: {error}" for error, names in failures.items()]
        raise ConfigError("\n  ".join(["not all runs could be scored", *lines]))
    # With changed options, the scores as trained are an addition for the tables and were not asked for.
    requested_options = [set(variant.under) for variant in request.variants if variant.under or not request.under]
    # `under` of a result may have marks too, such as data=<name>.
    return [
        (run, result) for run, result in evaluations if any(map(set(result.key.under).issuperset, requested_options))
    ]


def _ignore(*_: object, **__: object) -> None:
    """Show nothing, in a process that has no bar."""


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@dataclass
class _Scoring:
    results: list[tuple[Result, bool]] = field(default_factory=list)  # each with whether it is new
    notices: list[str] = field(default_factory=list)  # lines to print
    error: str | None = None  # message of an error that the user can fix; any other error ends the evaluation


def _evaluate(
    run: Run,
    request: Request,
    begin: Begin,
    advance: Callable[[int], object],
    say: Say | None,
) -> _Scoring:
    # Score one run, and return its results and errors. Without `say`, as in other processes, notices are returned.
    scoring = _Scoring()
    say = say or scoring.notices.append
    try:
        # Trust does not pass from the main process to this one.
        for file in request.scheme_files:
            trust_file(file)
        run.check_scheme_files(request.scheme_changed)  # before a task's file is imported
        corpus = dataset_for(run, request.data, say)
        tell = scoring.results.append
        evaluate_run(run, corpus, request, advance, lambda result, is_new: tell((result, is_new)), say, begin)
        # Tracking changes run.json, and packs are never rewritten.
        if not isinstance(run, PackedRun):
            _track(run, say)
    except (ConfigError, OSError) as error:
        scoring.error = str(error)
    return scoring


def _scored(
    jobs: int,
    score: Callable[[Run, Request], _Scoring],
    runs: Sequence[Run],
    requests: Sequence[Request],
    signals: CommandSignals | None,
) -> Iterator[_Scoring]:
    # Yield what `score` returns for each run, in order. Raises: Stopped after a signal.

    def raise_if_stopped() -> None:
        if signals is not None:
            signals.raise_if_received("with the results so far: run the same command again for the rest")

    # joblib warns of what a signal has cancelled.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator")
        try:
            for scoring in parallel(map(joblib.delayed(score), runs, requests)):
                raise_if_stopped()
                yield scoring
        # The signal may have reached a worker before its first run.
        except BrokenProcessPool:
            raise_if_stopped()
            raise


def _evaluate_in_worker(folder: Path, run: Run, request: Request) -> _Scoring:
    # Score one run in a worker of the command that holds the lock of `folder`.
    try:
        with ending_with_command(run.name, folder):
            return _evaluate(run, request, _ignore, _ignore, None)
    except Stopped as stopped:
        return _Scoring(error=str(stopped))


def _track(run: Run, say: Say) -> None:
    # Send the figures of all results to the run's tracker, if it has one.
    manifest = run.manifest
    tracker = open_tracker(run.config, run, manifest, say)
    # None: the run is not tracked.
    if tracker.record is None:
        return
    figures = dict(manifest.figures)  # with the figures of training, because an offline recording replaces its summary
    for result in run.results()[0]:
        protocol = protocol_of(result)
        if protocol is None:
            continue
        result_figures = protocol.figures(result.header)
        suffix = "@".join(map(str, (result.length, *result.key.under)))
        figures |= {f"eval/{result.protocol}/{name}@{suffix}": value for name, value in result_figures.items()}
    tracker.summary(figures)
    tracker.finish()
    run.update_manifest(wandb=tracker.record)
    if tracker.record["mode"] == "offline":
        say(offline_hint(tracker.record["folder"]))


def _outcome(results: Sequence[tuple[Result, bool]], has_failed: bool) -> str:
    """Return what was done for a run, as text: `scored fixed 512, 1k`.

    Arguments: results, each with whether it is new.
    """
    lengths: dict[str, list[str]] = {}
    for result, is_new in results:
        if is_new:
            lengths.setdefault(row_name(result.protocol, result.key.under), []).append(short_length(result.length))
    scored = "; ".join(f"{protocol} {', '.join(of_protocol)}" for protocol, of_protocol in lengths.items())
    parts = []
    if scored:
        parts.append(f"scored {scored}")
    elif results:
        parts.append("already there")
    if has_failed:
        parts.append("failed")
    return ", then ".join(parts) or "nothing to score"


def _scorable(runs: Sequence[Run], by_name: bool, notice: Say) -> list[Run]:
    states = [(run, state_of(run)) for run in runs]
    # An unreadable run that the user named fails later, with the reason.
    accepted_states = (FINISHED, UNREADABLE) if by_name else (FINISHED,)
    for run, state in states:
        if state not in accepted_states:
            notice(f"{run.name} is skipped: {state}")
    finished = [run for run, state in states if state in accepted_states]
    if not finished:
        raise ConfigError("none of these runs is finished: run their train command again to finish them")
    if by_name:
        return finished
    # Runs that the user did not name may lack weights, as those in `runs/reference` do.
    with_weights = [run for run in finished if run.has_weights and run.manifest.subject is None]
    if len(with_weights) < len(finished):
        notice(f"skipped, since they have no checkpoint: {len(finished) - len(with_weights)} of {len(runs)} runs")
    if not with_weights:
        raise ConfigError("none of the finished runs has weights: train one first (posbench train scheme=vo_rope)")
    return with_weights


def _requests(runs: Sequence[Run], request: Request, notice: Say) -> list[Request]:
    """Return a request per run. A run whose scheme lacks the options is scored without them.

    Raises: ConfigError if no run has the options.
    """
    from posbench.evaluation.subjects import positions_in_use
    from posbench.model.architecture import build_architecture

    requests = []
    refused = {}  # scheme -> why it does not have the options
    for run in runs:
        run_request = request
        try:
            if run.manifest.subject is not None and request.data == run.config.data:
                run_request = replace(request, data=None)  # its own text
            # The first variant has no options. Building the model's parts raises the error for the others.
            for variant in request.variants[1:]:
                if run.manifest.subject is None:
                    build_architecture(run.config_under(variant.under))
                else:
                    positions_in_use(run, variant.under, run.config.train.context_length)
            requests.append(run_request)
        except ConfigError as error:
            requests.append(replace(run_request, under=()))
            refused[run.path.parent.name] = str(error)
    # Without options, only a run that cannot be read was refused, and its scoring says so.
    if not request.under:
        return requests
    for scheme, reason in refused.items():
        # No run has the options.
        if not any(run_request.under for run_request in requests):
            is_of_scheme = any(option.startswith("scheme=") for option in request.under)
            has_run = any(run.manifest.subject is None for run in runs)
            if has_run and not is_of_scheme:
                reason += ". Name runs of a scheme that has it (rotations have rescale)"
            raise ConfigError(reason)
        notice(f"{scheme} is scored only as trained: {reason}")
    return requests


def _show_tables(console: Console, evaluations: Sequence[tuple[Run, Result]], asked: Sequence[int]) -> None:
    """Print a table for each experiment, text and protocol: a row for each scheme, and a column for each length."""
    rows = pd.DataFrame(
        {
            "title": run.config.experiment_name + (f" on {result.key.data}" if result.key.data else ""),
            "protocol": result.protocol,
            "scored_by": protocol_of(result),  # workers know protocols of files that this process has not loaded
            "scheme": row_name(run.config.scheme.name, result.key.options),
            "seed": run.config.seed,
            "length": result.length,
            "header": result.header,
            "windows": result.windows_digest,
        }
        for run, result in evaluations
    )
    if len(rows):
        for (title, _), table in rows.groupby(["title", "protocol"], sort=False):
            _show(console, str(title), table["scored_by"].iloc[0], table, asked)


def _show(console: Console, title: str, protocol: EvalProtocol, table: pd.DataFrame, asked: Sequence[int]) -> None:
    targets = sorted({header["targets_total"] for header in table["header"]})
    counted = f"{targets[0]:,}"
    if len(targets) > 1:
        counted += f" to {targets[-1]:,}"
    counted = f"{protocol.name}, {counted} {protocol.count_column}"
    console.out(f"\n{title}: {protocol.headline} by length in {protocol.unit} ({counted})")
    # The commonest windows and number format of each length; means with others get a star.
    is_unusual = table["windows"] != table.groupby("length")["windows"].transform(mode)
    table = table.assign(star=(is_unusual & protocol.is_compared).map({True: "*", False: ""}))
    cells = table.groupby(["scheme", "length"])
    shown = (cells["header"].agg(protocol.headline_of) + cells["star"].max()).unstack()
    # Requested lengths have a column even if no model can read them.
    lengths = sorted({*table["length"], *(asked if protocol.is_by_length else ())})
    shown = shown.reindex(index=table["scheme"].unique(), columns=lengths).rename(columns=short_length)
    seeds = table.groupby("scheme")["seed"].agg(lambda seeds: ",".join(map(str, sorted(set(seeds)))))
    if seeds.nunique() > 1:
        shown.insert(0, "seeds", seeds)
    console.out(shown.rename_axis(index=None, columns="scheme").to_string(na_rep="–", line_width=console.width))
    if is_unusual.any() and protocol.is_compared:
        console.out(
            "*: other windows or another number format than the rest of the column, so do not compare it. "
            "evaluation.* or the dtype of these runs differs."
        )
    if seeds.nunique() > 1:
        console.out(
            "Each row is the mean over its own seeds; `posbench report` compares over the seeds that all rows have."
        )
