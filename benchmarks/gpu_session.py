"""Check posbench on a GPU: are its numbers right there, is it fast there, and what is a first reference table?

    python -m benchmarks.gpu_session --output gpu --rehearse                # tiny models on the CPU: minutes
    python -m benchmarks.gpu_session --output gpu                           # on the GPU: everything, in order
    python -m benchmarks.gpu_session --output gpu --only 'speed*' --minutes 9
    python -m benchmarks.gpu_session --output gpu --only 'reference*' data.path='books/*.parquet'

Each item runs in its own process with a time limit, and writes its figures to OUTPUT/<item>.json as it measures them;
its output goes to OUTPUT/<item>.log. A failure does not stop the others. Repeat the command to run the remaining items;
delete an item's JSON file to run it again. Items that measure no speed run `--jobs` at a time. Overrides at the end of
the command are added to the reference runs (`experiment=kexue_25m`).
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

import posbench
from benchmarks import peers
from benchmarks.shapes import SHAPES as SIZES
from benchmarks.shapes import config_of
from posbench.catalogue.choices import choices
from posbench.data import Batch
from posbench.runs import Run
from posbench.system.device import Device, choose_device
from posbench.training.stack import Stack
from posbench.training.stacked_runs import train_stacked
from posbench.training.step import TrainingStep
from posbench.verify.certificates import ROUNDINGS
from posbench.verify.gradients import gradients_of, training_errors
from posbench.verify.measures import path_errors
from posbench.verify.random_model import RandomModel, certificate_config, random_tokens

Figures = dict[str, Any]
FORMATS = {"fp32": ("float32", 2.0**-24), "bf16": ("bfloat16", 2.0**-8)}
RAGGED = 333  # tokens: no multiple of 128, the tile of FlexAttention
BIASES = ("alibi", "t5", "kerple", "fire", "shaw", "transformer_xl", "fox", "fox_qk_rope", "cope", "dape")
REFERENCE = ("qk_rope", "vo_rope", "nope", "qkvo_rope", "alibi")  # the most important first
LATER = ("k_rope", "qkv_rope", "q_rope", "v_rope", "o_rope", "sinusoidal")  # when these have three seeds
SPEED = "posbench nope,posbench qk_rope,posbench alibi,transformers Llama,plain GPT-2"
SHAPES = ("125m", "350m", "25m", "1b")
SAME_LOSS = 0.01  # nats per token between a resumed run and an uninterrupted one
NEAR_GRADIENT = 0.05  # relative error of a gradient between two orders of bfloat16 sums
SAME_STACK = 1e-4  # relative difference of losses between a compiled stack and plain code, in the first steps
WARM_STEPS, TIMED_STEPS = 5, 50
SIZES_OF_STACKS = (1, 8, 40, 100)
SCORERS = 3  # processes that score a stack's runs
NEAR_LOSS = 0.05  # nats per token between the ends of a run on the GPU and on the CPU, which sum in other orders


@dataclass(frozen=True)
class Session:
    """The output folder and the size of this session."""

    output: Path
    rehearse: bool
    overrides: tuple[str, ...]  # of the reference runs

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


@dataclass(frozen=True)
class Item:
    """A task of the session. `run` yields figures as it measures them, and raises if something is wrong."""

    name: str
    run: Callable[[Session], Iterator[Figures]]
    limit: float  # seconds, after which its process is killed
    alone: bool = False  # whether it measures speed, so that nothing else may run


@dataclass(frozen=True)
class Part:
    """Runs of one experiment in a grid: how many seeds at each rate."""

    experiment: str
    words: tuple[str, ...]
    seeds: dict[str, int]


SEEDS_8 = {"5e-4": 2, "1e-3": 8, "2e-3": 8, "4e-3": 8, "8e-3": 2}
SEEDS_5 = {"5e-4": 2, "1e-3": 5, "2e-3": 5, "4e-3": 5, "8e-3": 2}
MUON_8 = Part("headline_gpu_muon", (), SEEDS_8)
MUON_5 = Part("headline_gpu_muon", (), SEEDS_5)
ADAMW_8 = Part("headline_gpu_adamw", ("train.optimizer=adamw",), SEEDS_8)
ADAMW_5 = Part("headline_gpu_adamw", ("train.optimizer=adamw",), SEEDS_5)
# Controls: AdamW with all but the layers' matrices at Muon's rate, and Muon that does not orthogonalise.
TABLES = Part("headline_gpu_adamw_tables", ("train.optimizer=adamw", "train.matrix_lr_factor=0.5"), {"4e-3": 8})
NS0 = Part("headline_gpu_muon_ns0", ("train.ns_steps=0",), {"2e-3": 8, "4e-3": 8})
GRIDS = [  # the most important first; schemes of the headline
    ("muon-qk_rope", "qk_rope", [MUON_8]),
    ("adamw-qk_rope", "qk_rope", [ADAMW_8, TABLES]),
    ("muon-alibi", "alibi", [MUON_8]),
    ("adamw-alibi", "alibi", [ADAMW_8, TABLES]),
    ("ns0-qk_rope", "qk_rope", [NS0]),
    ("ns0-alibi", "alibi", [NS0]),
    ("muon-vo_rope", "vo_rope", [MUON_5]),
    ("adamw-vo_rope", "vo_rope", [ADAMW_5]),
    ("muon-nope", "nope", [MUON_5]),
    ("adamw-nope", "nope", [ADAMW_5]),
]


def items_of(session: Session) -> list[Item]:
    """Return the items, the most important first."""
    if session.rehearse:
        return [
            Item("certificates-alibi", partial(certificates, scheme="alibi"), 120),
            Item("resume-qk_rope", partial(resume, scheme="qk_rope"), 400),
            Item("gradients-t5", partial(gradients, scheme="t5"), 120),
            Item("beside-cpu-qk_rope", partial(beside_cpu, scheme="qk_rope"), 240),
            Item("shape-A", partial(shape_gradients, shape="A"), 120),
            Item("warm-A", partial(speed, shape="A", rounds=1, steps=1), 400),
            Item("speed-A", partial(speed, shape="A"), 400, alone=True),
            Item("alone-tiny-adamw", partial(alone_speed, model="tiny", optimizer="adamw"), 240),
            Item(
                "stack-tiny-alibi-muon-3",
                partial(stack_speed, case=("tiny", "alibi", "muon", 3)),
                240,
            ),
            Item("grid-adamw-alibi", partial(stacked_grid, scheme="alibi", parts=[ADAMW_8, TABLES]), 600),
            Item("reference-nope-0", partial(reference, scheme="nope", seed=0), 240),
        ]
    certified = dict.fromkeys((*REFERENCE, *sorted(choices("scheme"))))
    return [
        *(Item(f"resume-{scheme}", partial(resume, scheme=scheme), 500) for scheme in ("t5", "qk_rope")),
        *(Item(f"beside-cpu-{scheme}", partial(beside_cpu, scheme=scheme), 500) for scheme in ("qk_rope", "alibi")),
        # Compiled code is kept on disk: afterwards `speed` need not wait for compilers.
        *(Item(f"warm-{shape}", partial(speed, shape=shape, rounds=1, steps=1), 500) for shape in SHAPES),
        *(Item(f"shape-{shape}", partial(shape_gradients, shape=shape), 300) for shape in SHAPES),
        *(Item(f"certificates-{name}", partial(certificates, scheme=name), 400) for name in certified),
        *(Item(f"gradients-{scheme}", partial(gradients, scheme=scheme), 300) for scheme in BIASES),
        *(Item(f"speed-{shape}", partial(speed, shape=shape), 300, alone=True) for shape in SHAPES),
        *(
            Item(f"grid-{name}", partial(stacked_grid, scheme=scheme, parts=parts), 500)
            for name, scheme, parts in GRIDS
        ),
        *(
            Item(f"alone-{model}-{optimizer}", partial(alone_speed, model=model, optimizer=optimizer), 200)
            for model in ("headline", "3m", "25m")
            for optimizer in ("adamw", "muon")
        ),
        *(
            Item(f"stack-{'-'.join(map(str, case))}", partial(stack_speed, case=case), 300)
            for case in itertools.product(STACKED, REFERENCE[:2], ("adamw", "muon"), SIZES_OF_STACKS)
        ),
        *(
            Item(f"reference-{scheme}-{seed}", partial(reference, scheme=scheme, seed=seed), 600, alone=True)
            for schemes in (REFERENCE, LATER)
            for seed in (0, 1, 2)
            for scheme in schemes
        ),
    ]


def certificates(session: Session, scheme: str) -> Iterator[Figures]:
    """Compare all kernels, pieces, hooks and gradients on the device, eager and compiled, with float64.

    Errors are root mean squares in roundings of the number format, as in `posbench verify`.
    """
    wrong: dict[str, float] = {}
    with torch.no_grad():
        random_model = RandomModel.build(certificate_config(scheme))
        # Roundings change the gradients of piecewise-linear biases at their kinks; float64 shows that they are right.
        yield {"largest_relative_error_of_a_float64_gradient": max(float64_errors(random_model, session.device))}
        for name, (dtype, rounding) in FORMATS.items():
            errors: dict[str, float] = {}
            compiled = not session.rehearse
            for path, error in path_errors(random_model, getattr(torch, dtype), rounding, compiled, (session.device,)):
                errors[path] = round(error, 3)
                yield {name: {"limit": ROUNDINGS[name], "errors": errors}}
            wrong |= errors_above(errors, ROUNDINGS[name])
    if wrong:
        raise ValueError(f"above the limit: {wrong}")


def float64_errors(random_model: RandomModel, device: str) -> Iterator[float]:
    """Yield the difference of each float64 gradient between device and CPU, relative to the setting's largest norm."""
    on_device = copy.deepcopy(random_model.wide).to(device)
    for setting in random_model.settings:
        expected, measured = (
            gradients_of(model, random_model, dict(model.named_parameters()), setting)
            for model in (random_model.wide, on_device)
        )
        largest = max(float(gradient.norm()) for gradient in expected.values())
        yield from (float((measured[name] - gradient).norm()) / largest for name, gradient in expected.items())


