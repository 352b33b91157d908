"""Speed: tokens per second of a training step, or of evaluation at lengths, scheme by scheme.

Schemes run in turn, round after round, so that a machine whose speed drifts slows all of them; figures are medians over
rounds. MFU is the rate of model FLOPs (`posbench.costs`) over that of a large matrix product in the same number format,
measured between the same rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from posbench.composition import compose
from posbench.config import Config, ConfigError
from posbench.costs import DATASHEET, training_flops_per_token
from posbench.model import Decoder, build_model
from posbench.runs import write_json
from posbench.training.device import Device, choose_device
from posbench.training.memory import keep_freed_memory
from posbench.training.optimizer import AdamW

VOCAB_SIZE = 4096
WARMUP_STEPS = 3


def matmul_rate(device: Device, size: int = 2048, repeats: int = 3) -> float:
    """FLOP/s of a square product in the device's number format: the best of a few."""
    size = 8192 if device.is_cuda else size
    a = torch.randn(size, size, device=device.torch, dtype=device.dtype)
    best = 0.0
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        a @ a
        _wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def _wait(device: Device) -> None:
    if device.is_cuda:
        torch.cuda.synchronize(device.torch)


class _Step:
    """A training step of one scheme on random tokens, with the time of its phases."""

    def __init__(self, config: Config, device: Device) -> None:
        self.config, self.device = config, device
        self.model: Decoder = build_model(config, VOCAB_SIZE).to(device.torch)
        self.model.compute_dtype = device.dtype
        self.optimizer = AdamW(self.model, config.train)
        generator = torch.Generator().manual_seed(0)
        shape = (config.train.batch_size, config.train.context_length + 1)
        self.rows = torch.randint(VOCAB_SIZE, shape, generator=generator).to(device.torch)
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        if device.compiled:
            self.model.compile_blocks()
        began = time.perf_counter()
        self.once()
        self.first_seconds = time.perf_counter() - began
        for _ in range(WARMUP_STEPS - 1):
            self.once()

    def once(self) -> float:
        """Seconds of one step, forward to weights."""
        train = self.config.train
        marks = [self._mark()]
        self.optimizer.zero_grad()
        spent = {"forward": 0.0, "backward": 0.0}
        healthy = torch.ones((), dtype=torch.bool, device=self.device.torch)
        for part in self.rows.chunk(train.accumulation):
            loss = self.model.loss(part[:, :-1], part[:, 1:]) / train.accumulation
            marks.append(self._mark())
            spent["forward"] += marks[-1] - marks[-2]
            loss.backward()
            marks.append(self._mark())
            spent["backward"] += marks[-1] - marks[-2]
            healthy &= loss.detach().isfinite()
        self.optimizer.step(0, healthy)
        marks.append(self._mark())
        for name, seconds in {**spent, "optimizer": marks[-1] - marks[-2]}.items():
            self.phases[name].append(seconds)
        return marks[-1] - marks[0]

    def _mark(self) -> float:
        _wait(self.device)
        return time.perf_counter()


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
    runs, peaks = {}, {}
    for name, config in configs.items():
        device.reset_peak_memory()
        runs[name] = _Step(config, device)
        peaks[name] = device.peak_memory_bytes()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    machine = []
    for _ in range(rounds):
        machine.append(matmul_rate(device))
        for name, run in runs.items():
            seconds = sum(run.once() for _ in range(steps))
            rates[name].append(steps * first.train.tokens_per_step / seconds)
    machine_rate = statistics.median(machine)
    flops = training_flops_per_token(first.model, VOCAB_SIZE, first.train.context_length)
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
            "phases_seconds": {phase: statistics.median(times[WARMUP_STEPS:]) for phase, times in run.phases.items()},
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
            f"{of['peak_memory_bytes'] / 2**20:,.0f}",
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
