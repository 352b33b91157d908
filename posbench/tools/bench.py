"""Measure tokens per second of the training step for each scheme.

MFU (model FLOPs utilisation) is model FLOP/s divided by the FLOP/s of a large matrix product in the same number format.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from rich.console import Console

from posbench.composition.compose import compose
from posbench.config import Config
from posbench.data import Batch, Problems, vocab_size
from posbench.model.decoder import Decoder, build_model
from posbench.model.size import cache_per_token, training_flops_per_token
from posbench.system.console import plain_table
from posbench.system.device import Device, choose_device, flushed_denormals, keep_freed_memory, matmul_rate
from posbench.system.torch_internals import allow_recompiles
from posbench.training.step import TrainingStep

WARMUP_STEPS = 3


class TimedScheme:
    """The training step of one scheme on a fixed batch, with its measurements."""

    def __init__(self, config: Config, device: Device, model: Decoder) -> None:
        self.device = device
        architecture = model.architecture
        # Counted before training moves the model from the CPU.
        self.sizes: dict[str, float] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "flops_per_token": training_flops_per_token(architecture, model.embedding.num_embeddings),
            "cache_per_token": cache_per_token(architecture),
        }
        self.step = TrainingStep(config, model, device)
        self.batch = batch_of(config, model.embedding.num_embeddings, device)
        self.tokens_per_step = config.train.tokens_per_step
        self.rates: list[float] = []  # tokens per second, one per round
        self.ratios: list[float] = []  # this rate / the rate of the first scheme, measured just before; one per round
        # The first steps compile and allocate.
        self._seconds(WARMUP_STEPS)

    def rate(self, steps: int) -> float:
        """Run `steps` steps and return their tokens per second."""
        return steps * self.tokens_per_step / self._seconds(steps)

    def measure(self, steps: int, first: TimedScheme) -> None:
        """Time `steps` steps of the scheme `first`, then of this one, and record this one's rate and their ratio."""
        first_rate = first.rate(steps)
        self.rates.append(self.rate(steps))
        self.ratios.append(self.rates[-1] / first_rate)

    def _seconds(self, steps: int) -> float:
        # Synchronised before and after, not in between: the host must run ahead of the device as in training.
        self.device.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(0, self.batch)
        self.device.wait()
        return time.perf_counter() - began

    def figures(self, matmul_rate: float) -> dict[str, Any]:
        """Return the model's sizes and, over rounds, the medians of what was measured.

        Arguments: matmul_rate, FLOP/s of a matrix product, by which the model's FLOP/s are divided (MFU).
        """
        rate = median(self.rates)
        return {
            **self.sizes,
            "tokens_per_second": rate,
            "step_to_first": median(self.ratios),
            "mfu": rate * self.sizes["flops_per_token"] / matmul_rate,
        }


def batch_of(config: Config, vocab_size: int, device: Device) -> Batch:
    """Return a training batch on the device: random tokens [B, T + 1], or problems of the configured task."""
    if config.is_task:
        return Problems(config.data).batches(config.train, config.seed).batch(0).each(device.send)
    size = (config.train.batch_size, config.train.context_length + 1)
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.randint(vocab_size, size, generator=generator).to(device.torch))


def contenders(words: Sequence[str], schemes: Sequence[str]) -> dict[str, list[str]]:
    """Return {name: overrides} of what is timed: each scheme, with each optimizer if `words` name several."""
    key = "train.optimizer="
    common = [word for word in words if not word.startswith(key)]
    optimizers = [word.removeprefix(key).split(",") for word in words if word.startswith(key)]
    timed = {}
    for scheme in schemes:
        if not optimizers:
            timed[scheme] = [*common, f"scheme={scheme}"]
            continue
        # If the words set the optimizer several times, the last one counts.
        for optimizer in optimizers[-1]:
            timed[f"{scheme} {optimizer}"] = [*common, f"{key}{optimizer}", f"scheme={scheme}"]
    return timed


@flushed_denormals()
def bench(
    words: Sequence[str], schemes: Sequence[str], rounds: int, steps: int, console: Console
) -> dict[str, dict[str, Any]]:
    """Time the training step of each scheme, print a table, and return what was measured.

    Arguments: words, overrides that choose the model and the batch; rounds, how often each scheme is timed, in turn;
    steps, training steps per turn.
    Returns: for each scheme its sizes, the medians of tokens per second and of the ratio to the first scheme, and MFU.
    Raises: ConfigError if an override is refused.
    """
    keep_freed_memory()
    torch.compiler.reset()
    allow_recompiles(8 * len(schemes) + 8)  # each scheme compiles its own block
    configs = {name: compose(contender) for name, contender in contenders(words, schemes).items()}
    first_name, first = next(iter(configs.items()))
    device = choose_device(first.train)
    entries = vocab_size(first)
    timed_schemes = {
        name: TimedScheme(config, device, build_model(config, entries)) for name, config in configs.items()
    }
    # Schemes take turns in each round, so that a machine whose speed drifts slows all of them.
    matmul_rates = []
    for _ in range(rounds):
        matmul_rates.append(matmul_rate(device))
        for timed in timed_schemes.values():
            timed.measure(steps, timed_schemes[first_name])
    about = device.describe()
    compiled = "compiled" if about["compiled"] else "not compiled"
    console.print(f"{about['name']}, {about['dtype']}, {compiled}, {about['threads']} threads")
    console.print(
        f"model {first.model.name}, context {first.train.context_length}, batch {first.train.batch_size}; "
        f"matmul {median(matmul_rates) / 1e9:,.0f} GFLOP/s; ratio: speed over that of {first_name}, timed just before "
        "(its own shows the noise)"
    )
    table = plain_table("scheme", "tokens/s", "ratio", "MFU", "parameters", "cache\na token")
    measured = {name: timed.figures(median(matmul_rates)) for name, timed in timed_schemes.items()}
    for name, figures in measured.items():
        table.add_row(
            name,
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['step_to_first']:.3f}",
            f"{100 * figures['mfu']:.1f}%",
            f"{figures['parameters']:,.0f}",
            f"{figures['cache_per_token']:,.0f}",
        )
    console.print(table)
    return measured
