"""A step that is recorded once and replayed takes the steps that it would take as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posbench import build_model
from posbench.config import Config, ConfigError
from posbench.machine.device import choose_device
from posbench.training.graph import PLAIN_STEPS
from posbench.training.step import TrainingStep

Make = Callable[..., Config]


class Repeater:
    """In place of CUDA graphs: a replay calls the job that was recorded again, and recording computes nothing."""

    def __init__(self, scale: float = 1.0, refuses: bool = False) -> None:
        self.scale, self.refuses, self.replays = scale, refuses, 0

    def aside(self, job: Callable[[], Tensor]) -> Tensor:
        return job()

    def record(self, job: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = torch.zeros(2)

        def replay() -> None:
            self.replays += 1
            result.copy_(job() * self.scale)

        return result, replay


def losses(config: Config, recorder: Repeater | None, steps: int = 8) -> list[Tensor]:
    """[loss, norm] of each step, every one on a batch of its own."""
    step = TrainingStep(config, build_model(config, 257), choose_device(config.train), recorder=recorder)  # type: ignore[arg-type]
    rates = {group["lr"] for group in step.optimizer.torch.param_groups}
    assert recorder is None or rates == {step.optimizer.rate}  # a number would be recorded with the step
    generator = torch.Generator().manual_seed(0)
    return [step(n, torch.randint(257, (4, 33), generator=generator)) for n in range(steps)]


def test_replays_read_the_batch_and_the_rate_of_their_step(config: Make) -> None:
    made, repeater = config("train.accumulation=2"), Repeater()
    plain, replayed = losses(made, None), losses(made, repeater)
    assert repeater.replays == 8 - PLAIN_STEPS
    for one, other in zip(plain, replayed, strict=True):  # results of earlier steps stay as they were
        assert torch.allclose(one, other, rtol=1e-6)


def test_a_recorded_step_that_is_another_one_is_noticed_at_its_first_replay(config: Make) -> None:
    with pytest.raises(ConfigError, match="and please report it"):
        losses(config(), Repeater(scale=1.05))


def test_what_cannot_be_recorded_is_taken_as_it_is(config: Make) -> None:
    made = config()
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        found = losses(made, Repeater(refuses=True))
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(found, losses(made, None), strict=True))


def test_no_graph_on_a_cpu(config: Make) -> None:
    made = config("train.cuda_graph=true")
    step = TrainingStep(made, build_model(made, 257), choose_device(made.train))
    assert step.graph is None and step.warmup_steps == 1 and step.optimizer.rate is None
