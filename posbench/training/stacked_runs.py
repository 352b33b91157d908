"""Train several runs as one (`posbench.training.stack`), each with its own folder, checkpoints and log."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from posbench import runs
from posbench.config import Config
from posbench.data import Batch, vocab_size
from posbench.model.architecture import build_architecture
from posbench.model.size import training_memory
from posbench.runs import Run
from posbench.system.console import Say
from posbench.system.console import console as new_console
from posbench.system.device import Device, choose_device
from posbench.system.signals import Stopped, StopSignals
from posbench.training.loop import Pauses, Training, opened
from posbench.training.processes import Processes
from posbench.training.stack import Stack, refusal_to_stack, stack_key


@dataclass
class _Copy:
    """A run of a stack."""

    config: Config
    open: ExitStack = field(default_factory=ExitStack)  # its lock, and the record of its failure
    training: Training | None = None  # None once it has left the stack
    request: tuple[int, Batch] | None = None  # the step it waits for
    steps: Any = None  # the generator of its steps
    error: BaseException | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        # An error ends one run, and the others go on.
        try:
            with ExitStack() as closing:
                closing.push(self.open)  # an error passes through the run's contexts, which record it
                action()
                closing.pop_all()  # there was none, so they stay open
        except BaseException as error:
            self.error, self.training = error, None

    def advance(self, outcome: Tensor | None) -> None:
        """Hand over the last step's outcome, and store the next request; finish after the last step."""
        assert self.training is not None
        try:
            self.request = self.steps.send(outcome)
        except StopIteration:
            self.training.finish()
            self.training = None
            self.open.close()


def train_stacked(configs: Sequence[Config], console: Console | None = None) -> list[Run | Exception]:
    """Train the runs of `configs`, which share a `stack_key`, as one; return each run or the error that ended it.

    Raises: Stopped after Ctrl-C or SIGTERM, when every run has a checkpoint.
    """
    torch.compiler.reset()
    gc.collect()  # of the last stack, which would count as this one's memory
    console = console or new_console(stderr=True)
    device = choose_device(configs[0].train)
    # On CPUs Inductor refuses some stacks (torch 2.13), and stacking gains little there.
    device = replace(device, is_stacked=True, compiled=device.compiled and device.is_cuda)
    copies, pauses = [_Copy(config) for config in configs], Pauses()
    with StopSignals(f"a stack of {len(configs)} runs") as signals:
        for number, copy in enumerate(copies):
            copy_console = console if number == 0 else new_console(quiet=True)  # one bar is enough

            def begin(copy: _Copy = copy, copy_console: Console = copy_console) -> None:
                copy.training = copy.open.enter_context(opened(copy.config, device, Processes(), signals, copy_console))
                if copy.training is not None:
                    copy.training.pauses = pauses
                    copy.steps = copy.training.steps()

            copy.attempt(begin)
        # The clocks of the runs start when all models are built.
        for copy in copies:
            if copy.training is not None:
                copy.attempt(partial(copy.advance, None))
        _take_steps(copies, device, console)
    # A signal stops every run; one error stands for all.
    stopped = [copy.error for copy in copies if isinstance(copy.error, Stopped)]
    if stopped:
        raise stopped[0]
    outcomes: list[Run | Exception] = []
    for copy in copies:
        if copy.error is None:
            outcomes.append(runs.run_at(runs.run_folder(copy.config)))
        elif isinstance(copy.error, Exception):
            outcomes.append(copy.error)
        # Not an Exception: the interpreter is to exit.
        else:
            raise copy.error
    return outcomes


def _take_steps(copies: Sequence[_Copy], device: Device, console: Console) -> None:
    """Take the steps of all runs together, until none is left in the stack."""
    while training_copies := [copy for copy in copies if copy.training is not None]:
        console.out(f"{len(training_copies)} runs train as one")
        steps = [copy.training.step for copy in training_copies if copy.training]
        # A new stack of the runs that are left whenever one has died, finished or stopped.
        stack = Stack(steps, [copy.config for copy in training_copies])
        # Until one leaves the stack.
        while all(copy.training is not None for copy in training_copies):
            numbers, batches = [], []
            for copy in training_copies:
                assert copy.request is not None
                number, batch = copy.request
                numbers.append(number)
                batches.append(batch)
            outcomes = stack(numbers, batches)
            for copy, outcome in zip(training_copies, outcomes, strict=True):
                copy.attempt(partial(copy.advance, outcome))


def stacks_here(config: Config) -> bool:
    """Return whether runs of a sweep with this configuration may train as one here."""
    if config.launch.stack == "auto":
        return choose_device(config.train).is_cuda
    return bool(config.launch.stack != "off")


def stacks_of(configs: Sequence[Config], say: Say) -> list[list[int]]:
    """Return which of the runs train as one: lists of numbers of runs. The others train alone."""
    if not stacks_here(configs[0]):
        return []
    # `launch.stack` of the first run decides; `auto` means as many as fit into memory.
    wanted_size, device = configs[0].launch.stack, choose_device(configs[0].train)
    groups: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        key = stack_key(config)
        if key is not None:
            groups.setdefault(key, []).append(number)
    stacks = []
    for group in groups.values():
        config = configs[group[0]]
        if refusal := refusal_to_stack(config):
            say(f"{config.scheme.name}: its runs train one by one, because torch cannot stack them ({refusal})")
            continue
        largest_stack = _fitting(config, device) if wanted_size == "auto" else wanted_size
        stacks += [group[first : first + largest_stack] for first in range(0, len(group), largest_stack)]
    return stacks


def _fitting(config: Config, device: Device) -> int:
    """Return how many runs of `config` fit into the free memory of the device as one stack, at least 1."""
    free, _ = torch.cuda.mem_get_info(device.torch)
    memory = training_memory(config, build_architecture(config), vocab_size(config))
    # Unlike fused kernels, plain code keeps the scores of attention, their softmax and its gradient.
    model, train = config.model, config.train
    queries = train.batch_size // train.accumulation * train.context_length
    num_scores = queries * train.context_length * model.num_heads * model.num_layers
    bytes_per_run = sum(memory.values()) + 3 * 4 * num_scores  # three tensors of float32
    return max(1, int(0.7 * free / bytes_per_run))  # the rest is a reserve