def shape_gradients(session: Session, shape: str) -> Iterator[Figures]:
    """Compare gradients of compiled and eager bfloat16 blocks at a training shape, with two of its layers.

    Large reductions compile to other kernels than the small ones of certificates.
    """
    size = replace(SIZES[shape], layers=2)
    model = posbench.build_model(config_of(size, "qk_rope", "bfloat16", True), size.vocab).to(session.device)
    model.compute_dtype = torch.bfloat16
    drawn = torch.randint(size.vocab, (size.batch, size.context + 1), generator=torch.Generator().manual_seed(0))
    tokens = drawn.to(session.device)

    def gradients_now() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model.loss(tokens[:, :-1], tokens[:, 1:]), list(model.parameters())))

    eager = gradients_now()
    model.compile_blocks()
    compiled = gradients_now()
    names = [name for name, _ in model.named_parameters()]
    errors = {
        name: round(float((gradient - expected).norm() / expected.norm()), 5)
        for name, gradient, expected in zip(names, compiled, eager, strict=True)
    }
    yield {"relative_errors": errors}
    if wrong := errors_above(errors, NEAR_GRADIENT):
        raise ValueError(f"compiled and eager gradients differ: {wrong}")


def gradients(session: Session, scheme: str) -> Iterator[Figures]:
    """Compare gradients of all weights with float64 in a window of `RAGGED` tokens, which ends within a tile."""
    wrong: dict[str, float] = {}
    with torch.no_grad():
        random_model = replace(RandomModel.build(certificate_config(scheme)), tokens=random_tokens(RAGGED))
        for name, (dtype_name, rounding) in FORMATS.items():
            dtype = getattr(torch, dtype_name)
            narrow = copy.deepcopy(random_model.narrow).to(session.device)
            narrow.compute_dtype = dtype
            compiled = not session.rehearse
            errors = {path: round(e, 3) for path, e in training_errors(random_model, narrow, dtype, rounding, compiled)}
            yield {name: {"limit": ROUNDINGS[name], "errors": errors}}
            wrong |= errors_above(errors, ROUNDINGS[name])
    if wrong:
        raise ValueError(f"above the limit: {wrong}")


