"""Estimate what an experiment would cost before it is run: runs, FLOPs, memory, hours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from posbench.analysis.agreement import finished_runs
from posbench.analysis.search import (
    FIRST_SEEDS,
    KEPT,
    NUM_RATES,
    choose_rates,
    merge_searches,
    runs_per_scheme,
    with_searches,
)
from posbench.analysis.statistics import LEVEL, compare, detectable, fixed_pairs
from posbench.analysis.table import read
from posbench.composition.compose import compose, config_dirs
from posbench.composition.setups import aliases, setups_named
from posbench.composition.sweep import sweep_of
from posbench.config import Config, ConfigError, chosen_experiment
from posbench.config.units import count_of, duration, short_bytes, short_count
from posbench.data import vocab_size
from posbench.data.text.preparation import find_prepared
from posbench.model.architecture import build_architecture
from posbench.model.decoder import Decoder, build_model
from posbench.model.layers import layer_matrices
from posbench.model.size import (
    cache_per_token,
    num_parameters,
    training_flops_per_token,
    training_memory,
)
from posbench.runs.finding import place_named
from posbench.system.device import DATASHEET, choose_device, matmul_rate
from posbench.tools.bench import WARMUP_STEPS, TimedScheme
from posbench.tools.tune import with_planned_seeds
from posbench.training.optimizers.muon import flops_per_step

MOST_HOURS = 365 * 24.0  # hours on this machine above which `plan` says "more than a year"
MOST_SECONDS = 20.0  # longest time to spend on timing this machine


@dataclass(frozen=True)
class Plan:
    """The estimated cost of training an experiment's runs, in model FLOPs. Evaluation comes on top."""

    first: Config  # configuration of the sweep's first run
    schemes: list[str]
    seeds: int
    runs: int
    tokens_a_run: int  # training tokens of the first run
    tokens_in_all: int
    epochs: float | None  # epochs of the first run; None if its text is not prepared yet, or for a task
    flops: float  # of all runs
    largest: Cost  # cost of the run that needs the most memory
    muon_shares: Mapping[str, float]  # scheme -> share of its parameters that Muon trains; {} with another optimizer
    caches: Mapping[str, float]  # scheme -> numbers that decoding keeps of each token, at the training length
    detectable: str  # gaps that a search's test finds; empty without a search


def plan(words: Sequence[str], search: bool = False) -> Plan:
    """Return the estimated cost of the runs that `posbench train -m WORDS` would train.

    Arguments: search, whether to plan `posbench tune WORDS` instead.
    Raises: ConfigError for words that train would refuse.
    """
    rows, seeds = _rows(with_planned_seeds(words) if search else words)
    configs = [config for config, _ in rows]
    first, costs = configs[0], [_cost(config, steps_of_trunk) for config, steps_of_trunk in rows]
    detects = ""
    schemes = list(dict.fromkeys(config.scheme.name for config in configs))
    if search:
        # A search has more runs for a scheme than the sweep has seeds.
        seeds = runs_per_scheme(first.experiment.planned_seeds)
        detects = _detectable(first, len(schemes))
    # Only text in the cache tells its size.
    text, epochs = find_prepared(first), None
    if text is not None:
        epochs = costs[0].tokens / text.train.num_tokens
    # The scheme's own parameters are AdamW's, so shares differ.
    muon_shares = {}
    for config, cost in zip(configs, costs, strict=True):
        if config.train.optimizer == "muon":
            muon_shares[config.scheme.name] = cost.muon_share
    return Plan(
        first=first,
        schemes=schemes,
        seeds=seeds,
        runs=seeds * len(configs),
        tokens_a_run=costs[0].tokens,
        tokens_in_all=seeds * sum(cost.tokens for cost in costs),
        epochs=epochs,
        flops=seeds * sum(cost.flops for cost in costs),  # the runs are of one seed, and seeds cost the same
        largest=max(costs, key=lambda cost: cost.memory),
        muon_shares=muon_shares,
        caches={config.scheme.name: cost.cache for config, cost in zip(configs, costs, strict=True)},
        detectable=detects,
    )


