"""Define the commands of `posbench`, which print errors and set the exit status.

Exit status: 0 done; 1 a certificate or a run failed; 2 an error that the user can fix; 129, 130 and 143 stopped by
SIGHUP, Ctrl-C or SIGTERM. `ls` and `judge` have others.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from posbench.analysis.options import JudgeOptions, is_loss_table
from posbench.catalogue import own_files
from posbench.catalogue.choices import choices
from posbench.catalogue.own_files import trust_file
from posbench.config import Config, ConfigError
from posbench.evaluation.request import Request
from posbench.reporting.options import ReportOptions
from posbench.runs import Manifest, find_runs, run_at
from posbench.runs.finding import (
    NothingTrained,
    no_runs,
    only_experiment,
    pack_experiment,
    place_named,
    run_named,
    runs_named,
    search_folder,
)
from posbench.system.console import console, json_text, say, write_unread_output
from posbench.system.options import AtStep, ConfigDir, SchemeFiles, optional, takes
from posbench.system.signals import end_with, is_worker

app = typer.Typer(
    name="posbench",
    help="Where should position go? Train one decoder under many position schemes; see how certain the ranking is.",
    epilog="Set POSBENCH_TRACEBACK=1 in the environment to see the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


_GROUPS = (
    "Groups of conf/: scheme=, model=, data=, tokenizer=, train=, evaluation=, tracking=, experiment=. An "
    "unknown name lists the choices of its group; posbench schemes lists schemes; --cfg job shows every setting."
)
HYDRA = {"allow_extra_args": True, "ignore_unknown_options": True}
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="The folder that contains the experiments.")]


def _complete_experiment(incomplete: str) -> list[str]:
    names = {run.experiment_folder.relative_to("runs").as_posix() for run in find_runs(Path("runs"))}
    return sorted(name for name in names if name.startswith(incomplete))


def _complete_scheme(incomplete: str) -> list[str]:
    return [name for name in choices("scheme") if name.startswith(incomplete)]


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUNS",
        autocompletion=_complete_experiment,
        help="Runs or experiments: runs/demo/vo_rope/seed=0, runs/demo, or demo. Default: all.",
        show_default=False,
    ),
]


NamesOrModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUNS",
        autocompletion=_complete_experiment,
        help="Runs or experiments: runs/demo/vo_rope/seed=0, runs/demo, or demo. Default: all. Or models that others "
        "trained: a Hugging Face folder, or a GGUF file.",
        show_default=False,
    ),
]


def main() -> None:
    """Run the command `posbench`: read the command line, run the subcommand, print errors and exit."""
    # Threads that wait for each other should soon sleep instead of spinning, which made a training step on a shared
    # machine at least fifteen times slower (docs/internals/decisions.md). OpenMP reads this when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    write_unread_output()
    with _exit_on_error():
        is_one_of_several = is_worker()
    if is_one_of_several:
        end_with(_application)
    _application()


def _application() -> None:
    with _exit_on_error():
        app()


@contextmanager
def _exit_on_error() -> Iterator[None]:
    # Imported here, because `--help` must be fast.
    from concurrent.futures.process import BrokenProcessPool

    from posbench.system.files import explained
    from posbench.system.signals import Stopped

    try:
        yield
    except ConfigError as error:
        _fail(error, 2)
    except Stopped as stopped:
        say(str(stopped))
        raise SystemExit(stopped.exit_status) from None
    except BrokenProcessPool as error:
        _fail(
            error,
            1,
            "a worker process was killed, usually for lack of memory (dmesg says so): lower --jobs or "
            "train.batch_size with a larger train.accumulation, and give the same command again; what is stored stays",
        )
    except OSError as error:
        _fail(error, 2, explained(error))
    except Exception as error:
        # An error in the user's own file is the user's to fix, so it needs no traceback.
        is_users = bool(own_files.place_of(error))
        hint = "" if is_users else "\n(set POSBENCH_TRACEBACK=1 to see the traceback)"
        _fail(error, 2 if is_users else 1, f"{own_files.explained(error)}{hint}")


def _fail(error: Exception, status: int, message: str = "") -> None:
    # With POSBENCH_TRACEBACK=1 the user gets the traceback.
    if os.environ.get("POSBENCH_TRACEBACK", "0") != "0":
        raise error
    say(f"posbench: {message or error}")
    raise SystemExit(status) from None


def _complete_override(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
    from posbench.composition.compose import complete

    return complete(incomplete)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Hydra overrides and flags: scheme=vo_rope train.lr=1e-3, -m for a sweep, --cfg job to see them all.",
        autocompletion=_complete_override,
        show_default=False,
    ),
]


def _words(words: list[str] | None, ctx: typer.Context, config_dir: Path | None) -> list[str]:
    overrides = [*(words or []), *ctx.args]
    if config_dir:
        overrides.append(f"--config-dir={config_dir}")
    return overrides


Jobs = Annotated[
    int | None,
    optional(
        help="How many runs of a sweep to train at the same time, on this machine's GPUs in turn.",
        min=1,
    ),
]


def _in_parallel(jobs: int | None) -> list[str]:
    return [] if jobs is None else ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}"]


@app.command(context_settings=HYDRA, epilog=_GROUPS)
def train(
    ctx: typer.Context,
    words: Overrides = None,
    jobs: Jobs = None,
) -> None:
    """Train one run, or a sweep with `-m`: resumes interrupted runs, skips finished ones.

    A Hydra application: `posbench train scheme=vo_rope`, `posbench train -m scheme=nope,qk_rope seed=0,1`,
    `posbench train -m experiment=demo` (the sweep the experiment names), `posbench train --cfg job`.
    """
    from posbench.composition.sweep import SweepJob, run_application, show_outcomes
    from posbench.runs.tracking import offline_hint

    overrides = [*(words or []), *ctx.args, *_in_parallel(jobs)]
    task = SweepJob(_train_job, say, lambda folder: run_at(folder).is_finished, _check_job, _stacks, _train_stack)
    outcomes = run_application("posbench train", overrides, task)
    # The table of runs comes before errors, which stay last on the screen.
    show_outcomes(outcomes, console())
    trained = [outcome.result for outcome in outcomes if outcome.error is None and not outcome.was_finished]
    # Offline runs of wandb must be sent later, with one command per folder.
    records = [manifest.wandb for manifest in trained if manifest.wandb and manifest.wandb["mode"] == "offline"]
    for folder in dict.fromkeys(record["folder"] for record in records):
        say(offline_hint(folder))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        say(f"posbench: {outcome}")
    if failed:
        raise SystemExit(1)


def _check_job(config: Config) -> None:
    from posbench.evaluation.protocols import check_protocols

    check_protocols(config)


def _stacks(configs: Sequence[Config], say: Callable[[str], object]) -> list[list[int]]:
    # Return before torch is imported, which takes seconds.
    if configs[0].launch.stack == "off":
        return []
    from posbench.training.stacked_runs import stacks_of

    return stacks_of(configs, say)


def _train_stack(configs: Sequence[Config]) -> list[Manifest | Exception]:
    from posbench.training.stacked_runs import train_stacked

    return [end if isinstance(end, Exception) else end.manifest for end in train_stacked(configs)]


def _train_job(config: Config) -> Manifest:
    from posbench.api import train as train_run

    return train_run(config).manifest


@app.command(context_settings=HYDRA)
def plan(
    ctx: typer.Context,
    words: Overrides = None,
    device: Annotated[str, typer.Option(help="The GPU: H100, H200, A100, L40S, RTX 4090.")] = "H100",
    mfu: Annotated[
        float, typer.Option(help="The share of the GPU's FLOP/s that training reaches.", min=1e-6, max=1)
    ] = 0.4,
    gpus: Annotated[int, typer.Option(help="Number of GPUs; each trains one run at a time.", min=1)] = 1,
    search: Annotated[
        bool, typer.Option("--search", help="Plan `posbench tune`: its runs, hours, and the gaps that it can find.")
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Estimate what a sweep would cost: runs, tokens, FLOPs, memory, hours on a GPU and on this machine.

    `posbench plan experiment=kexue_1b --gpus 8`, `posbench plan experiment=demo scheme=nope,alibi seed=0,1`
    """
    from posbench.tools import plan as planning

    planned = planning.plan(_words(words, ctx, config_dir), search)
    planning.show(planned, device, mfu, gpus, console())


