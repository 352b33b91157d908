"""Speed: tokens per second of a training step, or of evaluation at lengths, scheme by scheme.

Schemes run in turn, round after round, so that a machine whose speed drifts slows all of them; figures are medians over
rounds. MFU is the rate of model FLOPs over that of a large matrix product in the same number format,
measured between the same rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from posbench.composition import compose
from posbench.config import Config, ConfigError
from posbench.machine.costs import DATASHEET
from posbench.machine.device import Device, choose_device
from posbench.machine.files import check_writable, write_json
from posbench.machine.memory import keep_freed_memory
from posbench.model import Decoder, build_model
from posbench.size import training_flops_per_token
from posbench.training.optimizer import AdamW

VOCAB_SIZE = 4096
WARMUP_STEPS = 3


def matmul_rate(device: Device, size: int = 2048, repeats: int = 3) -> float:
    """FLOP/s of a square product in the device's number format: the best of a few."""
    size, products = (8192, 20) if device.is_cuda else (size, 1)  # a GPU needs a queue, and time to clock up
    a = torch.randn(size, size, device=device.torch, dtype=device.dtype)
    best = 0.0
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        for _ in range(products):
            a @ a
        _wait(device)
        best = max(best, products * 2 * size**3 / (time.perf_counter() - began))
    return best


def _wait(device: Device) -> None:
    if device.is_cuda:
        torch.cuda.synchronize(device.torch)


