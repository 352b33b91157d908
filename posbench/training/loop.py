"""One run from its configuration to its last validation: made, resumed where it was cut off, or found finished.

    text -> model -> checkpoint, if any -> [ batch n -> loss -> gradients -> step ] ... -> validation -> manifest

Batch n depends on (seed, n) and the text alone, weights on (seed, name): so every scheme under one seed sees the same
batches from the same start, and a run that was killed and resumed ends with the same bytes as one that was not (on a
CPU: GPU kernels sum in an order of their own).
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from posbench import runs
from posbench.config import Config, ConfigError
from posbench.data import Batches, Corpus, prepare
from posbench.evaluation.evaluate import score_split, store
from posbench.machine.device import Device, choose_device
from posbench.machine.files import write_json, write_text
from posbench.machine.lock import hold
from posbench.machine.memory import exhaustion_explained, keep_freed_memory, training_advice
from posbench.machine.signals import StopSignals
from posbench.model import Decoder, build_model, shape_of
from posbench.runs import Run, TornManifest, checkpoint, fingerprints
from posbench.schemes import build_scheme
from posbench.size import num_parameters
from posbench.tracking import Tracker, open_tracker
from posbench.training.optimizer import AdamW, learning_rate
from posbench.training.processes import Alone, group
from posbench.training.progress import TrainingProgress

if TYPE_CHECKING:
    import pandas as pd

Notice = Callable[[str], None]
LAUNCHER_ECHO_SECONDS = 2.0  # between a signal to all processes and the same from the launcher


class Died(Exception):
    """The run cannot go on; its manifest says why."""


@dataclass
class _Progress:
    """The loop's own state: what a checkpoint holds besides weights and moments. Losses in nats per token."""

    step: int = 0  # steps done
    batches: str = ""  # SHA-256 chain over the batches consumed
    loss_sum: float = 0.0  # of the finite steps since the last logged row
    loss_count: int = 0
    skipped_steps: int = 0
    train_seconds: float = 0.0
    pending: list[Tensor] = field(default_factory=list)  # [loss, norm] of steps the host has not looked at

    def saved(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("pending", "step")}


def train(config: Config, console: Console | None = None) -> Run:
    """Train the run that `config` names, or go on with it, or find it finished.

    Returns: the finished run.
    Raises: ConfigError for what a user can mend (nothing is left behind then); Stopped after Ctrl-C or SIGTERM, with
    a checkpoint left; Died where the numbers went wrong, with the reason in the manifest.
    """
    # One process may train many schemes; each gets compiled code of its own. Before a group is joined: what this
    # imports would keep that group's threads alive.
    torch.compiler.reset()
    with group(config.train.device) as together:
        return _train(config, console or Console(stderr=True, quiet=not together.is_first), together)