@app.command(context_settings=HYDRA)
def tune(
    ctx: typer.Context,
    words: Overrides = None,
    left: Annotated[
        bool, typer.Option("--left", help="Train nothing: show the losses so far and what is left to train.")
    ] = False,
    jobs: Jobs = None,
    config_dir: ConfigDir = None,
) -> None:
    """Find the best learning rates of each scheme of an experiment: five rates, then more seeds at the best two.

    Its runs are scored: `posbench report` reads them. Stops with Ctrl-C; the same command goes on.

    `posbench tune experiment=demo`, `posbench tune experiment=headline_prose --jobs 2`, `... --left`
    """
    from posbench.tools.tune import tune as tune_rates

    tune_rates([*_words(words, ctx, config_dir), *_in_parallel(jobs)], _train_job, say, console(), not left)


@app.command(context_settings=HYDRA)
def study(
    ctx: typer.Context,
    place: Annotated[str, typer.Argument(metavar="SCHEME", help="Your scheme: my_scheme.py:Faded, or a name.")],
    words: Overrides = None,
    against: Annotated[
        str, typer.Option(help="The schemes to compare with, separated by commas; the first decides the exit status.")
    ] = "qk_rope",
    budget: Annotated[
        str, typer.Option(help="The time to use, such as 30m or 2h: it chooses tokens and seeds. Default: as in train.")
    ] = "",
    jobs: Annotated[
        int | None, optional(help="How many runs to train at a time. Default: one per core.", min=1)
    ] = None,
) -> None:
    """Take a scheme from a file to the sentence of a paper: verify, search rates, score, judge, report, pack.

    `posbench study my_scheme.py:Faded --against qk_rope,alibi --budget 30m`

    Stops with Ctrl-C; the same command goes on. Nothing is tested before all is trained. Exit status: as of judge.
    """
    from joblib import cpu_count

    from posbench.tools.study import study as study_scheme

    command = shlex.join(["posbench", *sys.argv[1:]])
    jobs = jobs or cpu_count(only_physical_cores=True)
    overrides = _words(words, ctx, None)
    raise SystemExit(study_scheme(place, against.split(","), budget, overrides, jobs, command, console()))


