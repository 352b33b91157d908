"""Take a scheme from an idea to the sentence of a paper (`posbench study`), by the commands that exist.

    runs/study-cable/study.json     the plan: what was asked for, tokens of a run, seeds at the kept rates
    runs/study-cable/               the screen: FIRST_SEEDS seeds at one rate, which count in the search too
    runs/study-cable-tune/          the search for the rates of all schemes

Nothing is tested before the search is finished. Then there is one test, of the scheme's pairs with the baselines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from posbench.analysis.comparison import build
from posbench.analysis.reading import read_runs
from posbench.analysis.search import FIRST_SEEDS, choose_rates, runs_per_scheme
from posbench.analysis.verdict import Judgement, judge
from posbench.composition.compose import compose, quoted
from posbench.composition.sweep import SweepJob, run_application
from posbench.config import Config, ConfigError
from posbench.config.units import count_of, duration, short_count
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.request import Request
from posbench.reporting.page import paragraph
from posbench.reporting.report import report
from posbench.reporting.text import words as listed
from posbench.runs import FINISHED, Manifest, run_at
from posbench.runs.finding import pack_experiment, search_folder
from posbench.runs.pack import free_name
from posbench.system.console import console as new_console
from posbench.system.console import say
from posbench.system.files import read_json, write_json
from posbench.tools.plan import Plan, plan, time_machine
from posbench.tools.tune import tune
from posbench.training import Died, train
from posbench.verify import verify

SEEDS = (8, 5, 3)  # numbers of seeds at the kept rates, of which a budget chooses the largest that it can
LEAST_STEPS = 200  # of a run, that a budget must allow
SHARE = 0.65  # of a budget that training steps may take; validation, scoring and the report take the rest
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Study:
    """A scheme, its baselines, and the words that make their runs."""

    scheme: str
    baselines: tuple[str, ...]
    choices: tuple[str, ...]  # of conf/scheme or files, the scheme's first
    words: tuple[str, ...]  # overrides of every run
    folder: Path  # of the experiment

    @classmethod
    def of(cls, place: str, against: Sequence[str], words: Sequence[str]) -> Study:
        """Return the study of the scheme at `place`. Raises: ConfigError for words that a study decides."""
        refused = [word for word in words if word.startswith(("scheme=", "seed=", "-m"))]
        if refused:
            raise ConfigError(f"{refused[0]}: a study's schemes are {place} and --against, its seeds 0, 1, 2, ...")
        choices = (place, *against)
        config, *others = [compose([*words, f"scheme={choice}"]) for choice in choices]
        scheme, baselines = config.scheme.name, tuple(other.scheme.name for other in others)
        if scheme in baselines:
            raise ConfigError(f"{scheme} cannot be compared with itself: name other schemes with --against")
        named = [word for word in words if word.startswith("experiment_name=")]
        name = config.experiment_name if named else f"study-{scheme}"
        pairs = ",".join(quoted(f"{scheme} {baseline}") for baseline in baselines)
        experiment = [
            f"experiment_name={name}",
            f"experiment.name={name}",
            f"experiment.description={quoted(f'{scheme} against {listed(baselines)}')}",
            f"experiment.baseline={baselines[0]}",
            f"experiment.primary=[{pairs}]",
            "experiment.published=null",
        ]
        common = [word for word in words if word not in named]
        return cls(scheme, baselines, choices, (*common, *experiment), Path(config.runs_dir, name))

    @property
    def schemes_word(self) -> str:
        return f"scheme={','.join(self.choices)}"


def study(
    place: str, against: Sequence[str], budget: str, words: Sequence[str], jobs: int, command: str, console: Console
) -> int:
    """Verify, screen, search, score, report, pack and judge a scheme, and return the exit status of its verdict.

    Arguments: place, the scheme; against, the baselines, the first of which decides the status; budget, such as 30m, or
    "" for the tokens and seeds of `words`; jobs, runs at a time; command, which repeats this.
    Raises: ConfigError for what is refused, also a budget that is too short.
    """
    this, available = Study.of(place, against, words), _time_of(budget)
    if not verify([place], console):
        say(f"{this.scheme} fails: mend it, and give the same command again")
        return 1
    launcher = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}"]
    asked = {"place": place, "against": list(against), "budget": budget, "words": list(words)}
    planned_words = [*this.words, *_planned(this, asked, available, jobs, console), *launcher, this.schemes_word]
    first_seeds = ",".join(map(str, range(FIRST_SEEDS)))
    with suppress(Died):  # raised if all runs died
        screen = SweepJob(_job, say, lambda at: run_at(at).is_finished)
        run_application("posbench study", ["-m", *planned_words, f"seed={first_seeds}"], screen)
    tune(planned_words, _job, say, new_console(quiet=True))
    compared, _ = choose_rates(read_runs([this.folder], None, console)[0])
    finished = compared[compared["status"] == FINISHED]
    evaluate_runs([run_at(path) for path in finished["path"]], Request(jobs=jobs), new_console(quiet=True))
    return _conclude(this, command, console)


def _job(config: Config) -> Manifest:
    return train(config, new_console(quiet=True)).manifest


# ---------------------------------------------------------------- the plan


def _time_of(budget: str) -> float:
    # Return the seconds for training steps, 0 without a budget.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", budget or "0s")
    if match is None:
        raise ConfigError(f"--budget {budget} is not a time: give 30m, 2h or 1d")
    return SHARE * float(match[1]) * _UNITS[match[2]]


def _planned(this: Study, asked: Mapping[str, Any], available: float, jobs: int, console: Console) -> list[str]:
    """Return the words for tokens and seeds, and print their plan.

    Arguments: asked, what the command asks for; available, seconds for training steps, 0 without a budget.
    Raises: ConfigError if this folder has another study.
    """
    file = this.folder / "study.json"
    if file.is_file():
        record = read_json(file)
        changed = [key for key in asked if record.get(key) != asked[key]]
        if changed:
            was = f"{record.get(changed[0])} -> {asked[changed[0]]}"
            raise ConfigError(f"{this.folder} has another study ({changed[0]}: {was}): give experiment_name=NAME")
    else:
        record = {**asked, "chosen": []}
    planned = plan([*this.words, *record["chosen"], this.schemes_word], search=True)
    seconds_per_flop = _seconds(planned, jobs) / planned.flops
    if available and not record["chosen"]:
        record["chosen"] = _chosen(planned, seconds_per_flop * planned.flops, available, asked["words"])
        planned = plan([*this.words, *record["chosen"], this.schemes_word], search=True)
    seeds, seconds = planned.first.experiment.planned_seeds, seconds_per_flop * planned.flops
    console.out(f"{this.folder.name}: {this.scheme} against {listed(this.baselines)}")
    console.out(
        f"{count_of(planned.runs, 'run')} of {short_count(planned.tokens_a_run)} tokens: the search for the rates of "
        f"{len(this.choices)} schemes, with {seeds} seeds at the best two"
    )
    console.out(f"about {duration(seconds / SHARE)} here, {jobs} at a time")
    console.out(f"it finds gaps of {planned.detectable}")
    write_json(file, record)
    return list(record["chosen"])


def _seconds(planned: Plan, jobs: int) -> float:
    # Return how long the training steps take, with the cores shared by the runs at a time.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // jobs))
    _, rate = time_machine(planned.first, mfu=0.4)
    torch.set_num_threads(threads)
    return planned.flops / rate / min(jobs, torch.cuda.device_count() or jobs)


def _chosen(planned: Plan, seconds: float, available: float, words: Sequence[str]) -> list[str]:
    """Return words for the most seeds, and then the most tokens, that fit into the `available` seconds.

    Arguments: planned, at the tokens asked for, of which all steps take `seconds`. Raises: ConfigError if none fit.
    """
    train, tokens = planned.first.train, planned.tokens_a_run
    each = seconds / runs_per_scheme(planned.first.experiment.planned_seeds)  # a run of each scheme
    seeds = next((n for n in SEEDS if runs_per_scheme(n) * each <= available), SEEDS[-1])
    share = available / each / runs_per_scheme(seeds)  # of the tokens asked for, that each run may have
    least, chosen = 1.0, [f"experiment.planned_seeds={seeds}"]
    # Tokens that the user named stay; others may be fewer, or more up to one epoch.
    if not any(word.startswith(("train.tokens=", "train.steps=")) for word in words):
        least = LEAST_STEPS * train.tokens_per_step / tokens
        most = max(1.0, 1 / planned.epochs) if planned.epochs else share
        steps = int(tokens * min(share, most)) // train.tokens_per_step
        chosen.append(f"train.tokens={steps * train.tokens_per_step}")
    if share < least:
        minutes = math.ceil(least * each * runs_per_scheme(SEEDS[-1]) / SHARE / 60)
        raise ConfigError(f"--budget is too short for a search: give {minutes}m or more")
    return chosen


# ---------------------------------------------------------------- the end


def _conclude(this: Study, command: str, console: Console) -> int:
    # Report, pack, and print the sentence of each pair; return the status of the first.
    paths = report(this.folder, latex=True, console=console)
    comparison = build(*read_runs([this.folder], None, console))
    judgements: list[Judgement] = []
    for baseline in this.baselines:
        judgement = judge(this.folder, scheme=this.scheme, baseline=baseline)
        console.print(f"{paragraph('claim', judgement, comparison)}\n")
        for warning in judgement.warnings:
            say(f"warning: {warning}")
        judgements.append(judgement)
    console.print(str(judgements[0]))
    files = [path for path in paths if path.name in ("report.html", "loss.tex")]
    for folder in (this.folder, search_folder(this.folder)):
        # A pack is never rewritten: the same command gives the same runs.
        if free_name(folder).stem == folder.name:
            pack_experiment(folder, None, say)
        files.append(folder.with_name(f"{folder.name}.zip"))
    for path in files:
        console.out(str(path))
    console.out(f"again: {command}")
    return judgements[0].exit_status