def _train(config: Config, console: Console, together: Alone) -> Run:
    def notice(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    run = Run(runs.run_folder(config))
    echo = LAUNCHER_ECHO_SECONDS if together.size > 1 else 0.0
    with StopSignals(run.name, echo, speaks=together.is_first) as signals:
        device = choose_device(config.train, together.local_rank, together.size)
        together.check(config)
        build_scheme(config.scheme, shape_of(config))  # its own rules, before any text is read
        if not together.is_first:
            together.wait_for("text")
        corpus = prepare(config, notice=notice)
        if together.is_first:
            together.tell("text")
        batches = Batches(corpus.train, config.train.context_length, config.train.batch_size, config.seed)
        if corpus.validation.num_tokens <= config.train.context_length:
            raise ConfigError(
                f"the validation split has {corpus.validation.num_tokens} tokens "
                f"({corpus.validation.num_documents} documents), less than one context of "
                f"{config.train.context_length}: raise data.validation_fraction, give longer text, or shorten "
                "train.context_length"
            )
        keep_freed_memory()
        gc.collect()  # a compiled model holds on to itself: the last run's would count as this one's memory
        with exhaustion_explained(device, training_advice(config.train)):
            model = build_model(config, corpus.vocab_size)
            facts = _facts(config, corpus, model, device)
            if together.first_says(together.is_first and _is_finished_already(run, config, facts, notice)):
                return run
            with hold(run.path) if together.is_first else nullcontext():
                facts |= together.first_says(
                    _kept_of(_manifest_before(run, notice), facts) if together.is_first else {}
                )
                _Training(config, run, corpus, batches, model, device, facts, console, notice, signals, together).go()
                signals.raise_if_received("after it was finished")  # before the next run of a sweep
                return run


def _facts(config: Config, corpus: Corpus, model: Decoder, device: Device) -> dict[str, Any]:
    """What the manifest says of a run before its first step."""
    identity = fingerprints.identity(config, device.describe())
    return {
        "format": runs.FORMAT,
        "status": runs.RUNNING,
        "experiment": config.experiment_name,
        "scheme": config.scheme.name,
        "seed": config.seed,
        "vocab_size": corpus.vocab_size,
        "num_parameters": {
            **num_parameters(config, model.embedding.num_embeddings),
            "scheme": sum(p.numel() for p in model.scheme.parameters()),
        },
        "is_relative": bool(model.scheme.is_relative),
        "fingerprints": {
            "data": corpus.fingerprint,
            "tokenizer": corpus.tokenizer_fingerprint,
            "initial_weights": fingerprints.weights_fingerprint(model),
            "config": fingerprints.config_fingerprint(identity),
            "code": fingerprints.code_fingerprint(),
        },
        "identity": identity,
        "versions": {"posbench": _version(), "python": platform.python_version(), "torch": torch.__version__},
        "device": device.describe(),
        "num_steps": config.train.num_steps,
        "tokens": config.train.num_steps * config.train.tokens_per_step,
        "started": _now(),
        "wandb": None,
    }


def _version() -> str:
    import posbench

    return posbench.__version__


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_finished_already(run: Run, config: Config, facts: dict[str, Any], notice: Notice) -> bool:
    """Whether the folder holds this run, finished.

    Raises: ConfigError naming what differs from another run's configuration or data; Died where it cannot go on.
    """
    manifest = _manifest_before(run, lambda text: None)
    if manifest is None:
        return False
    changed = fingerprints.changes(manifest, facts)
    ended = manifest["status"] in (runs.FINISHED, runs.DIED)
    if changed and not ended and not checkpoint.any_written(run.path / "checkpoints"):
        return False  # memory ran out in its first step, say: nothing of it was kept, the new one may have the folder
    if changed:
        raise ConfigError(
            f"{run.path} holds a run of another configuration: {'; '.join(changed)}. Give the new one its own name "
            "(experiment_name=..., or scheme.name=... for a variant of a scheme), or delete the folder"
        )
    if manifest["status"] == runs.FINISHED:
        loss = manifest.get("loss")
        notice(f"{run.name} is finished{f' (loss {loss:.4f})' if isinstance(loss, float) else ''}: nothing to do")
        return True
    skipped = manifest.get("skipped_steps", 0)
    if manifest["status"] == runs.DIED and skipped > config.train.max_skipped_steps:
        raise Died(
            f"it died before: {manifest.get('reason')}. Train it under another name (experiment_name=...), or delete "
            f"{run.path}; train.max_skipped_steps={skipped} or more goes on from its last checkpoint"
        )
    was, now = (
        fingerprints.flat({**{key: kept[key] for key in ("versions", "device")}, "code": kept["fingerprints"]["code"]})
        for kept in (manifest, facts)
    )
    for change in fingerprints.differences(was, now):
        notice(
            f"{run.name}: changed since it began, {change}: the rest may differ in its last digits from an "
            "uninterrupted run; the report does not join runs of different code"
        )
    return False


def _manifest_before(run: Run, notice: Notice) -> dict[str, Any] | None:
    """`run.json`, or what the newest intact checkpoint keeps of it; None where there is neither."""
    try:
        return run.manifest
    except TornManifest:
        kept = checkpoint.newest(run.path / "checkpoints", lambda text: None)
        if kept is None:
            return None
        notice(f"{run.path / 'run.json'} is missing or torn: made again from checkpoint {kept.name}")
        return dict(checkpoint.read_state(kept)["manifest"])


def _kept_of(manifest: dict[str, Any] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run takes over from its manifest: when it began, and its wandb run."""
    if manifest is None or fingerprints.changes(manifest, facts):
        return {}
    return {key: manifest[key] for key in ("started", "wandb") if key in manifest}


_numbers = itertools.count()  # of the runs that this process trains


class _Training:
    """The loop over one run; `go` runs it to the end."""

    def __init__(
        self,
        config: Config,
        run: Run,
        corpus: Corpus,
        batches: Batches,
        model: Decoder,
        device: Device,
        facts: dict[str, Any],
        console: Console,
        notice: Notice,
        signals: StopSignals,
        together: Alone,
    ) -> None:
        self.together = together
        self.config, self.run, self.corpus, self.batches = config, run, corpus, batches
        self.device, self.facts, self.console, self.notice, self.signals = device, facts, console, notice, signals
        # A process on a CPU has one resident set, which later runs find as the first left it.
        self.has_own_memory = next(_numbers) == 0 or device.is_cuda
        self.model = model.to(device.torch)
        self.model.compute_dtype = device.dtype
        if device.compiled:
            self.model.compile_blocks()
        self.loss_of = together.wrap(self.model, config.launch.strategy)
        self.optimizer = AdamW(self.model, config.train)
        self.progress = _Progress()
        self.grad_norm: float | None = None  # of the last step looked at, before clipping
        tenth = max(1, math.ceil(config.train.num_steps / 10))
        self.validate_every = config.train.validate_every or tenth
        self.checkpoint_every = config.train.checkpoint_every or tenth
        self.checkpoints = run.path / "checkpoints"

    def go(self) -> None:
        """Train to the last step, validate, and mark the run finished; or mark how it ended."""
        try:
            with exhaustion_explained(self.device, training_advice(self.config.train)):
                self._go()
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            explained = ConfigError(
                f"{self.run.name} stopped at step {self.progress.step}: {error.strerror or error}{where}. Make room or "
                "see to the disk, and give the same command again"
            )
            self._mark_ended(explained)
            raise explained from error
        except BaseException as error:
            self._mark_ended(error)
            raise

    def _go(self) -> None:
        self._begin()
        is_first = self.together.is_first
        tracker = open_tracker(self.config, self.run, self.facts, self.notice) if is_first else Tracker()
        failed = True
        try:
            self.facts["wandb"] = tracker.record or self.facts["wandb"]
            if is_first:
                write_json(self.run.path / "run.json", self.facts)
            self.device.reset_peak_memory()
            with TrainingProgress(
                self.console, self.config.scheme.name, self.config.train.num_steps, self.progress.step
            ) as bar:
                self.signals.waits = True
                self._steps(bar, tracker)
                self._finish(tracker, bar)
            failed = False
        finally:
            tracker.finish(failed=failed)

    def _mark_ended(self, error: BaseException) -> None:
        """Say in the manifest why the run is not going on: died where the numbers went wrong, else stopped."""
        if not self.together.is_first:
            return
        with suppress(OSError, ConfigError):  # on a full disk `state_of` still sees that nobody holds the lock
            if not self.run.is_finished:
                self.run.update_manifest(
                    status=runs.DIED if isinstance(error, Died) else runs.STOPPED,
                    reason=str(error) or type(error).__name__,
                    ended=_now(),
                    skipped_steps=self.progress.skipped_steps,
                )

    def _begin(self) -> None:
        """Write the first files, and take up the newest intact checkpoint where there is one."""
        path, is_first = self.run.path, self.together.is_first
        if is_first:
            runs.remove_unfinished(path)
            write_json(path / "run.json", self.facts)
            write_text(path / "config.yaml", yaml.safe_dump(self.config.to_mapping(), sort_keys=False))
            write_text(path / "tokenizer.json", self.corpus.tokenizer.to_str(pretty=True))
        kept = self.together.first_says(checkpoint.newest(self.checkpoints, self.notice) if is_first else None)
        if kept is None:
            if is_first:
                (path / "metrics.jsonl").unlink(missing_ok=True)
            return
        state = checkpoint.read_state(kept)
        changed = fingerprints.changes(state["manifest"], self.facts)
        if changed:
            raise ConfigError(
                f"{kept} belongs to a run of another configuration: {'; '.join(changed)}. Delete {self.checkpoints} to "
                "begin anew"
            )
        for kind in ("versions", "fingerprints"):  # a mixture of two codes is neither of them
            for key, now in self.facts[kind].items():
                self.facts[kind][key] = fingerprints.continued(state["manifest"][kind].get(key), now)
        checkpoint.put_weights(self.model, checkpoint.load_tensors(kept, checkpoint.MODEL))
        self.optimizer.load_state(checkpoint.load_tensors(kept, checkpoint.OPTIMIZER))
        self.progress = _Progress(step=state["step"], **{key: state[key] for key in _Progress().saved()})
        self.together.meet()  # before the first changes what the others read
        if is_first:
            write_text(path / "metrics.jsonl", (kept / checkpoint.METRICS).read_text(encoding="utf-8"))
            checkpoint.prune(self.checkpoints, kept, self.config.train.keep_checkpoints)
        self.notice(f"{self.run.name}: going on from step {state['step']}")

    def _steps(self, bar: TrainingProgress, tracker: Tracker) -> None:
        train, p = self.config.train, self.progress
        if p.step == 0:
            self._validate(tracker, bar)
        began, seconds_before = time.perf_counter(), p.train_seconds
        window_began, window_step = began, p.step
        while p.step < train.num_steps:
            p.pending.append(self._one_step(p.step))
            p.step += 1
            bar.advance(p.step)
            last = p.step == train.num_steps
            if p.step % train.log_every == 0 or last:
                self._look(p)
                now = time.perf_counter()
                speed = (p.step - window_step) * train.tokens_per_step / (now - window_began)
                self._log_train(p, speed, tracker, bar)
                window_began, window_step = now, p.step
            if p.step % self.validate_every == 0 and not last:
                self._look(p)  # a GPU's queue empties before the clock is read
                p.train_seconds = seconds_before + time.perf_counter() - began
                paused = time.perf_counter()
                self._validate(tracker, bar)
                pause = time.perf_counter() - paused
                began, window_began = began + pause, window_began + pause
            agreed = self.together.stop_signal(self.signals.received)
            stopping = agreed is not None
            if stopping:  # and not otherwise: a signal may have come since it was asked
                self.signals.received = agreed
            if p.step % self.checkpoint_every == 0 or last or stopping:
                self._look(p)
                p.train_seconds = seconds_before + time.perf_counter() - began
                paused = time.perf_counter()
                self._save()
                pause = time.perf_counter() - paused
                began, window_began = began + pause, window_began + pause
            if stopping:
                self.signals.raise_if_received(
                    f"at step {p.step} of {train.num_steps}, with a checkpoint: give the same command again to go on"
                )

    def _one_step(self, n: int) -> Tensor:
        """Batch n forward, backward and into the weights. Returns [loss (nats per token), gradient norm]."""
        train = self.config.train
        rows = self.batches.batch(n)
        self.progress.batches = hashlib.sha256(self.progress.batches.encode() + rows.tobytes()).hexdigest()
        tokens = torch.from_numpy(rows)
        if self.device.is_cuda:
            tokens = tokens.pin_memory().to(self.device.torch, non_blocking=True)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device.torch)
        parts = tokens.chunk(train.accumulation)
        for number, part in enumerate(parts, 1):
            own = self.together.share_of(part)
            with self.together.accumulating(self.loss_of, last=number == len(parts)):
                loss = self.loss_of(own[:, :-1], own[:, 1:]) / train.accumulation
                loss.backward()
            total += loss.detach()
        total = self.together.mean(total)
        norm = self.optimizer.step(n, healthy=total.isfinite())
        return torch.stack((total, norm))

    def _look(self, p: _Progress) -> None:
        """Fetch the losses of the steps since the last look, count the skipped ones, give up after too many."""
        if not p.pending:
            return
        first = p.step - len(p.pending)
        for offset, (loss, norm) in enumerate(torch.stack(p.pending).tolist()):
            if math.isfinite(loss) and math.isfinite(norm):
                p.loss_sum += loss
                p.loss_count += 1
                self.grad_norm = norm
                continue
            self.grad_norm = None
            step = first + offset
            p.skipped_steps += 1
            lr = learning_rate(step, self.config.train)
            told = f"step {step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}, batch {step}"
            self.notice(f"{self.run.name}: skipped {told}; weights and moments are as before")
            if p.skipped_steps > self.config.train.max_skipped_steps:
                raise Died(
                    f"{p.skipped_steps} steps were not finite, more than "
                    f"train.max_skipped_steps={self.config.train.max_skipped_steps}; the last was {told}. "
                    "Lower train.lr"
                )
        p.pending.clear()

    def _log_train(self, p: _Progress, speed: float, tracker: Tracker, bar: TrainingProgress) -> None:
        row = {
            "kind": "train",
            "step": p.step,
            "tokens": p.step * self.config.train.tokens_per_step,
            "loss": p.loss_sum / p.loss_count if p.loss_count else None,
            "lr": learning_rate(p.step - 1, self.config.train),
            "grad_norm": self.grad_norm,
            "skipped_steps": p.skipped_steps,
            "tokens_per_second": round(speed, 1),
        }
        p.loss_sum, p.loss_count = 0.0, 0
        self._append(row, tracker, bar)

    def _validate(self, tracker: Tracker, bar: TrainingProgress) -> None:
        """The loss on the first tokens of the validation split, the same ones each time."""
        settings = replace(self.config.evaluation, max_tokens=self._watched_tokens())
        rows, _ = score_split(
            self.model, self.corpus, "validation", "validation", self.config.train.context_length, settings
        )
        self._log_validation(rows, tracker, bar)

    def _watched_tokens(self) -> int:
        context = self.config.train.context_length
        return max(self.config.train.validation_tokens, context) // context * context

    def _log_validation(self, rows: pd.DataFrame, tracker: Tracker, bar: TrainingProgress) -> None:
        watched = rows[rows["start"] <= self._watched_tokens()]
        nll, step = float(watched["nll"].sum()), self.progress.step
        if not math.isfinite(nll):
            raise Died(f"the validation loss at step {step} is {nll}. Lower train.lr")
        row = {
            "kind": "validation",
            "step": step,
            "tokens": step * self.config.train.tokens_per_step,
            "loss": nll / int(watched["targets"].sum()),
            "bits_per_byte": nll / math.log(2) / int(watched["bytes"].sum()),
        }
        self._append(row, tracker, bar)

    def _append(self, row: dict[str, Any], tracker: Tracker, bar: TrainingProgress) -> None:
        if self.together.is_first:
            runs.append_metrics(self.run.path / "metrics.jsonl", row)
        tracker.log(row)
        bar.show(row)

    def _save(self) -> None:
        weights, moments = checkpoint.weights_of(self.model), self.optimizer.state()  # together, where sharded
        if not self.together.is_first:
            return
        checkpoint.save(
            self.checkpoints,
            self.progress.step,
            weights,
            moments,
            (self.run.path / "metrics.jsonl").read_bytes(),
            {**self.progress.saved(), "manifest": self.facts},
            self.config.train.keep_checkpoints,
        )

    def _finish(self, tracker: Tracker, bar: TrainingProgress) -> None:
        """Score the whole validation split, store it window by window, and close the manifest."""
        p, config = self.progress, self.config
        peak = self.device.peak_memory_bytes() if self.has_own_memory else None
        context = config.train.context_length
        rows, summary = score_split(
            self.model, self.corpus, "validation", "validation", context, config.evaluation, None, self._stop_validating
        )
        if not math.isfinite(summary["nll_mean"]):
            raise Died(f"the validation loss after the last step is {summary['nll_mean']}. Lower train.lr")
        summary["peak_memory_bytes"] = peak
        if self.together.is_first:
            store(self.run, rows, summary)
        self._log_validation(rows, tracker, bar)
        costs = {
            "tokens_per_second": round(p.step * config.train.tokens_per_step / p.train_seconds, 1)
            if p.train_seconds
            else None,
            "train_seconds": round(p.train_seconds, 2),
            "peak_memory_bytes": peak,
        }
        result = {
            "loss": summary["nll_mean"],
            "perplexity": math.exp(min(summary["nll_mean"], 700)),
            "bits_per_byte": summary["bits_per_byte"],
        }
        if not self.together.is_first:
            return
        tracker.summary({**result, **costs})
        self.run.update_manifest(
            status=runs.FINISHED,
            reason=None,
            skipped_steps=p.skipped_steps,
            costs=costs,
            ended=_now(),
            fingerprints={**self.facts["fingerprints"], "batches": p.batches[:16]},
            **result,
        )
        self.notice(
            f"{self.run.name}: loss {result['loss']:.4f} nats/token, perplexity {result['perplexity']:.2f}, "
            f"{result['bits_per_byte']:.4f} bits/byte, {costs['tokens_per_second']:,.0f} tokens/s"
        )

    def _stop_validating(self, tokens: int) -> None:
        agreed = self.together.stop_signal(self.signals.received)
        if agreed is None:
            return
        self.signals.received = agreed
        self.signals.raise_if_received(
            "after its last step, with a checkpoint: give the same command again to finish it"
        )