def _detectable(config: Config, schemes: int) -> str:
    """Return which gaps a search's test finds in 80 % of cases, as text, by number of seeds.

    Arguments: schemes, how many there are; all pairs of them count if none were planned.
    """
    experiment = chosen_experiment(config.to_mapping(), config.experiment_name)
    pairs = len(fixed_pairs(experiment.get("primary", ()))) or math.comb(schemes, 2)
    # The spread of gaps over seeds in the experiment's finished runs, if there are any.
    spread = math.nan
    with suppress(ConfigError):
        folder = place_named(config.experiment_name, Path(config.runs_dir))
        summary, _ = read(with_searches([folder]))
        runs, _ = choose_rates(merge_searches(summary))
        losses = finished_runs(runs)[0].pivot(index="seed", columns="scheme", values="loss")
        spread = float(compare(losses)["sd"].median())
    unit = "standard deviations of a gap over seeds"
    if spread > 0:
        unit = f"nats (gaps have a standard deviation of {spread:.2g} over seeds in {folder})"
    else:
        spread = 1.0  # unknown (NaN) or 0: gaps are in units of it
    level = LEVEL / max(1, pairs)  # after Bonferroni
    gaps = [detectable(spread, n, level, KEPT) for n in (3, 5, 8)]
    texts = ", ".join(f"{gap:.2g}" for gap in gaps)
    return f"{texts} {unit} with 3, 5, 8 seeds, in 80 % of cases; {count_of(pairs, 'claimed pair')}"


def time_machine(config: Config, mfu: float) -> tuple[str, float]:
    """Return the name of this machine's device, and the model FLOP/s that training reaches on it, not compiled."""
    config = replace(config, train=replace(config.train, compile=False))
    device, entries, architecture = choose_device(config.train), vocab_size(config), build_architecture(config)
    flops_per_token = training_flops_per_token(architecture, entries)
    # If a few steps would take too long, the rate is a share of the rate of a matrix product.
    rate = mfu * matmul_rate(device)
    if (WARMUP_STEPS + 3) * flops_per_token * config.train.tokens_per_step / rate < MOST_SECONDS:
        rate = TimedScheme(config, device, build_model(config, entries, architecture)).rate(3) * flops_per_token
    return device.describe()["name"], rate


def _rows(words: Sequence[str]) -> tuple[list[tuple[Config, int]], int]:
    """Return (configuration, first steps that its trunk has trained) of a sweep's runs of one seed, and the seeds.

    Runs that start from a checkpoint of another one come last: branches (shorter runs) and arms (other settings).
    """
    swept = sweep_of(words)
    seeds = 1
    # Each seed of an experiment with factors has a setup of its own.
    if not setups_named(words, *config_dirs(words)):
        seeds = len(swept.pop("seed", [""]))  # one if no seeds are swept
    # Seeds and swept values are set for each run below.
    single = [word for word in words if word.lstrip("+~").partition("=")[0] not in {*swept, "seed"}]
    trunks, rest = [], []
    for values in itertools.product(*swept.values()):
        run_words = [*single, *(f"{key}={value}" for key, value in zip(swept, values, strict=True))]
        trunk = compose(run_words)
        trunks.append((trunk, _steps_of_trunk(trunk)))
        for more in trunk.branch_words():
            branch = compose([*run_words, *more])
            rest.append((branch, _steps_of_trunk(branch)))
        for more in trunk.arm_words():
            # What an arm takes from its trunk's checkpoint is not there yet, and costs nothing else.
            known = [word for word in more if word.startswith(("train.", "scheme=", "scheme.name="))]
            known = [word for word in known if not word.startswith(("train.from_run=", "train.keep_schedule="))]
            rest.append((compose([*run_words, *known]), trunk.train.decay_begins))
    return [*trunks, *rest], seeds


def _steps_of_trunk(config: Config) -> int:
    return config.train.decay_begins if config.trunk_name else 0


@dataclass(frozen=True)
class Cost:
    """The cost of training one run."""

    parameters: dict[str, int]
    tokens: int
    flops: float
    memory: int  # bytes
    cache: float  # numbers that decoding keeps of each token
    muon_share: float  # share of the parameters, the scheme's own included, that Muon trains


def _cost(config: Config, steps_of_trunk: int) -> Cost:
    entries, train, architecture = vocab_size(config), config.train, build_architecture(config)
    # The trunk has taken the first steps, so they cost nothing again.
    num_steps = train.num_steps - steps_of_trunk
    tokens = num_steps * train.tokens_per_step
    flops = tokens * training_flops_per_token(architecture, entries)
    # On the device `meta`, weights have sizes and no memory.
    with torch.device("meta"):
        model = Decoder(architecture, entries)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    muon_parameters = 0
    if train.optimizer == "muon":
        flops += num_steps * flops_per_step(model, train.ns_steps)
        muon_parameters = sum(sizes[name] for name in layer_matrices(model))
    return Cost(
        parameters=num_parameters(architecture, entries),
        tokens=tokens,
        flops=flops,
        memory=sum(training_memory(config, architecture, entries).values())
        - 4 * muon_parameters,  # one moment, not two
        cache=cache_per_token(architecture),
        muon_share=muon_parameters / sum(sizes.values()),
    )


