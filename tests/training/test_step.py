"""There is one training step: the loop, `posbench bench` and the benchmarks call it and add nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.peers import Ours
from benchmarks.shapes import SHAPES
from posbench import build_model
from posbench.config import Config
from posbench.data import Batch, prepare
from posbench.system.device import choose_device
from posbench.tools.bench import bench_training
from posbench.training import train
from posbench.training.step import TrainingStep

Make = Callable[..., Config]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of every training step."""
    numbers: list[int] = []
    original = TrainingStep.__call__

    def counted(self: TrainingStep, n: int, *rest: Any) -> torch.Tensor:
        numbers.append(n)
        return original(self, n, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", counted)
    return numbers


@pytest.mark.slow
def test_training_bench_and_benchmarks_take_the_same_step(config: Make, words: list[str], steps: list[int]) -> None:
    train(config())
    assert steps == list(range(12))
    steps.clear()
    bench_training(words, ["nope"], rounds=1, steps=2)
    assert len(steps) == 3 + 2 + 2  # to warm up, of the first scheme and its own in the round
    steps.clear()
    Ours(replace(SHAPES["A"], layers=1), "nope", "float32", compiled=False).step(torch.randint(4096, (1, 9)))
    assert len(steps) == 1


@pytest.mark.parametrize(("flags", "dtype"), [("avx512_bf16", torch.float32), ("amx_bf16 amx_tile", torch.bfloat16)])
def test_a_cpu_computes_in_bfloat16_where_it_has_amx(
    flags: str, dtype: torch.dtype, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.system.device._cpu_info", lambda: f"flags : {flags}")
    assert choose_device(config("train.dtype=auto", "train.device=cpu").train).dtype == dtype


def test_the_step_on_the_same_batches_ends_with_the_weights_of_the_run(config: Make) -> None:
    run_config = config("train.accumulation=2")
    run = train(run_config)
    batches = prepare(run_config).batches(run_config.train, run_config.seed)
    step = TrainingStep(run_config, build_model(run_config, 257), choose_device(run_config.train))
    for n in range(run_config.train.num_steps):
        step(n, batches.batch(n).each(torch.from_numpy))
    trained = dict(run.load_model().named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in step.model.named_parameters())


def test_phases_are_told_in_their_order_and_change_nothing(config: Make) -> None:
    run_config = config("train.accumulation=2")
    tokens = torch.randint(257, (4, 33), generator=torch.Generator().manual_seed(0))
    steps = [TrainingStep(run_config, build_model(run_config, 257), choose_device(run_config.train)) for _ in range(2)]
    phases: list[str] = []
    observed = steps[0](3, Batch(tokens), lambda phase, n, step: phases.append(f"{n} {phase}"))
    assert phases == ["3 forward", "3 backward", "3 forward", "3 backward", "3 optimizer"]
    assert torch.equal(observed, steps[1](3, Batch(tokens)))
    loss = steps[1].model.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss < observed[0]  # it was a step downhill on this batch
