"""Train one run: set up, loop, finish. Read this file top to bottom.

    configuration -> text -> model -> run folder -> [ batch -> loss -> gradients -> step ] -> validation -> manifest

Batch n depends only on (seed, n) and the text, and each initial weight only on (seed, its name). So all schemes with
one seed see the same batches and start from the same weights, and a resumed run ends with the same bytes as an
uninterrupted one (on a CPU; GPU kernels do not sum in a fixed order).
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from posbench import runs
from posbench.catalogue import own_files
from posbench.config import Config, ConfigError
from posbench.config.units import short_count
from posbench.data import Batch, Batches, Dataset, dataset_of
from posbench.data.dataset import chained
from posbench.evaluation.evaluate import score_split
from posbench.evaluation.protocols import VALIDATION, Scored, check_protocols, order
from posbench.model.architecture import checked_architecture
from posbench.model.decoder import Decoder, build_model
from posbench.model.positions import is_rescaled, positions_of, show_positions
from posbench.runs import Manifest, Run, checkpoint, fingerprints
from posbench.runs.manifest import Costs
from posbench.runs.results import ResultKey, perplexity
from posbench.runs.run import initial_loss
from posbench.runs.start import Start, continued_start, start_at, trunk_start
from posbench.runs.tracking import Tracker, open_tracker
from posbench.schemes.building import seed_of, unused_schemes
from posbench.schemes.entries import described
from posbench.system.console import RunBar, Say
from posbench.system.console import console as new_console
from posbench.system.device import (
    Device,
    choose_device,
    exhaustion_explained,
    flushed_denormals,
    keep_freed_memory,
    training_advice,
)
from posbench.system.files import locked, write_text
from posbench.system.signals import StopSignals
from posbench.training.optimizers import optimizer_class
from posbench.training.optimizers.optimizer import learning_rate
from posbench.training.processes import Processes, check_divides, joined_processes
from posbench.training.resume import (
    LoopState,
    existing_manifest,
    load,
    new_manifest,
    now,
    report_changes,
)
from posbench.training.step import Died, Observer, TrainingStep, unobserved

ECHO_SECONDS = 2.0  # torchrun repeats a signal that all processes received within this time
_runs_of_process = itertools.count()


# ---------------------------------------------------------------- set up


@flushed_denormals()
def train(config: Config, console: Console | None = None, observe: Observer = unobserved) -> Run:
    """Train the run that `config` names, resume it if it was interrupted, or return it if it is finished.

    Raises: ConfigError before any file is written; Stopped after Ctrl-C or SIGTERM, with a checkpoint; Died if losses
    or gradients became infinite or NaN, with the reason in the manifest.
    """
    # One process may train many schemes, and each needs its own compiled code. This comes before the processes are
    # joined, because the modules it imports would keep the threads of a process group alive.
    torch.compiler.reset()
    run = runs.run_at(runs.run_folder(config))
    with joined_processes(config.train.device) as processes:
        # `timeout` signals a process and then its group.
        echo = ECHO_SECONDS if processes.size > 1 else 0.5
        with StopSignals(run.name, echo, speaks=processes.is_first) as signals:
            console = console or new_console(stderr=True, quiet=not processes.is_first)
            device = choose_device(config.train, processes.local_rank, processes.size)
            with opened(config, device, processes, signals, console, observe) as training:
                if training is not None:  # the run is not finished yet
                    training.take_steps()
                    training.finish()
            signals.raise_if_received("after it was finished")  # so that a sweep does not begin its next run
    return run


@contextmanager
def opened(
    config: Config,
    device: Device,
    processes: Processes,
    signals: StopSignals,
    console: Console,
    observe: Observer = unobserved,
) -> Iterator[Training | None]:
    """Yield the run with its first weights or newest checkpoint, locked, ready for its steps; None if it is finished.

    An error within the context is recorded in the run's manifest. Raises: as `train`.
    """
    run = runs.run_at(runs.run_folder(config))
    check_divides(config, processes.size)
    # Refuse a wrong configuration before any text is read.
    architecture = checked_architecture(config)
    check_protocols(config)
    corpus = _prepared_data(config, processes, console.out)
    # The weights that train.from_run names; None: they are drawn from the seed.
    start = continued_start(config)
    if start is not None:
        start.check_tokenizer(config, corpus.tokenizer_fingerprint)
        for note in start.notes:
            console.out(note)
    existing = existing_manifest(run, config, corpus, device, console.out, start)  # None: the folder has no run
    if existing is not None and existing.status == runs.FINISHED:
        console.out(f"{run.name} is finished (loss {existing.loss or math.nan:.4f}): nothing to do")
        yield None
        return

    # Text, model and optimizer, still without a file of the run.
    keep_freed_memory()
    # A compiled model refers to itself, so the last run's would count as this run's memory. `train_stacked` has
    # collected before the first run of a stack.
    if not device.is_stacked:
        gc.collect()
    with exhaustion_explained(device, training_advice(config.train)):
        batches = corpus.batches(config.train, config.seed)
        model = build_model(config, corpus.vocab_size, architecture, corpus.bos_id)
        # The first process makes the manifest, and the others get a copy.
        manifest = None
        if processes.is_first:
            manifest = new_manifest(config, corpus, model, device, existing, start)
        manifest = processes.broadcast(manifest)
        step = TrainingStep(config, model, device, processes)
        manifest = replace(manifest, optimizer=step.optimizer.record)
    # From here on the run belongs to this process: its lock, its files, its failures.
    with locked(run.path) if processes.is_first else nullcontext():
        # Another process may have trained it while this one prepared text.
        if processes.broadcast(processes.is_first and runs.state_of(run) == runs.FINISHED):
            raise ConfigError(f"{run.name} was finished by another process meanwhile: run the command again")
        _introduce(config, manifest, console.out)
        # Rotations that the name of the scheme does not tell: those of a continued model, and rescaled ones.
        if start is not None or is_rescaled(model.scheme):
            T = config.train.context_length
            show_positions([(config.scheme.name, positions_of(model, T))], T, console)
        if existing is not None:
            report_changes(existing, manifest, console.out)
        training = Training(config, run, manifest, corpus, batches, step, signals, console, observe, start)
        with training.record_failure(), exhaustion_explained(device, training_advice(config.train)):
            training.begin()
            yield training


def _introduce(config: Config, manifest: Manifest, say: Say) -> None:
    # Print what the run will train, and what the user should know before it begins.
    line = f"{manifest.run_name}: {short_count(manifest.tokens)} tokens"
    # None: problems of a task have no end. `manifest.tokens` may include the tokens of the model that the run began
    # with, so epochs count the steps of this run's schedule instead.
    if manifest.text_tokens:
        scheduled_tokens = config.train.num_steps * config.train.tokens_per_step
        epochs = scheduled_tokens / manifest.text_tokens
        line += f", {epochs:.2g} epochs of a text of {short_count(manifest.text_tokens)}"
    say(line)
    # None: AdamW trains all parameters.
    if manifest.optimizer:
        described = optimizer_class(config.train).described(manifest.optimizer)
        say(f"train.optimizer={config.train.optimizer}: {described}")
    # `Config` has put the scheme's entry in train.lr_of into scheme.lr. None: it has no entry.
    if config.train.lr_of and config.scheme.lr is None:
        say(
            f"scheme={config.scheme.name} has no learning rate of its own in train.lr_of: it takes "
            f"train.lr={config.train.lr:g}"
        )
    # A list of alternating schemes may be longer than the model has layers.
    if missing := unused_schemes(config.scheme, config.model.num_layers):
        say(
            f"scheme={config.scheme.name}: none of the {config.model.num_layers} layers has "
            f"{' or '.join(missing)}, so this run does not test it (raise model.num_layers)"
        )


def _prepared_data(config: Config, processes: Processes, say: Say) -> Dataset:
    """Return the data set of `config`, prepared by the first process for all.

    Raises: ConfigError if there is too little text to validate on, or no document is long enough to score order.
    """
    # The first process prepares the text, which the others then find in the cache.
    if not processes.is_first:
        processes.wait_for("text")
    corpus = dataset_of(config, say)
    if processes.is_first:
        processes.announce("text")
    validation, length = corpus.splits["validation"], config.train.context_length
    # None: problems of a task have no end.
    if validation.num_tokens is not None and validation.num_tokens <= length:
        raise ConfigError(
            f"the validation split has {validation.num_tokens} tokens ({validation.num_documents} documents), less "
            f"than one context of {length}: raise data.validation_fraction, give longer text, or shorten "
            "train.context_length"
        )
    if config.train.order_every is not None:
        order.window_starts(validation, length, order.WINDOWS)  # raises if no document is long enough to score order
    return corpus


@contextmanager
def _evaluated(model: Decoder) -> Iterator[Decoder]:
    # A scheme in a user's file may compute different things in the two modes.
    model.eval()
    yield model
    model.train()


@dataclass
class Pauses:
    """The time that validations and checkpoints took, of one run or of all runs of a stack together."""

    seconds: float = 0.0


class Training:
    """A run in training: call `begin`, `take_steps` and `finish`. Only the first process writes files and prints."""

    def __init__(
        self,
        config: Config,
        run: Run,
        manifest: Manifest,
        corpus: Dataset,
        batches: Batches,
        step: TrainingStep,  # the model on its device, its optimizer, and the processes that share them
        signals: StopSignals,
        console: Console,
        observe: Observer,
        start: Start | None = None,
    ) -> None:
        self.config, self.run, self.manifest, self.corpus, self.batches = config, run, manifest, corpus, batches
        self.step, self.signals, self.console, self.observe = step, signals, console, observe
        self.processes, self.device, self.is_first = step.processes, step.device, step.processes.is_first
        self.state, self.start, self.pauses = LoopState(), start, Pauses()
        # Tokens that the source of the weights was trained on. A run that keeps the schedule (start.checkpoint) counts
        # its own steps from the first step of its source, so they are no addition.
        self.tokens_before = 0 if start is None or start.checkpoint else start.tokens
        # A continued run goes on with the batches that its source has not read.
        self.first_batch = math.ceil(self.tokens_before / config.train.tokens_per_step)
        self.tracker = Tracker()
        self.bar = RunBar(console, f"{config.scheme.name} seed={config.seed}", config.train.num_steps)
        # A process has one peak of resident memory on a CPU, which later runs would share with the first one.
        self.has_own_memory = (next(_runs_of_process) == 0 or self.device.is_cuda) and not self.device.is_stacked

    def begin(self) -> None:
        """Write the run folder's first files, and load the weights to start from."""
        # Weights come from the run's newest checkpoint, from the checkpoint of a longer run that this one branches off,
        # or from `start`; otherwise they were drawn from the seed.
        folder = self.run.path
        resumed: Start | None = None  # the run's own newest checkpoint
        trunk: Start | None = None  # the longer run's checkpoint
        if self.is_first:
            self._write_inputs()
            newest = checkpoint.newest(folder / "checkpoints", self.console.out)
            if newest:
                resumed = start_at(newest)
            else:
                trunk = trunk_start(self.config, self.manifest, self.console.out)
        resumed, trunk = self.processes.broadcast((resumed, trunk))
        start = resumed or trunk or self.start
        exact_checkpoint = None  # the checkpoint to continue with its moments, as if the run had never stopped
        if start:
            exact_checkpoint = start.checkpoint
            fresh, unused = load(start, self.step, self.state)
            if exact_checkpoint:
                self._adopt(checkpoint.manifest_in(exact_checkpoint), is_resumed=bool(resumed))
                # `start` is the one that train.from_run names.
                if not resumed and not trunk:
                    self.console.out(
                        f"{self.run.name}: goes on from {start.name}, with its moments and its schedule; the "
                        f"positions there are {start.positions.described}"
                    )
                # A barrier: all processes must have read the checkpoint before the first one writes.
                self.processes.broadcast(None)
            else:
                self._introduce_weights(start, fresh, unused)
        if self.is_first:
            # The log goes up to the checkpoint; rows after it are written again.
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            if exact_checkpoint:
                write_text(
                    folder / "metrics.jsonl", (exact_checkpoint / checkpoint.METRICS).read_text(encoding="utf-8")
                )
            if resumed and exact_checkpoint:
                train = self.config.train
                checkpoint.prune(
                    exact_checkpoint.parent, exact_checkpoint, train.keep_checkpoints, train.branching_steps
                )
                self.console.out(f"{self.run.name}: resumed at step {self.state.steps_done}")
            self.tracker = open_tracker(self.config, self.run, self.manifest, self.console.out)
            self.tracker.log_missing(self.run.logged)
            self.manifest = replace(self.manifest, wandb=self.tracker.record or self.manifest.wandb)
            self.run.write_manifest(self.manifest)

    def _write_inputs(self) -> None:
        folder = self.run.path
        # Temporary files of a process that was killed.
        runs.remove_unfinished(folder)
        self.run.write_manifest(self.manifest)
        write_text(folder / "config.yaml", yaml.safe_dump(self.config.to_mapping(), sort_keys=False))
        write_text(folder / "tokenizer.json", self.corpus.tokenizer.to_str(pretty=True))
        for name in self.manifest.scheme_files:
            write_text(folder / Path(name).name, own_files.source(Path(name)))  # for readers; never imported

    def _adopt(self, previous: Manifest, is_resumed: bool) -> None:
        """Record the versions and the code that trained a checkpoint which this run continues exactly.

        Arguments: previous, the manifest in the checkpoint; is_resumed, whether it is this run's own.
        """
        versions = {}
        for name, version in self.manifest.versions.items():
            versions[name] = fingerprints.versions_used(previous.versions.get(name), version)
        self.manifest = replace(self.manifest, versions=versions)
        if is_resumed:
            # Only its own checkpoint shares the run's fingerprints.
            code = fingerprints.versions_used(previous.fingerprints.code, self.manifest.fingerprints.code)
            prints = replace(previous.fingerprints, code=code)
            self.manifest = replace(self.manifest, fingerprints=prints, branched_at=previous.branched_at)
        else:
            self.manifest = replace(self.manifest, branched_at=self.state.steps_done)

    def _introduce_weights(self, start: Start, fresh: Sequence[str], unused: Sequence[str]) -> None:
        # Say what the run starts from. Arguments: fresh and unused, as `load` returns them.
        tokens = f" ({short_count(self.tokens_before)} tokens)" if self.tokens_before else ""
        line = (
            f"{self.run.name}: starts from the weights of {start.name}{tokens}, whose positions are "
            f"{start.positions.described}; this run has {described(self.config.scheme.to_mapping())}; "
            "the optimizer's moments start at zero, the schedule at its first step"
        )
        if fresh:
            line += f"; drawn from the seed: {', '.join(fresh)}"
        if unused:
            line += f"; not used: {', '.join(unused)}"
        self.console.out(line)

    # ------------------------------------------------------------ loop

    def take_steps(self) -> None:
        """Take all remaining steps, with logging, validations and checkpoints.

        Raises: Stopped after a signal, with a checkpoint; Died if losses or gradients are not finite.
        """
        steps = self.steps()
        outcome: Tensor | None = None
        with suppress(StopIteration):
            while True:
                n, batch = steps.send(outcome)  # the first time None: a generator begins with it
                batch_on_device = batch.each(self.device.send)
                self.observe("batch", n, self.step)
                outcome = self.step(n, batch_on_device, self.observe)

    def steps(self) -> Generator[tuple[int, Batch], Tensor | None, None]:
        """Yield (n, batch) for each remaining step n (0-based), and receive its [loss, gradient norm].

        Raises: as `take_steps`.
        """
        # A generator, because whoever takes the steps decides how: one by one, or those of several runs as one
        # (`Stack`).
        train, state, step = self.config.train, self.state, self.step
        validate_every = train.steps_between_validations
        checkpoint_every = train.checkpoint_every or max(1, math.ceil(train.num_steps / 10))
        branching_steps = train.branching_steps  # steps at which the decay of a shorter run begins
        self.device.reset_peak_memory()
        # While the first step compiles, there is nothing new to save, so a signal need not wait for its end.
        self.signals.waits = self.processes.size > 1 or not self.device.compiled
        with self.bar:
            if state.steps_done == 0:
                paused = time.perf_counter()
                self.validate()  # with the initial weights
                self.pauses.seconds += time.perf_counter() - paused
            first_step = state.steps_done  # 0, or more if the run goes on from a checkpoint
            row_steps, row_seconds = 0, 0.0  # timed steps since the last logged row, and their time
            self.bar.advance(first_step)
            began = time.perf_counter()  # when the time of the current stretch of steps began
            pauses_before = self.pauses.seconds
            # The loop: batch, step, then whatever is due after it.
            for n in range(first_step, train.num_steps):
                # Batch n: windows or problems drawn from (seed, n), the same for every scheme.
                batch = self.batches.batch(self.first_batch + n)
                state.batches = chained(state.batches, batch)

                # Loss, gradients, weights: forward and backward over micro-batches, then the optimizer
                # (posbench.training.step). The result stays on the device, and the host does not wait for it. Our code
                # draws no random numbers in a step; if a user's scheme does, the seed makes it repeat after a resume.
                self.device.seed(seed_of(self.config.seed, f"step {n}"))
                outcome = yield n, batch
                assert outcome is not None
                state.pending.append(outcome)  # [2]: loss (nats per token), gradient norm
                state.steps_done = done = n + 1
                self.bar.advance(done)

                signal_number = self.processes.stop_signal(self.signals.received)  # equal in all processes
                is_last = done == train.num_steps
                is_logged = is_last or done % train.log_every == 0
                is_validated = not is_last and done % validate_every == 0  # `finish` validates after the last step
                is_ordered = train.is_ordered(done)
                is_saved = is_last or done % checkpoint_every == 0 or done in branching_steps or bool(signal_number)
                # The first step compiles and would distort the speed.
                if n > first_step:
                    state.timed_steps, row_steps = state.timed_steps + 1, row_steps + 1
                # The host reads the losses, and so waits for the device, only after the first step, which is timed
                # separately, and if something is due.
                if n == first_step or is_logged or is_validated or is_ordered or is_saved:
                    self._fetch_losses()
                    seconds = time.perf_counter() - began - (self.pauses.seconds - pauses_before)
                    if n == first_step:
                        state.first_step_seconds += seconds
                        # From now on a signal waits for the end of a step, and a checkpoint.
                        self.signals.waits = True
                    else:
                        state.train_seconds, row_seconds = state.train_seconds + seconds, row_seconds + seconds
                    paused = time.perf_counter()
                    if is_logged:
                        self._log_step(row_steps, row_seconds)
                        row_steps, row_seconds = 0, 0.0
                    if is_validated:
                        self.validate()
                    if is_ordered:
                        self._score_order()
                    if is_saved:
                        self._save()
                        self.observe("checkpoint", n, step)
                    # Validations and checkpoints do not count as training time, also not as that of other runs in a
                    # stack.
                    began = time.perf_counter()
                    self.pauses.seconds += began - paused
                    pauses_before = self.pauses.seconds

                if signal_number:
                    progress = f"at step {done} of {train.num_steps}, with a checkpoint"
                    self.signals.stop(signal_number, f"{progress}: run the same command again to resume")

    def validate(self) -> None:
        """Score the validation windows and log their mean loss. Raises: Died if it is not finite."""
        self._log_validation(self._validation_scores()[1])

    def _fetch_losses(self) -> None:
        """Fetch the losses of the steps since the last call, and print a line per skipped step.

        Raises: Died if more steps were skipped than `train.max_skipped_steps`.
        """
        train = self.config.train
        for n, loss, norm in self.state.fetch():
            rate = learning_rate(n, train)
            batch = self.first_batch + n
            skipped = f"step {n + 1}: loss {loss}, gradient norm {norm}, learning rate {rate:.3g}, batch {batch}"
            self.console.out(f"{self.run.name}: skipped {skipped}; weights and moments are as before")
            if self.state.skipped_steps > train.max_skipped_steps:
                raise Died(
                    f"{self.state.skipped_steps} steps were not finite, more than "
                    f"train.max_skipped_steps={train.max_skipped_steps}; the last was {skipped}. {self._remedy(n + 1)}"
                )

    def _remedy(self, steps: int) -> str:
        # Return what the user can do about a loss that is not finite. Arguments: steps, how many have been taken.
        scheme, state = self.config.scheme, self.state
        # A user's own class is verified by its file.
        name = scheme.kind if own_files.is_class_path(scheme.kind) else scheme.name
        verify_command = f"posbench verify {name}"
        # A skipped step changes no weight. So the learning rate is not the cause if all steps so far were skipped.
        if steps == state.skipped_steps:
            return f"No step has changed the weights, so train.lr is not the cause: check the scheme ({verify_command})"
        # It may not be the cause either if several in a row were: no batch has a finite loss with these weights.
        if state.skipped_in_a_row > 1:
            same_weights = (
                f"The last {state.skipped_in_a_row} steps were skipped, with the same weights on different batches"
            )
            return f"{same_weights}: check the scheme ({verify_command}); if it is right, lower train.lr"
        return "Lower train.lr"

    def _log_step(self, steps: int, seconds: float) -> None:
        """Log mean loss, gradient norms, learning rate and speed of the `steps` since the previous row."""
        state, train = self.state, self.config.train
        row = {
            "kind": "train",
            "step": state.steps_done,
            "tokens": self.tokens_done,
            "lr": learning_rate(state.steps_done - 1, train),
            **state.take_row(),
            "skipped_steps": state.skipped_steps,
        }
        # Without a timed step the speed is not known.
        if steps:
            row["tokens_per_second"] = round(steps * train.tokens_per_step / seconds, 1)
        self._append(row)

    def _validation_scores(self, advance: Callable[[int], object] = lambda tokens: None) -> Scored:
        """Score the validation windows, always the same ones; return a row per window, and the header with means.

        Arguments: advance, called with a number of tokens as scoring proceeds. Raises: Died if the loss is not finite.
        """
        length, settings = self.config.train.context_length, VALIDATION.settings(self.config)
        with _evaluated(self.step.model) as model:
            rows, header = score_split(
                model, self.corpus, VALIDATION.split, VALIDATION.name, length, settings, advance=advance
            )
        if not math.isfinite(header["nll_mean"]):
            step = self.state.steps_done
            raise Died(f"the validation loss at step {step} is NaN or infinite. {self._remedy(step)}")
        return rows, header

    def _log_validation(self, header: dict[str, Any]) -> None:
        row = {
            "kind": "validation",
            "step": self.state.steps_done,
            "tokens": self.tokens_done,
            "loss": header["nll_mean"],
        }
        for name in ("bits_per_byte", "accuracy"):  # of text and of tasks
            if name in header:
                row[name] = header[name]
        self._append(row)

    def _score_order(self) -> None:
        """Log how much the loss rises if the order of tokens far back is destroyed. Raises: Died if not finite."""
        train, step = self.config.train, self.state.steps_done
        # On a CPU, passes as small as a training step's stay in the cache: 0.8 of the time of passes of 16,384 tokens.
        pass_tokens = train.tokens_per_step // train.accumulation
        with _evaluated(self.step.model) as model:
            worth = order.worth_beyond_near(model, self.corpus.splits["validation"], train.context_length, pass_tokens)
        if not all(map(math.isfinite, worth.values())):
            raise Died(f"a loss without long-range order at step {step} is NaN or infinite. {self._remedy(step)}")
        self._append({"kind": "order", "step": step, "tokens": self.tokens_done, **worth})

    @property
    def tokens_done(self) -> int:
        """Return the tokens trained on so far, with the source's if the run continues another one."""
        return self.tokens_before + self.state.steps_done * self.config.train.tokens_per_step

    def _append(self, row: dict[str, Any]) -> None:
        if self.is_first:
            runs.append_metrics(self.run.path / "metrics.jsonl", row)
        self.tracker.log(row)
        self.bar.show(row)

    def _save(self) -> None:
        if self.is_first:
            checkpoint.save(
                self.run.path / "checkpoints",
                self.state.steps_done,
                dict(self.step.model.named_parameters()),
                self.step.optimizer.state(),
                (self.run.path / "metrics.jsonl").read_bytes(),
                {**self.state.saved(), "manifest": asdict(self.manifest)},
                self.config.train.keep_checkpoints,
                self.config.train.branching_steps,
            )

    # ------------------------------------------------------------ finish

    def finish(self) -> None:
        """Validate, store the loss of each window, and mark the run as finished.

        Raises: Died if the loss is not finite; Stopped after a signal.
        """
        config, state = self.config, self.state
        # Read before the validation, whose memory is not training's. None: it was not measured for this run alone.
        peak_memory_bytes = self.device.peak_memory_bytes() if self.has_own_memory else None
        rows, header = self._validation_scores(lambda tokens: self._stop_if_asked())
        if not self.is_first:
            return
        # The result names the weights it scored.
        weights = checkpoint.weights_digest(self.run.path / "checkpoints", state.steps_done)
        header |= {"weights": weights, "peak_memory_bytes": peak_memory_bytes}
        self.run.store(ResultKey(VALIDATION.name, config.train.context_length), rows, header)
        self._log_validation(header)
        speed = None  # a run of one step has no timed step
        if state.train_seconds:
            speed = state.timed_steps * config.train.tokens_per_step / state.train_seconds
        loss, bits_per_byte = header["nll_mean"], header.get("bits_per_byte")  # a task has no bytes
        self.run.update_manifest(
            status=runs.FINISHED,
            reason=None,
            skipped_steps=state.skipped_steps,
            costs=Costs(
                tokens_per_second=None if speed is None else round(speed, 1),
                train_seconds=round(state.train_seconds, 2),
                peak_memory_bytes=peak_memory_bytes,
                first_step_seconds=round(state.first_step_seconds, 2),
            ),
            ended=now(),
            weights=weights,
            fingerprints=replace(self.manifest.fingerprints, batches=state.batches[:16]),
            loss=loss,
            perplexity=perplexity(loss),
            bits_per_byte=bits_per_byte,
        )
        self.tracker.summary(self.run.manifest.figures)
        line = f"{self.run.name}: loss {loss:.4f} nats/{self.corpus.unit}"
        if self.corpus.unit == "token":
            line += f", perplexity {perplexity(loss):.2f}, {bits_per_byte or math.nan:.4f} bits/byte"
        if speed is not None:
            line += f", {speed:,.0f} tokens/s" + (" in a stack" if self.device.is_stacked else "")
        self.console.out(line)
        # A run that starts from other weights begins with a low loss, so it is not compared.
        first_loss = initial_loss(self.run.logged)
        if first_loss is not None and loss > first_loss and self.start is None:
            self.console.out(
                f"{self.run.name} diverged: its loss of {loss:.4f} is above the {first_loss:.4f} that it began with. "
                "Lower train.lr"
            )

    def _stop_if_asked(self) -> None:
        signal_number = self.processes.stop_signal(self.signals.received)
        if signal_number:
            self.signals.stop(
                signal_number, "after its last step, with a checkpoint: run the same command again to finish"
            )

    @contextmanager
    def record_failure(self) -> Iterator[None]:
        """Write the reason to the manifest if the `with` block raises.

        Raises: the error itself, or the Stopped or ConfigError that explains it.
        """
        failed = True
        try:
            with self._explain_errors():
                yield
            failed = False
        except BaseException as error:
            # The manifest cannot be written if the disk is full. `state_of` still sees that nobody holds the lock.
            with suppress(OSError, ConfigError):
                if self.is_first and not self.run.is_finished:
                    self.run.update_manifest(
                        status=runs.DIED if isinstance(error, Died) else runs.STOPPED,
                        reason=str(error) or type(error).__name__,
                        ended=now(),
                        skipped_steps=self.state.skipped_steps,
                    )
            raise
        finally:
            self.tracker.finish(failed)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        # Turn errors that follow from a signal into Stopped, and errors of files into ConfigError.
        try:
            yield
        except Exception as error:
            # Ctrl-C also kills the compilers that a step has started: ignore their errors.
            self.signals.raise_if_received(f"in step {self.state.steps_done + 1}: run the same command again to resume")
            if not isinstance(error, OSError):
                raise
            file = f" {error.filename}" if error.filename else ""
            raise ConfigError(
                f"{self.run.name} stopped at step {self.state.steps_done}: {error.strerror or error}{file}. "
                "Make room or check the disk, and run the same command again"
            ) from error