def errors_above(errors: dict[str, float], limit: float) -> dict[str, float]:
    """Return the paths whose error is above the limit or NaN."""
    return {path: error for path, error in errors.items() if not error <= limit}


def run_overrides(session: Session, name: str, folder: str = "runs") -> list[str]:
    """Return the overrides of every run that the session trains."""
    overrides = [f"runs_dir={session.output / folder}", f"data.cache_dir={session.output / 'cache'}", "tracking=none"]
    return [*overrides, f"experiment_name={name}", f"train.device={session.device}"]


TINY = ["model=tiny", "tokenizer=bytes", "train.batch_size=4", "train.dtype=float32"]
TINY += ["train.context_length=64", "train.compile=false", "train.validation_tokens=1024", "train.lr=1e-3"]


def resume(session: Session, scheme: str) -> Iterator[Figures]:
    """Kill a run after its first checkpoint and resume it; compare it with two uninterrupted runs.

    If the two end with the same bytes, the resumed run must too. Otherwise kernels sum in no fixed order (learned
    biases add their gradients atomically), and its loss must be within `SAME_LOSS`.
    """
    size = ["model=25m", "train.context_length=1024", "train.batch_size=16", "train.dtype=bfloat16", "train.lr=1e-3"]
    size = TINY if session.rehearse else [*size, "train.compile=true", "train.validation_tokens=65536"]
    overrides = [f"scheme={scheme}", *size, "train.steps=300", "train.checkpoint_every=30"]
    names = [f"{kind}-{scheme}" for kind in ("killed", "alone", "again")]
    for name in names:
        shutil.rmtree(session.output / "runs" / name, ignore_errors=True)
    killed = session.output / "runs" / names[0] / scheme / "seed=0"
    command = [sys.executable, "-m", "posbench", "train", *overrides, *run_overrides(session, names[0])]
    process = subprocess.Popen(command)
    while process.poll() is None and not list(killed.glob("checkpoints/step=*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise ValueError(f"training ended by itself, with exit status {process.returncode}")
    for name in names:  # the first of them is resumed
        arguments = [*overrides, *run_overrides(session, name)]
        subprocess.run([sys.executable, "-m", "posbench", "train", *arguments], check=True)
    manifests = [posbench.load_run(session.output / "runs" / name / scheme / "seed=0").manifest for name in names]
    losses = [float(manifest.loss or math.nan) for manifest in manifests]
    resumed, alone, again = [manifest.weights for manifest in manifests]
    batches = {manifest.fingerprints.batches for manifest in manifests}
    yield {
        "losses": dict(zip(("resumed", "alone", "again"), losses, strict=True)),
        "same_batches": len(batches) == 1,
        "two_runs_are_byte_equal": alone == again,
        "resumed_is_byte_equal": resumed == alone,
    }
    if len(batches) > 1 or not abs(losses[0] - losses[1]) < SAME_LOSS or (alone == again) != (resumed == alone):
        raise ValueError(f"the resumed run differs: losses {losses}")


def speed(session: Session, shape: str, rounds: int = 5, steps: int = 10) -> Iterator[Figures]:
    """Time training steps of posbench, Hugging Face's Llama and a plain GPT-2 in turn (benchmarks.peers).

    Llama starts from our weights, and its first loss must equal ours.
    """
    dtype, only, compiled, is_warming = "bfloat16", SPEED, [True], rounds == 1
    if session.rehearse:
        dtype, only, compiled, rounds, steps = "float32", "posbench qk_rope,plain GPT-2", [False], 1, 1
    elif shape == "125m":
        only, compiled = only.replace("alibi", "alibi,posbench qkvo_rope"), [False, True]
    elif shape == "1b":
        rounds, steps = min(rounds, 3), min(steps, 5)
    alone = is_warming or shape == "1b"  # memory has room for one model at a time, and rounds do not alternate
    result = peers.compare(shape, dtype, compiled, rounds, steps, only, keep=True, alone=alone)
    peers.show(result)
    yield result
    if result["failed"]:
        raise ValueError(f"failed: {result['failed']}")


def beside_cpu(session: Session, scheme: str) -> Iterator[Figures]:
    """Train 300 steps of one float32 run on the device and on the CPU, and compare their losses."""
    size = ["model=small", "train.context_length=256", "train.batch_size=4", "train.lr=1e-3"]
    size = TINY if session.rehearse else [*size, "tokenizer.vocab_size=4096", "train.validation_tokens=16384"]
    overrides = [f"scheme={scheme}", *size, "train.steps=300", "train.log_every=10", "train.dtype=float32"]
    losses: dict[str, list[float]] = {}
    for device in (session.device, "cpu"):
        name = f"beside-{device}-{len(losses)}"
        run = posbench.train([*overrides, *run_overrides(session, name), f"train.device={device}"])
        losses[f"{len(losses)} {device}"] = [float(loss) for loss in run.metrics["loss"]]
        yield {"losses": losses}
    differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    yield {"largest_difference": max(differences), "last_difference": differences[-1]}
    if not differences[-1] < NEAR_LOSS:
        raise ValueError(f"the last losses are {differences[-1]} nats per token apart")


def reference(session: Session, scheme: str, seed: int) -> Iterator[Figures]:
    """Train and evaluate one run of `kexue_25m`, and pack all runs so far without their weights."""
    tiny = [*TINY, "data.path=posbench", "train.steps=20", "evaluation.lengths=[64,128]", "evaluation.windows=4"]
    overrides = [f"scheme={scheme}", f"seed={seed}", "experiment=kexue_25m", *(tiny if session.rehearse else [])]
    run = posbench.train([*overrides, *run_overrides(session, "kexue_25m"), *session.overrides])
    rate = run.manifest.costs.tokens_per_second if run.manifest.costs else None
    yield {"loss": run.manifest.loss, "tokens_per_second": rate}
    table = posbench.evaluate(run, quiet=True)
    yield {"losses": {f"{row.protocol}@{row.length}": row.loss for row in table.itertuples()}}
    pack = session.output / "kexue_25m.zip"
    pack.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "posbench", "pack", str(run.path.parents[1]), str(pack)], check=True)


