"""One run, from its configuration to its last validation: begun, resumed where it was cut off, or found finished.

configuration -> text -> model -> run folder -> [ posbench.training.loop ] -> final validation -> manifest
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from posbench import runs
from posbench.config import Config, ConfigError
from posbench.console import console as new_console
from posbench.data import Batches, Corpus, prepare
from posbench.evaluation.protocols import VALIDATION, protocol_named
from posbench.machine.device import choose_device
from posbench.machine.lock import locked
from posbench.machine.memory import exhaustion_explained, keep_freed_memory, training_advice
from posbench.machine.signals import StopSignals
from posbench.model import build_model, check_scheme
from posbench.runs import Run, checkpoint
from posbench.runs.manifest import Costs, Manifest
from posbench.runs.results import ResultKey, perplexity, store
from posbench.tracking import Tracker, open_tracker
from posbench.training import folder
from posbench.training.loop import Died, Notice, Training, log_validation, train_steps, validation_scores
from posbench.training.processes import Processes, joined_processes
from posbench.training.progress import TrainingProgress
from posbench.training.step import Observer, TrainingStep, unobserved
from posbench.training.writer import Writer
from posbench.units import short_count

LAUNCHER_ECHO_SECONDS = 2.0  # between a signal to all processes and the same one from the launcher
_runs_of_process = itertools.count()


def train(config: Config, console: Console | None = None, observe: Observer = unobserved) -> Run:
    """Train the run that `config` names, resume it if it was interrupted, or return it if it is finished.

    Arguments: observe, called at the end of each phase of each step (`posbench.training.step.Observer`).
    Returns: the finished run.
    Raises: ConfigError for what a user can fix (nothing is left behind then); Stopped after Ctrl-C or SIGTERM, with
    a checkpoint; Died if the numbers became infinite or NaN, with the reason in the manifest.
    """
    # One process may train many schemes, and each gets compiled code of its own. Before the processes are joined: what
    # this imports would keep the threads of a process group alive.
    torch.compiler.reset()
    with joined_processes(config.train.device) as processes:
        run = runs.run_at(runs.run_folder(config))
        echo = LAUNCHER_ECHO_SECONDS if processes.size > 1 else 0.0
        with StopSignals(run.name, echo, speaks=processes.is_first) as signals:
            console = console or new_console(stderr=True, quiet=not processes.is_first)
            _train(config, run, processes, signals, console, observe)
            return run


def _train(
    config: Config, run: Run, processes: Processes, signals: StopSignals, console: Console, observe: Observer
) -> None:
    def notice(text: str) -> None:
        console.out(text)

    device = choose_device(config.train, processes.local_rank, processes.size)
    _check(config, processes)
    corpus = _prepared_text(config, processes, notice)
    keep_freed_memory()
    gc.collect()  # a compiled model refers to itself: the last run's would count as this run's memory
    with exhaustion_explained(device, training_advice(config.train)):
        if processes.broadcast(processes.is_first and folder.is_finished(run, config, corpus, device, notice)):
            return
        batches = Batches(corpus.train, config.train.context_length, config.train.batch_size, config.seed)
        model = build_model(config, corpus.vocab_size)
        manifest = folder.first_manifest(config, corpus, model, device)
        with locked(run.path) if processes.is_first else nullcontext():
            manifest = processes.broadcast(folder.continued(run, manifest, notice) if processes.is_first else None)
            if processes.is_first:
                notice(_size_line(run, manifest))
            # A process on a CPU has one resident set: later runs find its peak as the first run left it.
            has_own_memory = next(_runs_of_process) == 0 or device.is_cuda
            step = TrainingStep(config, model, device, processes)
            bar = TrainingProgress(console, f"{config.scheme.name} seed={config.seed}", config.train.num_steps)
            writer = Writer(beside=device.is_cuda)
            training = Training(
                config, run, manifest, corpus, batches, step, signals, notice, Tracker(), bar, writer, observe=observe
            )
            with (
                _reason_recorded(training),
                closing(writer),
                exhaustion_explained(device, training_advice(config.train)),
            ):
                folder.begin(training)
                with _tracked(training), bar.shown(done=training.state.steps_done):
                    device.reset_peak_memory()
                    # While a first step compiles there is nothing new to save, so a signal need not wait for its end.
                    signals.waits = processes.size > 1 or not device.compiled
                    with _stopped_where_interrupted(training):
                        train_steps(training)
                        finish(training, device.peak_memory_bytes() if has_own_memory else None)
            signals.raise_if_received("after it was finished")  # before the next run of a sweep


def _size_line(run: Run, manifest: Manifest) -> str:
    """`demo/vo_rope/seed=0: 1M tokens, 0.17 epochs of a text of 6.01M`."""
    line = f"{run.name}: {short_count(manifest.tokens)} tokens"
    if manifest.text_tokens and manifest.epochs:
        line += f", {manifest.epochs:.2g} epochs of a text of {short_count(manifest.text_tokens)}"
    return line


def _check(config: Config, processes: Processes) -> None:
    """What can be known to be wrong before any text is read. Raises: ConfigError."""
    processes.check(config)
    check_scheme(config)
    for protocol in config.evaluation.protocols:
        protocol_named(protocol)


def _prepared_text(config: Config, processes: Processes, notice: Notice) -> Corpus:
    """The text as tokens; the first process prepares it, and the others read what it left.

    Raises: ConfigError where there is too little to validate on.
    """
    if not processes.is_first:
        processes.wait_for("text")
    corpus = prepare(config, notice=notice)
    if processes.is_first:
        processes.announce("text")
    if corpus.validation.num_tokens <= config.train.context_length:
        raise ConfigError(
            f"the validation split has {corpus.validation.num_tokens} tokens "
            f"({corpus.validation.num_documents} documents), less than one context of {config.train.context_length}: "
            "raise data.validation_fraction, give longer text, or shorten train.context_length"
        )
    return corpus


@contextmanager
def _tracked(training: Training) -> Iterator[None]:
    """Open the tracker, name it in the manifest, and close it however the run ends."""
    if training.is_first:
        training.tracker = open_tracker(training.config, training.run, training.manifest, training.notice)
    failed = True
    try:
        training.manifest = replace(training.manifest, wandb=training.tracker.record or training.manifest.wandb)
        if training.is_first:
            training.run.write_manifest(training.manifest)
        yield
        failed = False
    finally:
        training.tracker.finish(failed=failed)


@contextmanager
def _reason_recorded(training: Training) -> Iterator[None]:
    """Where the run ends before its time, its manifest says why: died where the numbers went wrong, else stopped."""
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        explained = ConfigError(
            f"{training.run.name} stopped at step {training.state.steps_done}: {error.strerror or error}{where}. "
            "Make room or check the disk, and give the same command again"
        )
        _record_reason(training, explained)
        raise explained from error
    except BaseException as error:
        _record_reason(training, error)
        raise


@contextmanager
def _stopped_where_interrupted(training: Training) -> Iterator[None]:
    """Ctrl-C reaches the compilers that a step has started too: that they fail then is part of the stop."""
    try:
        yield
    except Exception:
        steps = training.state.steps_done
        training.signals.raise_if_received(f"in step {steps + 1}: give the same command again to resume")
        raise


def _record_reason(training: Training, error: BaseException) -> None:
    if not training.is_first:
        return
    with suppress(OSError, ConfigError):  # on a full disk, say: `state_of` still sees that nobody holds the lock
        if not training.run.is_finished:
            training.run.update_manifest(
                status=runs.DIED if isinstance(error, Died) else runs.STOPPED,
                reason=str(error) or type(error).__name__,
                ended=folder.now(),
                skipped_steps=training.state.skipped_steps,
            )


def finish(training: Training, peak_memory_bytes: int | None) -> None:
    """The last point of the curve, stored window by window: the loss table. Raises: Died; Stopped."""
    config = training.config
    rows, header = validation_scores(training, lambda tokens: _stop_if_asked(training))
    if not math.isfinite(header["nll_mean"]):
        raise Died(f"the validation loss after the last step is {header['nll_mean']}. Lower train.lr")
    if training.is_first:
        weights = checkpoint.weights_digest(training.run.path / "checkpoints", training.state.steps_done)
        header |= {"weights": weights, "peak_memory_bytes": peak_memory_bytes}
        store(training.run, ResultKey(VALIDATION.name, config.train.context_length), rows, header)
    log_validation(training, header)
    if training.is_first:
        _close(training, header)


def _close(training: Training, validation: dict[str, Any]) -> None:
    """Say in the manifest that the run is finished, with its losses and costs."""
    state = training.state
    tokens = state.timed_steps * training.config.train.tokens_per_step
    costs = Costs(
        tokens_per_second=round(tokens / state.train_seconds, 1) if state.train_seconds else None,
        train_seconds=round(state.train_seconds, 2),
        peak_memory_bytes=validation["peak_memory_bytes"],
        first_step_seconds=round(state.first_step_seconds, 2),
    )
    loss, bits_per_byte = validation["nll_mean"], validation["bits_per_byte"]
    losses = {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_byte}
    training.run.update_manifest(
        status=runs.FINISHED,
        reason=None,
        skipped_steps=state.skipped_steps,
        costs=costs,
        ended=folder.now(),
        weights=validation["weights"],
        fingerprints=replace(training.manifest.fingerprints, batches=state.batches[:16]),
        **losses,
    )
    training.tracker.summary(training.run.manifest.figures)
    speed = "" if costs.tokens_per_second is None else f", {costs.tokens_per_second:,.0f} tokens/s"
    training.notice(
        f"{training.run.name}: loss {loss:.4f} nats/token, perplexity {losses['perplexity']:.2f}, {bits_per_byte:.4f} "
        f"bits/byte{speed}"
    )
    initial = training.run.initial_loss
    if initial is not None and loss > initial:
        training.notice(
            f"{training.run.name} diverged: its loss of {loss:.4f} is above the {initial:.4f} that it began with. "
            "Lower train.lr"
        )


def _stop_if_asked(training: Training) -> None:
    signal_number = training.step.processes.stop_signal(training.signals.received)
    if signal_number:
        training.signals.stop(
            signal_number, "after its last step, with a checkpoint: give the same command again to finish"
        )