@app.command(context_settings=HYDRA)
def prepare(
    ctx: typer.Context,
    words: Overrides = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every byte of the cache, and of the text, with its checksum.")
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Fetch and tokenise the text ahead of time: `posbench prepare data=fineweb_edu tokenizer.vocab_size=16384`."""
    from posbench.composition.compose import compose

    config = compose(_words(words, ctx, config_dir))
    # Imported after `compose`, because a wrong override is reported sooner without them.
    from posbench.data import prepare as prepare_text
    from posbench.data.text.overlap import copying_lines, overlap_lines

    corpus = prepare_text(config, check=check)
    results = console()
    results.out(
        f"text {corpus.fingerprint[:12]}, tokenizer {corpus.tokenizer_fingerprint[:12]} of {corpus.vocab_size} entries"
    )
    results.out(f"in {corpus.folder}")
    for name, split in corpus.splits.items():
        results.out(
            f"{name:<10} {split.num_documents:>9,} documents {split.num_tokens:>14,} tokens "
            f"{split.num_bytes:>16,} bytes"
        )
    for line in [*copying_lines(corpus.train, config.train.context_length), *overlap_lines(corpus.overlap)]:
        results.out(line)


def _place(name: str, runs_dir: Path) -> Path:
    # A table of losses is a file, not a place with runs.
    return Path(name) if is_loss_table(name) else place_named(name, runs_dir)


@app.command(name="eval")
@takes(Request, on_command_line=True)
def evaluate(
    runs: NamesOrModels = None,
    *,
    options: Request,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Score finished runs, or models in Hugging Face folders, at other lengths than the training length or other text.

    `posbench eval --length 8k`, `posbench eval demo --data wikitext103` (the loss at the training length),
    `posbench eval SmolLM2-135M --data sotu --length 2k,8k,16k --under rescale=yarn evaluation.windows=8`
    """
    from posbench.evaluation.command import evaluate_runs
    from posbench.evaluation.subjects import runs_to_score
    from posbench.reporting.card import show_cards

    to_score = runs_to_score(runs or [], options, runs_dir, console())
    try:
        evaluate_runs(to_score, options, console(), by_name=bool(runs))
    finally:  # after an error or Ctrl-C, the card shows the lengths that are done
        # A card sums up a model that was not trained here; without names, only runs that were are scored.
        if runs:
            show_cards(to_score, console())


@app.command()
@takes(ReportOptions, on_command_line=True)
def report(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT...",
            autocompletion=_complete_experiment,
            help="An experiment, or its folder. Default: the only one in the runs folder. Several make one table if "
            "they differ only in schemes and seeds; otherwise group them with --by.",
            show_default=False,
        ),
    ] = None,
    *,
    options: ReportOptions,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show which scheme is best, and how certain that is: a table, and report.html with figures, lengths and costs.

    `posbench report demo`, `posbench report ladder_s ladder_m --by model.name`
    """
    from posbench.reporting.report import report as write_report

    reference = place_named(str(options.beside), runs_dir) if options.beside else None
    try:
        folders = [_place(name, runs_dir) for name in experiments or []] or [only_experiment(runs_dir)]
    except NothingTrained as error:
        if reference is None:
            raise
        from posbench.analysis.reference_table import check_same_losses, how_to_train

        check_same_losses(reference, console())  # before the user trains runs to compare
        say(str(error))
        console().out(how_to_train(reference))
        return
    # Two names may lead to one folder.
    write_report(list(dict.fromkeys(folders)), console=console(), **vars(options) | {"beside": reference})


@app.command()
@takes(JudgeOptions, on_command_line=True)
def judge(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="An experiment, or its folder.")],
    *,
    options: JudgeOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say whether a scheme is better than the baseline, for scripts and agents: one line, or JSON, and an exit status.

    `posbench judge loop --scheme faded --baseline qk_rope --family 20 --json`

    `--confirm 1` tests a loop's winner on seeds that no candidate has seen; `--also NAME` at another size or on another
    text too. `--metric order` judges what order more than 32 tokens back is worth.

    Exit status: 0 better, 10 worse, 11 equal, 12 open, 13 failed (a run diverged), 14 better by less than the margin; 1
    and 2 errors; with several schemes 0.
    """
    from posbench.analysis.verdict import judge_all

    reference = place_named(str(options.beside), runs_dir) if options.beside else None
    also = [place_named(str(name), runs_dir) for name in options.also]
    judgements, left_out = judge_all(_place(place, runs_dir), replace(options, beside=reference, also=also))
    results = console()
    # If one scheme was named, print only its object.
    if as_json and options.scheme:
        results.out(judgements[0].as_json())
    elif as_json:
        results.out(json_text({"schemes": {j.scheme: asdict(j) for j in judgements}, "left_out": left_out}))
    else:
        for judgement in judgements:
            results.out(str(judgement))
            for command in judgement.next_commands:
                results.out(f"  {shlex.join(command)}")
        warnings = [f"left out: {line}" for line in chain(*left_out.values())]
        # Schemes share warnings, and each is said once.
        for warning in dict.fromkeys(chain(*(judgement.warnings for judgement in judgements), warnings)):
            say(f"warning: {warning}")
    # Several schemes have several verdicts, so the exit status cannot be one of them.
    raise SystemExit(judgements[0].exit_status if len(judgements) == 1 else 0)