# Models whose stacked steps are timed, as overrides.
LARGER = ["experiment=headline_muon", "model.num_heads=8"]
STACKED = {
    "tiny": TINY,
    "headline": ["experiment=headline_muon"],
    "3m": [*LARGER, "model.d_model=256", "model.num_layers=4"],
    "25m": [*LARGER, "model.d_model=512", "model.num_layers=8", "train.context_length=512", "train.batch_size=8"],
}


def alone_speed(session: Session, model: str, optimizer: str) -> Iterator[Figures]:
    """Time the training steps of one run of qk_rope, as `posbench train` takes them."""
    config = posbench.compose([*STACKED[model], f"train.optimizer={optimizer}", f"train.device={session.device}"])
    device = choose_device(config.train)
    step = TrainingStep(config, posbench.build_model(config, config.tokenizer.num_entries), device)
    sent = random_batches(config, 1)[0].each(device.send)
    yield {"runs": 1, **speed_of(lambda n: step(n, sent), config, 1, device, session)}


def stack_speed(session: Session, case: tuple[str, str, str, int]) -> Iterator[Figures]:
    """Time the steps of runs that train as one, compiled. The first steps must be those of plain code.

    Arguments: case, model, scheme, optimizer and number of runs.
    """
    model, scheme, optimizer, size = case
    overrides = [*STACKED[model], f"scheme={scheme}", f"train.optimizer={optimizer}", f"train.device={session.device}"]
    config = posbench.compose(overrides)
    device = replace(choose_device(config.train), is_stacked=True)
    configs = [replace(config, seed=seed) for seed in range(size)]
    batches = random_batches(config, size)
    plain, compiled = (stack_of(configs, replace(device, compiled=is_compiled)) for is_compiled in (False, True))
    began, differences = time.monotonic(), []
    for n in range(2 * WARM_STEPS):  # the graph is recorded among these
        expected, losses = (stack(size * [n], batches)[:, 0] for stack in (plain, compiled))
        differences.append(float((losses / expected - 1).abs().max()))
    yield {"seconds_of_first_steps": round(time.monotonic() - began, 1), "relative_differences": differences}
    del plain
    yield {"runs": size, **speed_of(lambda n: compiled(size * [n], batches), config, size, device, session)}
    if not max(differences) < SAME_STACK:
        raise ValueError(f"losses of the compiled stack differ from plain code: {differences}")