class _Step:
    """A training step of one scheme on random tokens."""

    def __init__(self, config: Config, device: Device) -> None:
        self.config, self.device = config, device
        self.model: Decoder = build_model(config, VOCAB_SIZE).to(device.torch)
        self.model.compute_dtype = device.dtype
        self.optimizer = AdamW(self.model, config.train)
        generator = torch.Generator().manual_seed(0)
        shape = (config.train.batch_size, config.train.context_length + 1)
        self.rows = torch.randint(VOCAB_SIZE, shape, generator=generator).to(device.torch)
        if device.compiled:
            self.model.compile_blocks()
        self.first_seconds = self.seconds(1)
        self.seconds(WARMUP_STEPS - 1)

    def seconds(self, steps: int) -> float:
        """Seconds of so many steps, waited for at the end alone, as in training."""
        _wait(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.once()
        _wait(self.device)
        return time.perf_counter() - began

    def once(self, done: Callable[[str], object] = lambda phase: None) -> None:
        """One step, forward to weights; `done` is told the end of each phase."""
        train = self.config.train
        self.optimizer.zero_grad()
        healthy = torch.ones((), dtype=torch.bool, device=self.device.torch)
        for part in self.rows.chunk(train.accumulation):
            loss = self.model.loss(part[:, :-1], part[:, 1:]) / train.accumulation
            done("forward")
            loss.backward()
            done("backward")
            healthy &= loss.detach().isfinite()
        self.optimizer.step(0, healthy)
        done("optimizer")

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of one step, waited for after each."""
        spent: dict[str, float] = {}
        _wait(self.device)
        before = time.perf_counter()

        def done(phase: str) -> None:
            nonlocal before
            _wait(self.device)
            now = time.perf_counter()
            spent[phase] = spent.get(phase, 0.0) + now - before
            before = now

        self.once(done)
        return spent


def bench_training(words: Sequence[str], schemes: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Tokens per second of the training step of each scheme, at the model and batch that the overrides `words` name.

    Returns: device, matrix-product rate (FLOP/s), and per scheme the median, least and most tokens per second,
    MFU, seconds of each phase and of the first step (compilation included), and peak memory in bytes.
    """
    keep_freed_memory()
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 4 * len(schemes) + 8  # one block's code for each scheme
    configs = {name: compose([*words, f"scheme={name}"]) for name in schemes}
    first = next(iter(configs.values()))
    device = choose_device(first.train)
    runs: dict[str, _Step] = {}
    peaks: dict[str, int | None] = {}
    for name, config in configs.items():
        held = torch.cuda.memory_allocated(device.torch) if device.is_cuda else 0  # by the schemes before
        device.reset_peak_memory()
        runs[name] = _Step(config, device)
        # A process on a CPU has one resident set, whose peak is the first scheme's alone.
        peaks[name] = device.peak_memory_bytes() - held if device.is_cuda or not peaks else None
    rates: dict[str, list[float]] = {name: [] for name in runs}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    machine = []
    for _ in range(rounds):
        machine.append(matmul_rate(device))
        for name, run in runs.items():
            rates[name].append(steps * first.train.tokens_per_step / run.seconds(steps))
            phases[name].append(run.phases())
    machine_rate = statistics.median(machine)
    flops = training_flops_per_token(first, VOCAB_SIZE)
    datasheet = next((rate for key, rate in DATASHEET.items() if key in device.describe()["name"]), None)
    of_schemes = {}
    for name, run in runs.items():
        median = statistics.median(rates[name])
        of_schemes[name] = {
            "tokens_per_second": median,
            "tokens_per_second_min": min(rates[name]),
            "tokens_per_second_max": max(rates[name]),
            "step_to_first": median / statistics.median(rates[next(iter(runs))]),
            "mfu": median * flops / machine_rate,
            "mfu_datasheet": median * flops / datasheet if datasheet else None,
            "phases_seconds": {
                phase: statistics.median(times[phase] for times in phases[name]) for phase in phases[name][0]
            },
            "first_step_seconds": run.first_seconds,
            "peak_memory_bytes": peaks[name],
        }
    return {
        "what": "training step",
        "device": device.describe(),
        "model": first.model.name,
        "vocab_size": VOCAB_SIZE,
        "context_length": first.train.context_length,
        "batch_size": first.train.batch_size,
        "rounds": rounds,
        "steps_a_round": steps,
        "flops_per_token": flops,
        "matmul_flops_per_second": machine_rate,
        "schemes": of_schemes,
    }


@torch.no_grad()
def bench_evaluation(
    words: Sequence[str], schemes: Sequence[str], lengths: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Tokens per second and peak memory of scoring one window at each length, scheme by scheme."""
    configs = {name: compose([*words, f"scheme={name}"]) for name in schemes}
    first = next(iter(configs.values()))
    device = choose_device(first.train)
    found: dict[str, dict[str, Any]] = {name: {} for name in configs}
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(VOCAB_SIZE, (1, length + 1), generator=generator).to(device.torch)
        for name, config in configs.items():
            model = build_model(config, VOCAB_SIZE).to(device.torch).eval()
            model.compute_dtype = device.dtype
            device.reset_peak_memory()
            times = []
            for _ in range(rounds):
                _wait(device)
                began = time.perf_counter()
                model.nll(rows[:, :-1], rows[:, 1:])
                _wait(device)
                times.append(time.perf_counter() - began)
            found[name][str(length)] = {
                "seconds": statistics.median(times),
                "tokens_per_second": length / statistics.median(times),
                "peak_memory_bytes": device.peak_memory_bytes(),
            }
    return {
        "what": "evaluation",
        "device": device.describe(),
        "model": first.model.name,
        "rounds": rounds,
        "schemes": found,
    }


def bench(
    words: Sequence[str],
    schemes: Sequence[str],
    lengths: Sequence[int],
    rounds: int,
    steps: int,
    output: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure, print a table, and write JSON to `output` where given. Raises: ConfigError for what compose refuses."""
    if rounds < 1 or steps < 1:
        raise ConfigError(f"--rounds {rounds} and --steps {steps} must be at least 1")
    if output is not None:
        if output.is_dir():
            raise ConfigError(f"--output {output} is a folder: name a file, such as {output / 'bench.json'}")
        check_writable(output.parent, "figures")
    result = (
        bench_evaluation(words, schemes, lengths, rounds) if lengths else bench_training(words, schemes, rounds, steps)
    )
    (_show_evaluation if lengths else _show_training)(result, console)
    if output is not None:
        try:
            write_json(output, result)
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror or error}; choose another --output") from error
        console.print(f"wrote {output}", highlight=False, markup=False)
    return result


def _show_training(result: dict[str, Any], console: Console) -> None:
    device = result["device"]
    how = "compiled" if device["compiled"] else "not compiled"
    rate = result["matmul_flops_per_second"] / 1e9
    console.print(f"{device['name']}, {device['dtype']}, {how}, {device['threads']} threads", highlight=False)
    console.print(
        f"model {result['model']}, context {result['context_length']}, batch {result['batch_size']}; "
        f"matrix products {rate:,.0f} GFLOP/s; times in ms, first step in s",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # eleven columns within 80
    table.add_column("scheme", no_wrap=True)
    for column in ("tokens/s", "least", "most", "ratio", "MFU", "forw.", "backw.", "optim.", "first", "MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, of in result["schemes"].items():
        phases = of["phases_seconds"]
        table.add_row(
            name,
            *(f"{of[key]:,.0f}" for key in ("tokens_per_second", "tokens_per_second_min", "tokens_per_second_max")),
            f"{of['step_to_first']:.3f}",
            f"{100 * of['mfu']:.1f}%",
            *(f"{1000 * phases[phase]:,.1f}" for phase in ("forward", "backward", "optimizer")),
            f"{of['first_step_seconds']:.1f}",
            f"{of['peak_memory_bytes'] / 2**20:,.0f}" if of["peak_memory_bytes"] else "–",
        )
    console.print(table)


def _show_evaluation(result: dict[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("scheme", "length", "seconds", "tokens/s", "peak MiB"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for name, lengths in result["schemes"].items():
        for length, of in lengths.items():
            peak = f"{of['peak_memory_bytes'] / 2**20:,.0f}"
            table.add_row(name, length, f"{of['seconds']:.2f}", f"{of['tokens_per_second']:,.0f}", peak)
    console.print(table)