@app.command()
def positions(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="A config.json, a model's folder, a run, a scheme, or a model_type of transformers."
        ),
    ],
    length: Annotated[
        int | None, optional(help="The length of the inputs in tokens. Default: the training length.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say what a model does with position, layer by layer. No weights are read.

    `posbench positions config.json`, `posbench positions gemma3_text`, `posbench positions vo_rope --json`

    A tiny model with random weights checks each statement. Exit status: 1 if it contradicts one.
    """
    from posbench.model.positions import show_positions
    from posbench.tools.positions import positions as positions_of

    answer = positions_of(what, length, runs_dir)
    results = console()
    if as_json:
        results.out(answer.as_json())
    else:
        show_positions([(answer.name, answer.positions)], answer.length, results)
        results.print(answer.positions.paragraph)
        for note in answer.notes:
            results.print(f"note: {note}")
        results.print(answer.training, soft_wrap=True)
    for line in answer.contradictions:
        say(f"posbench: contradicted by a tiny model: {line}")
    raise SystemExit(1 if answer.contradictions else 0)


@app.command(name="ls")
def list_runs(
    runs: Names = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """List runs: state, tokens, loss, age, evaluated lengths.

    Exit status: 0 if all runs are finished, 1 if one failed or cannot be read, 3 if some are running or were cut off.
    """
    from posbench.tools import listing

    if not runs and not find_runs(runs_dir):
        say(no_runs(runs_dir, runs_dir))
        return
    selected = runs_named(runs or [], runs_dir)
    shown = selected if runs else listing.without_packed(selected)
    if len(shown) < len(selected):
        say(f"{len(selected) - len(shown)} packed runs hidden: name their experiment to list them")
    rows = [listing.summarise(run) for run in shown]
    if as_json:
        console().out(json_text({"runs": listing.as_data(rows)}))
    else:
        listing.show(rows, console())
    raise SystemExit(listing.exit_status(rows))


@app.command()
def pack(
    experiment: Annotated[str, typer.Argument(help="An experiment, or its folder.")],
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT.zip",
            help="The file to write, which must not exist. Default: runs/EXPERIMENT.zip; if that exists, "
            "runs/EXPERIMENT.2.zip, and so on.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also pack the last weights, in bfloat16, so that eval and export work.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write an experiment's finished runs to one zip file, without checkpoints, to keep or to share.

    Runs of its search for learning rates (EXPERIMENT-tune) go to a second zip file.

    Every command that reads runs reads packs in place. A pack is never rewritten: later runs go to another zip, and
    `demo.zip` and `demo.2.zip` are read as one experiment.
    """
    runs_folder = place_named(experiment, runs_dir)
    folders = [folder for folder in (runs_folder, search_folder(runs_folder)) if folder.is_dir()]
    if output is not None:
        folders = folders[:1]  # there is one file, so the runs of the search are not packed
    # `pack_experiment` says what is wrong if there is no folder.
    for folder in folders or [runs_folder]:
        written = pack_experiment(folder, output, say, weights)
        console().out(f"{written}: {written.stat().st_size:,} bytes")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A finished run.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write, which must be empty or not exist yet.")],
    under: Annotated[
        list[str] | None,
        optional(
            metavar="KEY=VALUE",
            help="Change an option of the scheme: rescale=yarn. May be repeated.",
        ),
    ] = None,
    at_step: AtStep = None,
    scheme_files: SchemeFiles = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a run's model and tokenizer as a Hugging Face folder, checked to give the same logits.

    `posbench export demo/vo_rope/seed=0 vo_rope_hf`, and then `AutoModelForCausalLM.from_pretrained("vo_rope_hf")`
    """
    from posbench.huggingface import export_run

    for file in scheme_files or []:
        trust_file(file)
    written = export_run(run_named(run, runs_dir), folder, tuple(under or []), at_step)
    needs = "" if written.is_stock else " (import posbench.huggingface before from_pretrained)"
    results = console()
    results.out(f"{written.folder}: {written.class_name}{needs}")
    results.out(
        f"its logits differ from posbench's by at most {written.difference:.1g} (the largest logit is "
        f"{written.largest:.3g})"
    )


@app.command()
def schemes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMES",
            autocompletion=_complete_scheme,
            help="Schemes to list (my_scheme.py:Faded). Default: all.",
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """List the position schemes: what each promises, and what it is."""
    from posbench.verify import list_schemes

    list_schemes(console(), config_dir, names or [])


@app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCHEMES",
            autocompletion=_complete_scheme,
            help="Schemes of conf/scheme. Default: all.",
            show_default=False,
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also check compiled blocks, as in training: two minutes per scheme.")
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Check each scheme's properties numerically in float64 (relative, norms, causality). Exits 1 if one fails."""
    from posbench.verify import verify as certify

    if not certify(names, console(), compiled, config_dir):
        raise SystemExit(1)


@app.command()
def vectors(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The folder to write to.", show_default=False)
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compare values of another implementation: safetensors, tensors ENTRY.TENSOR."
        ),
    ] = None,
    schemes: Annotated[str, optional(help="Names of entries, separated by commas. Default: all.")] = "",
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Number of key heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 64,
    positions: Annotated[str, typer.Option(help="Positions, separated by commas.")] = "0,1,255,4095,131071",
    rounding: Annotated[
        float, typer.Option(help="The relative error that --check allows; 1e-2 for bfloat16.", min=0)
    ] = 1e-5,
) -> None:
    """Write reference values of position conventions in float64, or check those of another implementation.

    `posbench vectors FOLDER`, `posbench vectors --check mine.safetensors`

    Exit status: 0 if all checked entries are right, 1 if one is wrong, 2 errors.
    """
    from posbench.system.files import sum_of
    from posbench.tools import vectors as reference_vectors

    if (folder is None) == (check is None):
        raise ConfigError("give either a FOLDER to write to, or --check FILE to compare with")
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    sizes = reference_vectors.Sizes(heads, kv_heads, head_dim, reference_vectors.positions_named(positions))
    if check is not None:
        if not reference_vectors.check(check, sizes, console(), names, rounding):
            raise SystemExit(1)
    elif folder is not None:
        for path in reference_vectors.write(folder, names, sizes):
            console().out(f"{path}: {path.stat().st_size:,} bytes, SHA-256 {sum_of(path)}")