def stack_of(configs: list[posbench.Config], device: Device) -> Stack:
    entries = configs[0].tokenizer.num_entries
    return Stack([TrainingStep(each, posbench.build_model(each, entries), device) for each in configs], configs)


def random_batches(config: posbench.Config, count: int) -> list[Batch]:
    """Return `count` batches of random tokens."""
    random, shape = np.random.default_rng(0), (config.train.batch_size, config.train.context_length + 1)
    return [Batch(random.integers(0, config.tokenizer.num_entries, shape)) for _ in range(count)]


def speed_of(
    step: Callable[[int], object], config: posbench.Config, size: int, device: Device, session: Session
) -> Figures:
    """Return the speed of steps that train `size` runs, while no other item is timed.

    Returns: milliseconds of a step, tokens per second, runs of this configuration per minute, peak memory in bytes.
    """
    for n in range(WARM_STEPS):
        step(n)
    device.wait()
    with FileLock(session.output / "timing.lock"):
        began = time.monotonic()
        for n in range(TIMED_STEPS):
            step(n)
        device.wait()
        seconds = (time.monotonic() - began) / TIMED_STEPS
    rate = size * config.train.tokens_per_step / seconds
    return {
        "milliseconds": round(1000 * seconds, 3),
        "tokens_per_second": round(rate),
        "runs_per_minute": round(60 * size / (seconds * config.train.num_steps), 2),
        "peak_bytes": device.peak_memory_bytes(),
    }


