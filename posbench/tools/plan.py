"""Estimate what an experiment would cost before it is run: runs, FLOPs, memory, hours.

Memory is computed from counts of tensors (`training_memory`); `tests/tools/test_plan.py` compares it with a measured
peak.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from posbench.composition.compose import compose
from posbench.composition.sweep import sweep_of
from posbench.config import Config, ConfigError
from posbench.config.units import count_of, duration, short_bytes, short_count
from posbench.data import Problems, vocab_size
from posbench.data.text.preparation import find_prepared
from posbench.evaluation.protocols import EvalProtocol, protocol_named
from posbench.evaluation.protocols.order import WINDOWS
from posbench.model.architecture import Architecture, build_architecture
from posbench.model.decoder import Decoder, build_model
from posbench.model.layers import layer_matrices
from posbench.model.size import (
    forward_flops_per_token,
    num_parameters,
    training_flops_per_token,
    training_memory,
)
from posbench.runs.finding import place_named
from posbench.system.device import DATASHEET, choose_device, matmul_rate
from posbench.tools.bench import WARMUP_STEPS, TimedScheme
from posbench.training.optimizers.muon import flops_per_step

MOST_HOURS = 365 * 24.0  # hours on this machine above which `plan` says "more than a year"
MOST_SECONDS = 20.0  # longest time to spend on timing this machine


@dataclass(frozen=True)
class Plan:
    """The cost of an experiment. FLOPs are model FLOPs (`posbench.system.device`); memory and hours are estimates."""

    first: Config  # configuration of the sweep's first run
    schemes: list[str]
    seeds: int
    runs: int
    tokens_a_run: int  # training tokens of the first run
    tokens_in_all: int
    epochs: float | None  # epochs of the first run; None if its text is not prepared yet, or for a task
    flops: dict[str, float]  # FLOPs of all runs: training, validation during training (with order), evaluation
    device: str
    mfu: float
    gpus: int
    hours: float  # GPU-hours of all runs: training, validation and evaluation
    wall_hours: float  # hours if `gpus` of them are always busy
    machine: str | None  # the device of this machine, if it was timed
    machine_hours: float  # hours of all runs on this machine, one after another
    largest: Cost  # cost of the run that needs the most memory
    muon_shares: Mapping[str, float]  # scheme -> share of its parameters that Muon trains; {} with another optimizer
    is_search: bool = False
    detectable: str = ""  # gaps that a search's test finds


def plan(
    words: Sequence[str],
    device: str = "H100",
    mfu: float = 0.4,
    gpus: int = 1,
    time_here: bool = False,
    search: bool = False,
) -> Plan:
    """Return the estimated cost of the runs that `posbench train -m WORDS` would train.

    Arguments: words, configuration overrides; device, a GPU in `posbench.system.device.DATASHEET`; mfu, the share of
    its FLOP/s that training reaches; gpus, the number of GPUs, each training one run at a time; time_here, True to time
    a few steps on this machine; search, True to plan `posbench tune WORDS` instead: the search for learning rates.
    Raises: ConfigError for an unknown device, and for words that train would refuse.
    """
    if device not in DATASHEET:
        raise ConfigError(f"--device {device!r} is not known (known: {', '.join(DATASHEET)})")
    rate = DATASHEET[device]
    configs, seeds = _rows(words)
    seeds = runs_per_scheme(configs[0].experiment.planned_seeds) if search else seeds
    first, architecture = configs[0], build_architecture(configs[0])
    costs = [_cost(first, architecture), *(_cost(config, build_architecture(config)) for config in configs[1:])]
    largest = max(costs, key=lambda cost: sum(cost.memory.values()))
    text = find_prepared(first)
    flops = dict.fromkeys(costs[0].flops, 0.0)
    for cost in costs:
        for name, count in cost.flops.items():
            flops[name] += seeds * count
    hours = sum(flops.values()) / mfu / rate / 3600
    machine, machine_rate = _time_machine(first, architecture, mfu) if time_here else (None, math.inf)
    runs = seeds * len(configs)
    return Plan(
        first=first,
        schemes=list(dict.fromkeys(config.scheme.name for config in configs)),
        seeds=seeds,
        runs=runs,
        tokens_a_run=costs[0].tokens,
        tokens_in_all=seeds * sum(cost.tokens for cost in costs),
        epochs=costs[0].tokens / text.train.num_tokens if text is not None else None,
        flops=flops,
        device=device,
        mfu=mfu,
        gpus=gpus,
        hours=hours,
        wall_hours=math.ceil(runs / gpus) / runs * hours,
        machine=machine,
        machine_hours=sum(flops.values()) / machine_rate / 3600,
        largest=largest,
        muon_shares={
            config.scheme.name: cost.muon_share
            for config, cost in zip(configs, costs, strict=True)
            if config.train.optimizer == "muon"
        },
        is_search=search,
        detectable=_detectable(first, len({config.scheme.name for config in configs})) if search else "",
    )


def _detectable(config: Config, schemes: int) -> str:
    """Return the gaps that the search's test finds in 80 % of cases with 3, 5 and 8 seeds, as text.

    They are in nats, from the spread of gaps over seeds in the experiment's finished runs, or without any, in standard
    deviations. Arguments: schemes, the number of schemes.
    """
    pairs = len(fixed_pairs(config.experiment.primary)) or math.comb(schemes, 2)
    spread = math.nan
    with suppress(ConfigError):
        folder = place_named(config.experiment_name, Path(config.runs_dir))
        runs, _ = choose_rates(merge_searches(read(with_searches([folder]))[0]))
        losses = finished_runs(runs)[0].pivot(index="seed", columns="scheme", values="loss")
        spread = float(compare(losses)["sd"].median())
    gaps = [detectable(spread if spread > 0 else 1.0, n, LEVEL / max(1, pairs), KEPT) for n in (3, 5, 8)]
    texts = ", ".join(f"{gap:.2g}" for gap in gaps)
    unit = f"nats (gaps have a standard deviation of {spread:.2g} over seeds in {folder})" if spread > 0 else ""
    unit = unit or "standard deviations of a gap over seeds"
    return f"{texts} {unit} with 3, 5, 8 seeds, in 80 % of cases; {count_of(pairs, 'claimed pair')}"


def _time_machine(config: Config, architecture: Architecture, mfu: float) -> tuple[str, float]:
    """Return the name of this machine's device, and the model FLOP/s of uncompiled training steps on it.

    If a few steps would take too long, they are not timed, and the rate is `mfu` times the rate of a matrix product.
    """
    config = replace(config, train=replace(config.train, compile=False))
    device, entries = choose_device(config.train), vocab_size(config)
    flops_per_token = training_flops_per_token(architecture, entries)
    rate = mfu * matmul_rate(device)
    if (WARMUP_STEPS + 3) * flops_per_token * config.train.tokens_per_step / rate < MOST_SECONDS:
        rate = TimedScheme(config, device, build_model(config, entries, architecture)).rate(3) * flops_per_token
    return device.describe()["name"], rate


def _rows(words: Sequence[str]) -> tuple[list[Config], int]:
    """Return the run configurations of a sweep for one seed, and the number of seeds.

    Branches, shorter runs that start from a checkpoint of another run of the sweep, come last. Arguments: words,
    overrides as after `posbench train -m`.
    """
    swept = sweep_of(words)
    seeds = len(swept.pop("seed", [""]))
    single = [word for word in words if word.lstrip("+~").partition("=")[0] not in {*swept, "seed"}]
    trunks, branches = [], []
    for values in itertools.product(*swept.values()):
        run_words = [*single, *(f"{key}={value}" for key, value in zip(swept, values, strict=True))]
        trunk = compose(run_words)
        trunks.append(trunk)
        branches += [compose([*run_words, *more]) for more in trunk.branch_words()]
    return [*trunks, *branches], seeds


@dataclass(frozen=True)
class Cost:
    """The cost of one run: parameters, tokens, FLOPs by activity, and memory in bytes by purpose."""

    parameters: dict[str, int]
    tokens: int
    flops: dict[str, float]
    memory: dict[str, int]
    muon_share: float  # share of the parameters, the scheme's own included, that Muon trains


def _steps_of_trunk(config: Config) -> int:
    """Return the number of first steps that a longer run takes for this one, if it is named as a branch of one."""
    return config.train.decay_begins if config.trunk_name else 0


def _cost(config: Config, architecture: Architecture) -> Cost:
    entries = vocab_size(config)
    parameters = num_parameters(architecture, entries)
    train, settings = config.train, config.evaluation
    evaluation = sum(
        protocol.tokens_read(settings, length, max(lengths)) * forward_flops_per_token(architecture, entries, length)
        for protocol in map(protocol_named, settings.protocols)
        for lengths in [_windows(config, protocol)]
        for length in lengths
    )
    num_steps = train.num_steps - _steps_of_trunk(config)
    tokens = num_steps * train.tokens_per_step
    muon_flops = muon_parameters = 0
    with torch.device("meta"):
        model = Decoder(architecture, entries)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    if train.optimizer == "muon":
        muon_flops = flops_per_step(model, train.ns_steps)
        muon_parameters = sum(sizes[name] for name in layer_matrices(model))
    memory = training_memory(config, architecture, entries)
    memory["state"] -= 4 * muon_parameters  # one moment instead of two
    return Cost(
        parameters=parameters,
        muon_share=muon_parameters / sum(sizes.values()),
        tokens=tokens,
        flops={
            "training": tokens * training_flops_per_token(architecture, entries) + num_steps * muon_flops,
            "validation": _validation_flops(config, architecture, entries)
            + _order_flops(config, architecture, entries),
            "evaluation": evaluation,
        },
        memory=memory,
    )


def _validation_flops(config: Config, architecture: Architecture, vocab_size: int) -> float:
    """Return the FLOPs of all validations of one run: before the first step, during training, after the last step.

    A branch, which starts from another run's checkpoint, has only those after that checkpoint.
    """
    train, context = config.train, config.train.context_length
    tokens = max(train.validation_tokens, context) // context * context
    interval = train.steps_between_validations
    validations = 1 + (train.num_steps - 1) // interval + 1
    if config.trunk_name:
        validations -= 1 + train.decay_begins // interval  # the trunk has done these
    return validations * tokens * forward_flops_per_token(architecture, vocab_size, context)


def _order_flops(config: Config, architecture: Architecture, vocab_size: int) -> float:
    """Return the FLOPs that one run spends on scoring how much the order of distant tokens helps the model.

    It is 0 if `train.order_every` is not set. Each window is read twice (whole and shuffled), with logits for its
    second half only.
    """
    train, length = config.train, config.train.context_length
    if not train.order_every:
        return 0.0
    num_scores = sum(map(train.is_ordered, range(_steps_of_trunk(config) + 1, train.num_steps + 1)))
    body = forward_flops_per_token(architecture, 0, length)
    logits = forward_flops_per_token(architecture, vocab_size, length) - body
    return num_scores * 2 * WINDOWS * (length * body + (length - length // 2) * logits)


def _windows(config: Config, protocol: EvalProtocol) -> list[int]:
    """Return the window sizes in tokens, one for each length that the evaluation protocol scores."""
    configured = config.evaluation.lengths
    if not config.is_task:
        return protocol.lengths((), config.train.context_length, configured=configured)
    problems = Problems(config.data)
    return [*map(problems.window, protocol.lengths((), config.trained_length, problems.splits["test"], configured))]


def _muon_text(shares: Mapping[str, float]) -> str:
    """Return which share of their parameters Muon trains for these schemes, as text; "" for none."""
    schemes: dict[str, list[str]] = {}
    for scheme, share in shares.items():
        schemes.setdefault(f"{share:.0%}", []).append(scheme)
    parts = [f"{share} of the parameters ({', '.join(names)})" for share, names in schemes.items()]
    return f"muon trains {'; '.join(parts)}" if parts else ""


def show(plan: Plan, console: Console) -> None:
    """Print the estimated costs as a table of two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    first, memory, parameters = plan.first, plan.largest.memory, plan.largest.parameters
    time_here = (
        "more than a year" if plan.machine_hours > MOST_HOURS else f"about {duration(3600 * plan.machine_hours)}"
    )
    settings = plan.runs // (len(plan.schemes) * plan.seeds)
    are_branches = settings == 1 + len(first.train.branch_tokens)
    kind_of_setting = "lengths (each run and its branches)" if are_branches else "other settings"
    rows: dict[str, Any] = {
        "experiment": first.experiment.name + (f" (after {first.experiment.source})" * bool(first.experiment.source)),
        "runs": f"{plan.runs}: {count_of(len(plan.schemes), 'scheme')} ({', '.join(plan.schemes)}) x "
        + (
            f"{plan.seeds} ({NUM_RATES} rates with {FIRST_SEEDS} seeds, the best {KEPT} with "
            f"{plan.first.experiment.planned_seeds})"
            if plan.is_search
            else count_of(plan.seeds, "seed")
        )
        + (f" x {settings} {kind_of_setting}" if settings > 1 else ""),
        "parameters": f"{short_count(sum(parameters.values()))}: {short_count(parameters['body'])} in the layers, "
        f"{short_count(parameters['embedding'])} in the embeddings",
        "optimizer": _muon_text(plan.muon_shares),
        "tokens": f"{short_count(plan.tokens_a_run)} per run, {short_count(plan.tokens_in_all)} in all; context "
        f"{first.train.context_length:,}",
        "epochs": "unknown until the text is prepared (posbench prepare)"
        if plan.epochs is None
        else f"{plan.epochs:.2g} per run",
        "FLOPs": f"{plan.flops['training']:.3g} to train, {plan.flops['validation']:.3g} to validate during training, "
        f"{plan.flops['evaluation']:.3g} to evaluate",
        "memory": f"{short_bytes(sum(memory.values()))} per GPU (estimate): weights, gradients and moments "
        f"{short_bytes(memory['state'])}, activations {short_bytes(memory['activations'])}, "
        f"logits {short_bytes(memory['logits'])}",
        "on a GPU": duration(3600 * plan.hours)
        + (f" ({plan.hours:,.0f} GPU-hours)" if plan.hours >= 10 else "")
        + f" on one {plan.device} at {plan.mfu:.0%} of {DATASHEET[plan.device] / 1e12:,.3g} TFLOP/s"
        + (f"; {duration(3600 * plan.wall_hours)} on {plan.gpus} of them, one run on each" if plan.gpus > 1 else ""),
        "finds gaps of": plan.detectable,
        "here": f"{time_here} on this machine ({plan.machine}), one run at a time; measured now, at a load average of "
        f"{os.getloadavg()[0]:.1f} on {count_of(os.cpu_count() or 1, 'core')}",
    }
    for name, text in rows.items():
        if text and (name != "epochs" or not first.is_task):
            table.add_row(name, text)
    console.print(table)
