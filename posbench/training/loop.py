"""The training loop, from its first step to its last.

    batch n -> forward -> loss -> backward -> AdamW -> [ log -> validate -> checkpoint ]

Batch n depends on (seed, n) and the text alone, and each weight on (seed, its name). So all schemes under one seed see
the same batches and start from the same weights, and a run that was killed and resumed ends with the same bytes as one
that was not (on a CPU: GPU kernels sum in an order of their own).

Shapes: B batch, T tokens of the context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from posbench import runs
from posbench.config import Config
from posbench.data import Batches, Corpus
from posbench.evaluation.evaluate import score_split
from posbench.evaluation.protocols import VALIDATION
from posbench.machine.signals import StopSignals
from posbench.runs import Manifest, Run, checkpoint
from posbench.tracking import Tracker
from posbench.training.optimizer import learning_rate
from posbench.training.progress import TrainingProgress
from posbench.training.state import LoopState, Stopwatch
from posbench.training.step import Observer, TrainingStep, unobserved
from posbench.training.writer import Writer

if TYPE_CHECKING:
    import pandas as pd

Notice = Callable[[str], None]


class Died(Exception):
    """The run cannot continue; its manifest says why."""


@dataclass
class Training:
    """A run while it trains: what the loop works with."""

    config: Config
    run: Run
    manifest: Manifest
    corpus: Corpus
    batches: Batches
    step: TrainingStep  # the model on its device, its optimizer, and the processes that share them
    signals: StopSignals
    notice: Notice
    tracker: Tracker
    bar: TrainingProgress
    writer: Writer = field(default_factory=Writer)
    state: LoopState = field(default_factory=LoopState)
    observe: Observer = unobserved

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.step.processes.is_first


def train_steps(training: Training) -> None:
    """Take all steps that are left. Afterwards the newest checkpoint is the last step's.

    Raises: Stopped once a signal has come and a checkpoint is written; Died where the numbers went wrong.
    """
    train, state, step = training.config.train, training.state, training.step
    validate_every = train.steps_between_validations
    checkpoint_every = train.checkpoint_every or max(1, math.ceil(train.num_steps / 10))
    if state.steps_done == 0:
        validate(training)  # before anything is learnt
    watch, first, logged = Stopwatch(state.train_seconds), state.steps_done, state.steps_done
    for n in range(state.steps_done, train.num_steps):
        # Batch n: windows drawn from (seed, n), the same for every scheme.
        rows = training.batches.batch(n)  # [B, T + 1] int64
        state.consume(rows)
        tokens = step.device.send(rows)  # inputs are tokens[:, :-1], targets tokens[:, 1:]
        training.observe("batch", n, step)

        # Loss, gradients, weights: forward and backward over micro-batches, then AdamW (posbench.training.step).
        # The result stays on the device, and the host does not wait for it.
        state.pending.append(step(n, tokens, training.observe))  # [2]: loss (nats per token), gradient norm
        state.steps_done = n + 1
        if n == first:  # the first step of a process compiles, so it is timed apart
            fetch_losses(training)
            state.first_step_seconds += watch.leave_out()
            logged = state.steps_done
            training.signals.waits = True
        else:
            state.timed_steps += 1
        training.bar.advance(state.steps_done)
        is_last = state.steps_done == train.num_steps

        if state.steps_done % train.log_every == 0 or is_last:
            fetch_losses(training)  # here the host waits
            timed, seconds = (state.steps_done - logged) * train.tokens_per_step, watch.lap()
            logged = state.steps_done
            log_step(training, timed / seconds if timed else None)

        if state.steps_done % validate_every == 0 and not is_last:  # the last step's is stored (`finish`)
            fetch_losses(training)  # so that the watch is paused once the device is done
            with watch.paused():
                validate(training)

        signal_number = step.processes.stop_signal(training.signals.received)  # the same answer in all processes
        is_branching = state.steps_done in train.branching_steps  # a shorter run's decay begins here
        if state.steps_done % checkpoint_every == 0 or is_branching or is_last or signal_number:
            fetch_losses(training)
            state.train_seconds = watch.seconds
            with watch.paused():
                save(training)
                if is_last or signal_number:
                    training.writer.wait()
            training.observe("checkpoint", n, step)

        if signal_number:
            where = f"at step {state.steps_done} of {train.num_steps}, with a checkpoint"
            training.signals.stop(signal_number, f"{where}: give the same command again to resume")


def fetch_losses(training: Training) -> None:
    """Fetch the losses of the steps since the last call, and name the steps that were skipped.

    Raises: Died after too many of them.
    """
    train = training.config.row_train
    for n, loss, norm in training.state.fetch():
        lr = learning_rate(n, train)
        skipped = f"step {n + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}, batch {n}"
        training.notice(f"{training.run.name}: skipped {skipped}; weights and moments are as before")
        if training.state.skipped_steps > train.max_skipped_steps:
            raise Died(
                f"{training.state.skipped_steps} steps were not finite, more than "
                f"train.max_skipped_steps={train.max_skipped_steps}; the last was {skipped}. Lower train.lr"
            )


def log_step(training: Training, tokens_per_second: float | None) -> None:
    """The row of training since the last such row. No speed of a process's first step alone, which compiles."""
    state, train = training.state, training.config.row_train
    append_row(
        training,
        {
            "kind": "train",
            "step": state.steps_done,
            "tokens": state.steps_done * train.tokens_per_step,
            "lr": learning_rate(state.steps_done - 1, train),
            **state.take_row(),
            "skipped_steps": state.skipped_steps,
            **({} if tokens_per_second is None else {"tokens_per_second": round(tokens_per_second, 1)}),
        },
    )