def stacked_grid(session: Session, scheme: str, parts: Sequence[Part]) -> Iterator[Figures]:
    """Train a scheme's runs of several rates, seeds and experiments as one stack; score those at the two best rates.

    The runs go to the folders of searches (`posbench tune`), OUTPUT/runs/<experiment>-tune/lr=<rate>.
    """
    configs = [config for part in parts for config in configs_of(session, scheme, part)]
    began = time.monotonic()
    outcomes = train_stacked(configs)
    runs = [run for run in outcomes if isinstance(run, Run)]
    yield {"train_seconds": round(time.monotonic() - began, 1), "runs": len(runs), "died": len(outcomes) - len(runs)}
    yield {"losses": {str(run.path.relative_to(session.output)): run.manifest.loss for run in runs}}
    paths = [str(run.path) for run in at_best_rates(runs)]
    protocols = ["--protocol", "fixed" if session.rehearse else "fixed,order"]
    scoring = [
        subprocess.Popen([sys.executable, "-m", "posbench", "eval", *paths[first::SCORERS], *protocols])
        for first in range(SCORERS)
    ]
    failed = sum(process.wait() != 0 for process in scoring)
    yield {"seconds_with_scores": round(time.monotonic() - began, 1), "scored": len(paths)}
    if failed or len(runs) < len(outcomes):
        raise ValueError(f"{failed} of {SCORERS} scoring processes failed, {len(outcomes) - len(runs)} runs died")


