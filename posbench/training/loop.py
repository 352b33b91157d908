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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from posbench import runs
from posbench.config import Config, TrainConfig
from posbench.data import Batches, Corpus
from posbench.evaluation.evaluate import score_split
from posbench.evaluation.protocols import VALIDATION
from posbench.machine.signals import StopSignals
from posbench.runs import Manifest, Run, checkpoint
from posbench.runs.manifest import to_mapping
from posbench.tracking import Tracker
from posbench.training.optimizer import learning_rate
from posbench.training.progress import TrainingProgress
from posbench.training.state import LoopState, Stopwatch
from posbench.training.step import Observer, TrainingStep, unobserved

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
    state: LoopState = field(default_factory=LoopState)
    observe: Observer = unobserved

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.step.processes.is_first


def train_steps(t: Training) -> None:
    """Take all steps that are left. Afterwards the newest checkpoint is the last step's.

    Raises: Stopped once a signal has come and a checkpoint is written; Died where the numbers went wrong.
    """
    train, state = t.config.train, t.state
    tenth = max(1, math.ceil(train.num_steps / 10))
    validate_every, checkpoint_every = train.validate_every or tenth, train.checkpoint_every or tenth
    if state.step == 0:
        validate(t)  # before anything is learnt
    watch, logged = Stopwatch(state.train_seconds), state.step
    for n in range(state.step, train.num_steps):
        rows = t.batches.batch(n)  # [B, T + 1] int64, whatever came before
        state.consume(rows)
        tokens = t.step.device.send(rows)  # inputs are [:, :-1], targets [:, 1:]
        t.observe("batch", n, t.step)

        # Forward, backward and into the weights. The host fetches loss and norm later: it does not wait here.
        state.pending.append(t.step(n, tokens, t.observe))  # [loss, gradient norm]
        state.step = n + 1
        t.bar.advance(state.step)
        is_last = state.step == train.num_steps

        if state.step % train.log_every == 0 or is_last:
            fetch_losses(t)
            speed = (state.step - logged) * train.tokens_per_step / watch.lap()
            logged = state.step
            log_step(t, speed)

        if state.step % validate_every == 0 and not is_last:  # after the last step all of the split is scored
            fetch_losses(t)  # a GPU's queue is empty before the watch is paused
            with watch.paused():
                validate(t)

        signal_number = t.step.processes.stop_signal(t.signals.received)  # the same answer in all processes
        if state.step % checkpoint_every == 0 or is_last or signal_number:
            fetch_losses(t)
            state.train_seconds = watch.seconds
            with watch.paused():
                save(t)
            t.observe("checkpoint", n, t.step)

        if signal_number:
            t.signals.stop(
                signal_number,
                f"at step {state.step} of {train.num_steps}, with a checkpoint: give the same command again to resume",
            )


def fetch_losses(t: Training) -> None:
    """Fetch the losses of the steps since the last call, and name the steps that were skipped.

    Raises: Died after too many of them.
    """
    train = t.config.train
    for n, loss, norm in t.state.fetch():
        lr = learning_rate(n, train)
        skipped = f"step {n + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}, batch {n}"
        t.notice(f"{t.run.name}: skipped {skipped}; weights and moments are as before")
        if t.state.skipped_steps > train.max_skipped_steps:
            raise Died(
                f"{t.state.skipped_steps} steps were not finite, more than "
                f"train.max_skipped_steps={train.max_skipped_steps}; the last was {skipped}. Lower train.lr"
            )


def log_step(t: Training, tokens_per_second: float) -> None:
    """The row of training since the last such row."""
    state, train = t.state, t.config.train
    append_row(
        t,
        {
            "kind": "train",
            "step": state.step,
            "tokens": state.step * train.tokens_per_step,
            "loss": state.take_mean_loss(),
            "lr": learning_rate(state.step - 1, train),
            "grad_norm": state.grad_norm,
            "skipped_steps": state.skipped_steps,
            "tokens_per_second": round(tokens_per_second, 1),
        },
    )


def validate(t: Training) -> None:
    """The loss on the first tokens of the validation split, the same ones each time."""
    settings = replace(t.config.evaluation, max_tokens=watched_tokens(t.config.train))
    context = t.config.train.context_length
    rows, _ = score_split(t.step.model, t.corpus, VALIDATION.split, VALIDATION.name, context, settings)
    log_validation(t, rows)


def watched_tokens(train: TrainConfig) -> int:
    """How many tokens of the validation split are scored while training: whole contexts, at least one."""
    return max(train.validation_tokens, train.context_length) // train.context_length * train.context_length


def log_validation(t: Training, windows: pd.DataFrame) -> None:
    """The row of a validation, over the scored `windows` that are watched while training. Raises: Died."""
    watched = windows[windows["start"] <= watched_tokens(t.config.train)]
    nll, step = float(watched["nll"].to_numpy().sum()), t.state.step
    if not math.isfinite(nll):
        raise Died(f"the validation loss at step {step} is {nll}. Lower train.lr")
    append_row(
        t,
        {
            "kind": "validation",
            "step": step,
            "tokens": step * t.config.train.tokens_per_step,
            "loss": nll / int(watched["targets"].sum()),
            "bits_per_byte": nll / math.log(2) / int(watched["bytes"].sum()),
        },
    )


def append_row(t: Training, row: dict[str, Any]) -> None:
    """Add a row to metrics.jsonl, to the tracker and to what is shown."""
    if t.is_first:
        runs.append_metrics(t.run.path / "metrics.jsonl", row)
    t.tracker.log(row)
    t.bar.show(row)


def save(t: Training) -> None:
    """Write a checkpoint of the steps so far."""
    weights, moments = checkpoint.weights_of(t.step.model), t.step.optimizer.state()  # all processes, where sharded
    if not t.is_first:
        return
    checkpoint.save(
        t.run.path / "checkpoints",
        t.state.step,
        weights,
        moments,
        (t.run.path / "metrics.jsonl").read_bytes(),
        {**t.state.saved(), "manifest": to_mapping(t.manifest)},
        t.config.train.keep_checkpoints,
    )