def validate(training: Training) -> None:
    """A point of the loss curve: the windows of the loss table, scored with the weights of now. Raises: Died."""
    log_validation(training, validation_scores(training)[1])


def validation_scores(
    training: Training, advance: Callable[[int], object] = lambda tokens: None
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rows and the header of a validation: the same windows while training and after the last step."""
    config = training.config
    return score_split(
        training.step.model,
        training.corpus,
        VALIDATION.split,
        VALIDATION.name,
        config.train.context_length,
        VALIDATION.settings(config),
        advance=advance,
    )


def log_validation(training: Training, figures: dict[str, Any]) -> None:
    """The row of a validation, with the figures of its header. Raises: Died."""
    loss, step = figures["nll_mean"], training.state.steps_done
    if not math.isfinite(loss):
        raise Died(f"the validation loss at step {step} is {loss}. Lower train.lr")
    append_row(
        training,
        {
            "kind": "validation",
            "step": step,
            "tokens": step * training.config.train.tokens_per_step,
            "loss": loss,
            "bits_per_byte": figures["bits_per_byte"],
        },
    )


def append_row(training: Training, row: dict[str, Any]) -> None:
    """Add a row to metrics.jsonl, to the tracker and to what is shown."""
    if training.is_first:
        runs.append_metrics(training.run.path / "metrics.jsonl", row)
    training.tracker.log(row)
    training.bar.show(row)


def save(training: Training) -> None:
    """Write a checkpoint of the steps so far: on a GPU beside the steps that follow."""
    weights, moments = (
        checkpoint.weights_of(training.step.model),
        training.step.optimizer.state(),
    )  # all processes, where sharded
    if not training.is_first:
        return
    writer = training.writer
    writer(
        partial(
            checkpoint.save,
            training.run.path / "checkpoints",
            training.state.steps_done,
            writer.snapshot(weights),
            writer.snapshot(moments),
            (training.run.path / "metrics.jsonl").read_bytes(),
            {**training.state.saved(), "manifest": asdict(training.manifest)},
            training.config.train.keep_checkpoints,
            training.config.train.branching_steps,
        )
    )