def configs_of(session: Session, scheme: str, part: Part) -> Iterator[posbench.Config]:
    """Yield the configurations of a part of a grid."""
    small = [*TINY, "data=files", f"data.path={Path(posbench.__file__).parent}", "train.tokens=10240"]
    small += ["train.trunk_tokens=null", "train.order_every=null", "evaluation.lengths=[64,128]"]
    small += ["evaluation.protocols=[fixed]"]
    for rate, seeds in part.seeds.items():
        words = ["experiment=headline_muon", f"scheme={scheme}", f"scheme.lr={rate}", *part.words]
        words += [*(small if session.rehearse else []), "train.checkpoint_every=100_000"]
        words += run_overrides(session, f"'lr={float(rate)!r}'", f"runs/{part.experiment}-tune")
        config = posbench.compose([*words, *session.overrides])
        for seed in range(2 if session.rehearse else seeds):
            yield replace(config, seed=seed)


def at_best_rates(runs: Sequence[Run]) -> list[Run]:
    """Return the runs at the two rates of each experiment with the lowest mean losses."""
    by_rate: dict[Path, list[Run]] = {}
    for run in runs:
        by_rate.setdefault(run.path.parents[1], []).append(run)
    chosen = []
    for folder in {rate.parent for rate in by_rate}:
        rates = [of_rate for rate, of_rate in by_rate.items() if rate.parent == folder]
        rates.sort(key=lambda of_rate: np.mean([run.manifest.loss for run in of_rate]))
        chosen += [run for of_rate in rates[:2] for run in of_rate]
    return chosen


def do(item: Item, session: Session) -> None:
    """Run an item in this process, and write its figures as they come."""
    file = session.output / f"{item.name}.json"
    gpu = "none" if session.rehearse else torch.cuda.get_device_name()
    record: Figures = {"item": item.name, "status": "running", "gpu": gpu, "torch": torch.__version__}
    began = time.monotonic()
    try:
        for figures in item.run(session):
            record |= figures
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        record["status"] = "done"
    except Exception as error:
        traceback.print_exc()
        record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    record["seconds"] = round(time.monotonic() - began, 1)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def supervise(item: Item, session: Session, arguments: list[str], until: float) -> str:
    """Run an item in its own process with `arguments`, until the time `until` at most, and return its status."""
    file = session.output / f"{item.name}.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8"))["status"] in ("done", "failed"):
        return "done before"
    limit = min(item.limit, until - time.monotonic())
    if limit < item.limit / 4:
        return "not begun: no time left"
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--item", item.name, *arguments]
    with (session.output / f"{item.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
            end = f"stopped with exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the runs that it started
            end = f"stopped after {limit:.0f} s"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"item": item.name}
    if end:
        file.write_text(json.dumps(record | {"status": end}, indent=1) + "\n", encoding="utf-8")
    return end or f"{record['status']} in {record['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the reference runs, as for posbench train")
    parser.add_argument("--output", type=Path, required=True, help="the folder for results")
    parser.add_argument("--rehearse", action="store_true", help="run one small item of each sort on the CPU")
    parser.add_argument(
        "--only", default="*", help="run items whose names match one of these patterns, separated by commas"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit: stop and begin nothing after it")
    parser.add_argument("--jobs", type=int, default=4, help="items in parallel, unless they measure speed")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    options = parser.parse_args()
    session = Session(options.output.absolute(), options.rehearse, tuple(options.overrides))
    session.output.mkdir(parents=True, exist_ok=True)
    items = items_of(session)
    if options.item:
        return do(next(item for item in items if item.name == options.item), session)
    arguments = ["--output", str(session.output), *(["--rehearse"] if session.rehearse else []), *session.overrides]
    until = time.monotonic() + 60 * options.minutes
    chosen = [item for item in items if any(fnmatch.fnmatch(item.name, pattern) for pattern in options.only.split(","))]
    for alone, group in itertools.groupby(chosen, key=lambda item: item.alone):
        with ThreadPoolExecutor(1 if alone else options.jobs) as pool:
            for line in pool.map(lambda item: f"{item.name}: {supervise(item, session, arguments, until)}", group):
                print(line, flush=True)


if __name__ == "__main__":
    main()