@app.command(context_settings=HYDRA)
def bench(
    ctx: typer.Context,
    words: Overrides = None,
    scheme: Annotated[
        str, typer.Option("--schemes", help="Schemes to time, separated by commas; ratios are to the first.")
    ] = "nope,qk_rope",
    rounds: Annotated[
        int, typer.Option(help="Number of rounds; every scheme has a turn in each. Results are medians.", min=1)
    ] = 7,
    steps: Annotated[int, typer.Option(help="Training steps per turn.", min=1)] = 3,
    config_dir: ConfigDir = None,
) -> None:
    """Measure tokens per second of a whole training step, and compare with the machine's matrix-product rate.

    `posbench bench --schemes nope,qk_rope,alibi model=25m train.batch_size=8 train.dtype=float32`, or with two
    optimizers: `train.optimizer=adamw,muon`.
    """
    from posbench.tools.bench import bench as measure

    overrides = _words(words, ctx, config_dir)
    # A scheme given as an override takes the place of --schemes.
    schemes = [word.removeprefix("scheme=") for word in overrides if word.startswith("scheme=")] or [scheme]
    rest = [word for word in overrides if not word.startswith("scheme=")]
    measure(rest, schemes[-1].split(","), rounds, steps, console())


def _version(is_requested: bool) -> None:
    if is_requested:
        from posbench.version import __version__

        typer.echo(f"posbench {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compare position schemes in one decoder: where should position go?"""
