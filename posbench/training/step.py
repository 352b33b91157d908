"""Take one training step: the loop, `posbench bench` and `benchmarks/` all call this code.

Shapes: B batch, b = B / accumulation rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posbench.config import Config
from posbench.data import Batch
from posbench.model.decoder import Decoder
from posbench.system.device import Device
from posbench.training.optimizers import optimizer_class
from posbench.training.processes import Processes


class Died(Exception):
    """Training diverged: losses or gradients became infinite or NaN."""


# A function, such as a profiler's, called with (phase, n, step) at the end of each phase of step n: `batch` (by the
# loop), `forward` and `backward` of each micro-batch, `optimizer`, and `checkpoint` (by the loop) if one was written.
Observer = Callable[[str, int, "TrainingStep"], object]


def unobserved(phase: str, n: int, step: TrainingStep) -> None:
    """Do nothing: the default for `observe`."""


class TrainingStep:
    """A model on its device, with its optimizer. A call takes one training step."""

    def __init__(self, config: Config, model: Decoder, device: Device, processes: Processes | None = None) -> None:
        self.device, self.processes = device, processes or Processes()
        self.accumulation = config.train.accumulation
        self.model = model.to(device.torch)
        self.model.compute_dtype = device.dtype
        if device.compiled and not device.is_stacked:  # a stack compiles its whole step
            self.model.compile_blocks()
        self.loss = self.processes.wrap(self.model)
        optimizer = optimizer_class(config.train)
        options = config.train.optimizer_options
        self.optimizer = optimizer(self.model, config.train, config.scheme.lr_factor, **options)

    def __call__(self, n: int, batch: Batch, observe: Observer = unobserved) -> Tensor:
        """Take one training step: forward and backward over micro-batches, then the optimizer.

        Arguments: n, the step (0-based), which decides the learning rate; batch, the whole batch, on the device.
        Returns: [loss in nats per scored token, gradient norm before clipping], on the device. If one is not finite,
        weights and moments stay as they were.
        """
        self.optimizer.set_rate(n)
        self.optimizer.zero_grad()
        mean_loss = torch.zeros((), device=self.device.torch)
        # None: text, whose loss is the mean over all targets. For a task, the mean number of answers per micro-batch
        # and process divides each summed loss, so that every answer of the step weighs the same.
        divisor = None
        if batch.answers is not None:
            divisor = (batch.answers >= 0).sum() / (self.accumulation * self.processes.size)
        micro_batches = batch.chunks(self.accumulation)
        for number, micro_batch in enumerate(micro_batches, 1):
            rows = micro_batch.each(self.processes.share_of)
            # Processes exchange gradients once per step, in the last micro-batch.
            with self.processes.accumulating(self.loss, is_last=number == len(micro_batches)):
                loss = self.loss(rows.inputs, rows.targets, rows.positions, divisor) / self.accumulation
                observe("forward", n, self)
                loss.backward()
                observe("backward", n, self)
            mean_loss += loss.detach()
        mean_loss = self.processes.mean(mean_loss)
        # The optimizer skips the step on the device, so the host need not wait for the loss.
        norm = self.optimizer.step(healthy=mean_loss.isfinite())
        observe("optimizer", n, self)
        return torch.stack((mean_loss, norm))