def _by_figure(figures: Mapping[str, float], form: str) -> str:
    """Return figures as text, each with the schemes that have it if they differ. Arguments: form, such as `{:.0%}`."""
    schemes: dict[str, list[str]] = {}
    for scheme, figure in figures.items():
        schemes.setdefault(form.format(figure), []).append(scheme)
    if len(schemes) == 1:
        return next(iter(schemes))
    return "; ".join(f"{figure} ({', '.join(names)})" for figure, names in schemes.items())


def show(plan: Plan, device: str, mfu: float, gpus: int, console: Console) -> None:
    """Print the estimated costs as a table of two columns, after timing this machine.

    Arguments: device, a GPU of DATASHEET; mfu, the share of its FLOP/s that training reaches; gpus, their number.
    """
    if device not in DATASHEET:
        raise ConfigError(f"--device {device!r} is not known (known: {', '.join(DATASHEET)})")
    hours = plan.flops / mfu / DATASHEET[device] / 3600
    machine, machine_rate = time_machine(plan.first, mfu)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    first, parameters = plan.first, plan.largest.parameters
    table.add_row("experiment", first.experiment_name)
    table.add_row("runs", _runs_text(plan))
    size = short_count(sum(parameters.values()))
    body, embedding = short_count(parameters["body"]), short_count(parameters["embedding"])
    table.add_row("parameters", f"{size}: {body} in the layers, {embedding} in the embeddings")
    if first.experiment.setups:
        table.add_row("setups", aliases(len(first.experiment.setups)))
    if plan.muon_shares:
        table.add_row("optimizer", f"muon trains {_by_figure(plan.muon_shares, '{:.0%} of the parameters')}")
    in_all, context = short_count(plan.tokens_in_all), f"{first.train.context_length:,}"
    table.add_row("tokens", f"{short_count(plan.tokens_a_run)} per run, {in_all} in all; context {context}")
    if plan.epochs is not None:
        table.add_row("epochs", f"{plan.epochs:.2g} per run")
    elif not first.is_task:
        table.add_row("epochs", "unknown until the text is prepared (posbench prepare)")
    table.add_row("FLOPs", f"{plan.flops:.3g} to train")
    table.add_row("memory", f"about {short_bytes(plan.largest.memory)} per GPU")
    table.add_row("cache", _by_figure(plan.caches, "{:,.0f} numbers a token"))
    on_gpus = f"{_time(hours)} on one {device} at {mfu:.0%} of {DATASHEET[device] / 1e12:,.3g} TFLOP/s"
    if gpus > 1:
        # A run takes `hours / runs` on average; each GPU trains one after the other.
        wall_hours = math.ceil(plan.runs / gpus) / plan.runs * hours
        on_gpus += f"; {_time(wall_hours)} on {gpus} of them, one run on each"
    table.add_row("on a GPU", on_gpus)
    if plan.detectable:
        table.add_row("finds gaps of", plan.detectable)
    machine_hours = plan.flops / machine_rate / 3600
    table.add_row("here", f"{_time(machine_hours)} on this machine ({machine}), one run at a time")
    console.print(table)


def _time(hours: float) -> str:
    if hours > MOST_HOURS:
        return "more than a year"
    return f"about {duration(3600 * hours)}"


def _runs_text(plan: Plan) -> str:
    seeds = count_of(plan.seeds, "seed")
    if plan.detectable:
        planned = plan.first.experiment.planned_seeds
        seeds = f"{plan.seeds} ({NUM_RATES} rates with {FIRST_SEEDS} seeds, the best {KEPT} with {planned})"
    text = f"{plan.runs}: {count_of(len(plan.schemes), 'scheme')} ({', '.join(plan.schemes)}) x {seeds}"
    settings = plan.runs // (len(plan.schemes) * plan.seeds)
    if settings == 1:
        return text
    are_branches = settings == 1 + len(plan.first.train.branch_tokens)
    kind = "lengths (each run and its branches)" if are_branches else "other settings"
    return f"{text} x {settings} {kind}"
