"""THE training step. The loop, `posbench bench` and `benchmarks/` all call it; nothing else trains.

Shapes: B batch, b = B / accumulation rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from posbench.config import Config
from posbench.machine.device import Device
from posbench.model import Decoder
from posbench.training.graph import PLAIN_STEPS, GraphedStep, Recorder, recorder_of
from posbench.training.optimizer import AdamW
from posbench.training.processes import Processes


class Observer(Protocol):
    """What is called at the end of each phase of a step: a clock, a profiler, a test.

    Within a step: `forward` and `backward` of each micro-batch, then `optimizer`. The loop adds `batch` before them,
    and `checkpoint` where one was written.
    """

    def __call__(self, phase: str, n: int, step: TrainingStep) -> object: ...


def unobserved(phase: str, n: int, step: TrainingStep) -> None:
    """The observer that does nothing."""


class TrainingStep:
    """A model on its device, compiled where that pays, with its optimizer. A call takes one step.

    On one GPU, compiled, the whole step is recorded as a CUDA graph after a few (`train.cuda_graph`). Arguments:
    recorder, of graphs where not PyTorch's own.
    """

    def __init__(
        self,
        config: Config,
        model: Decoder,
        device: Device,
        processes: Processes | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.device, self.processes = device, processes or Processes()
        self.accumulation = config.train.accumulation
        self.model = model.to(device.torch)
        self.model.compute_dtype = device.dtype
        if device.compiled:
            self.model.compile_blocks()
        self.loss = self.processes.wrap(self.model, config.launch.strategy)
        wanted = device.compiled if config.train.cuda_graph is None else config.train.cuda_graph
        if recorder is None and device.is_cuda and wanted and self.processes.size == 1:
            recorder = recorder_of(device.torch)
        rate = None if recorder is None else torch.zeros((), device=device.torch)
        self.optimizer = AdamW(self.model, config.row_train, rate)
        self.graph = None if recorder is None else GraphedStep(self._take, self._measure, recorder)

    @property
    def warmup_steps(self) -> int:
        """Steps of a process that are unlike those after them: the first compiles, and a graph is recorded later."""
        return 1 if self.graph is None else PLAIN_STEPS + 1

    def __call__(self, n: int, tokens: Tensor, observe: Observer = unobserved) -> Tensor:
        """Step n (0-based), which sets the learning rate, with the whole batch [B, T + 1] int64 on the device.

        Returns: the loss, nats a token, and the norm of the gradients before clipping: [2], still on the device. Where
        one of them is not finite, weights and moments stay as they were.
        """
        self.optimizer.set_rate(n)
        if self.graph is not None and observe is unobserved:
            return self.graph(tokens)
        return self._take(tokens, observe, n)

    def _take(self, tokens: Tensor, observe: Observer = unobserved, n: int = 0) -> Tensor:
        """The step, at the learning rate that is set. `n` is for the observer alone."""
        mean_loss = self._gradients(tokens, observe, n)
        norm = self.optimizer.step(healthy=mean_loss.isfinite())
        observe("optimizer", n, self)
        return torch.stack((mean_loss, norm))

    def _measure(self, tokens: Tensor) -> Tensor:
        """What the step would return; no weight changes."""
        mean_loss = self._gradients(tokens, unobserved, 0)
        result = torch.stack((mean_loss, self.optimizer.norm()))
        self.optimizer.zero_grad()
        return result

    def _gradients(self, tokens: Tensor, observe: Observer, n: int) -> Tensor:
        """Leave the gradients of the mean loss of the batch with the weights, and return it."""
        self.optimizer.zero_grad()
        mean_loss = torch.zeros((), device=self.device.torch)
        micro_batches = tokens.chunk(self.accumulation)  # [b, T + 1] each
        for number, micro_batch in enumerate(micro_batches, 1):
            rows = self.processes.share_of(micro_batch)
            with self.processes.accumulating(self.loss, is_last=number == len(micro_batches)):
                loss = self.loss(rows[:, :-1], rows[:, 1:]) / self.accumulation
                observe("forward", n, self)
                loss.backward()
                observe("backward", n, self)
            mean_loss += loss.detach()
        return self.processes.mean(mean_loss)
