"""One run from its configuration to its last validation: made, resumed where it was cut off, or found finished.

    prepare text -> build model -> (checkpoint?) -> [ batch n -> loss -> gradients -> step ] ... -> validation ->
    manifest

Batch n depends on (seed, n) and the text alone, weights on (seed, name): so a run that was killed and resumed ends
with the same bytes as one that was not, and every scheme under one seed sees the same batches from the same start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from posbench import runs
from posbench.config import Config, ConfigError
from posbench.data import Batches, Corpus, prepare
from posbench.evaluation.evaluate import score_split, store
from posbench.interruption import Stopped, StopSignals
from posbench.model import Decoder, build_model, shape_of
from posbench.runs import Run
from posbench.schemes import build_scheme
from posbench.tracking import Tracker, open_tracker
from posbench.training import checkpoint, fingerprints
from posbench.training.device import Device, choose_device
from posbench.training.memory import keep_freed_memory
from posbench.training.optimizer import AdamW, learning_rate
from posbench.training.progress import TrainingProgress

if TYPE_CHECKING:
    import pandas as pd

Notice = Callable[[str], None]


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
    metrics_bytes: int = 0  # length of metrics.jsonl at the checkpoint; what stands behind it is cut off on resume
    pending: list[Tensor] = field(default_factory=list)  # [loss, norm] of steps the host has not looked at

    def saved(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("pending", "step")}


def train(config: Config, console: Console | None = None) -> Run:
    """Train the run that `config` names, or go on with it, or find it finished.

    Returns: the finished run.
    Raises: ConfigError for what a user can mend (nothing is left behind then); Stopped after Ctrl-C or SIGTERM, with
    a checkpoint left; Died where the numbers went wrong, with the reason in the manifest.
    """
    console = console or Console(stderr=True)

    def notice(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    device = choose_device(config.train)
    folder = runs.run_folder(config)
    run = Run(folder)
    build_scheme(config.scheme, shape_of(config.model))  # its own rules, before any text is read
    corpus = prepare(config, notice=notice)
    batches = Batches(corpus.train, config.train.context_length, config.train.batch_size, config.seed)
    if corpus.validation.num_tokens <= config.train.context_length:
        raise ConfigError(
            f"the validation split has {corpus.validation.num_tokens} tokens "
            f"({corpus.validation.num_documents} documents), less than one context of "
            f"{config.train.context_length}: raise data.validation_fraction, give longer text, or shorten "
            "train.context_length"
        )
    keep_freed_memory()
    torch.compiler.reset()  # one process may train many schemes; each gets compiled code of its own
    model = build_model(config, corpus.vocab_size)
    facts = _facts(config, corpus, model, device)
    with _locked(folder):
        if _is_finished_already(run, config, facts, notice):
            return run
        return _Training(config, run, corpus, batches, model, device, facts, console, notice).go()


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
            **config.model.num_parameters(model.embedding.num_embeddings),
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
    }


def _version() -> str:
    import posbench

    return posbench.__version__


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_finished_already(run: Run, config: Config, facts: dict[str, Any], notice: Notice) -> bool:
    """Whether the folder holds this run, finished. Raises: ConfigError naming what differs from another run."""
    if not (run.path / "run.json").is_file():
        return False
    manifest = run.manifest
    before = {
        **manifest.get("identity", {}),
        **{f"fingerprint of {key}": manifest["fingerprints"].get(key) for key in ("data", "tokenizer")},
    }
    now = {
        **facts["identity"],
        **{f"fingerprint of {key}": facts["fingerprints"][key] for key in ("data", "tokenizer")},
    }
    changed = fingerprints.differences(json.loads(json.dumps(before)), json.loads(json.dumps(now)))
    if changed:
        raise ConfigError(
            f"{run.path} holds a run of another configuration: "
            + "; ".join(changed)
            + ". Give the new one a name of its own "
            "(experiment_name=..., or scheme.name=... for a variant of a scheme), or delete the folder"
        )
    if manifest["status"] == runs.FINISHED:
        notice(f"{run.name} is finished (loss {manifest['loss']:.4f}): nothing to do")
        return True
    if manifest["fingerprints"].get("code") != facts["fingerprints"]["code"]:
        notice(
            f"{run.name}: posbench's own code has changed since this run began; the report will not join it "
            "with runs of the new code"
        )
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process alone; the lock goes with the process, however it ends.

    Raises: ConfigError naming the holder's process and host.
    """
    from filelock import FileLock, Timeout

    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = folder / ".holder.json"
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            held = json.loads(holder.read_text(encoding="utf-8")) if holder.is_file() else {}
            raise ConfigError(
                f"{folder} is being trained by process {held.get('process', '?')} on {held.get('host', '?')} "
                f"since {held.get('since', '?')}: wait for it, or stop it"
            ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror or error}; choose another runs_dir=..."
        ) from error
    try:
        runs.write_json(holder, {"process": os.getpid(), "host": socket.gethostname(), "since": _now()})
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
        (folder / ".lock").unlink(missing_ok=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


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
    ) -> None:
        self.config, self.run, self.corpus, self.batches = config, run, corpus, batches
        self.device, self.facts, self.console, self.notice = device, facts, console, notice
        self.model = model.to(device.torch)
        self.model.compute_dtype = device.dtype
        self.optimizer = AdamW(self.model, config.train)
        self.progress = _Progress()
        tenth = max(1, math.ceil(config.train.num_steps / 10))
        self.validate_every = config.train.validate_every or tenth
        self.checkpoint_every = config.train.checkpoint_every or tenth
        self.checkpoints = run.path / "checkpoints"

    def go(self) -> Run:
        """Train to the last step, validate, and mark the run finished."""
        resumed = self._begin()
        tracker = open_tracker(self.config, self.run, self.facts, self.notice)
        failed = True
        try:
            self.facts["wandb"] = tracker.record
            runs.write_json(self.run.path / "run.json", self.facts)
            if self.device.compiled:
                self.model.compile_blocks()
            self.device.reset_peak_memory()
            with (
                StopSignals() as signals,
                TrainingProgress(
                    self.console, self.config.scheme.name, self.config.train.num_steps, self.progress.step
                ) as bar,
            ):
                self._steps(signals, bar, tracker, fresh_from=resumed)
                self._finish(tracker, bar)
            failed = False
        except Died as error:
            self.run.update_manifest(
                status=runs.DIED, reason=str(error), ended=_now(), skipped_steps=self.progress.skipped_steps
            )
            raise
        finally:
            tracker.finish(failed=failed)
        return self.run

    def _begin(self) -> int:
        """Write a new run's first files, or take up the newest intact checkpoint. Returns the step to go on from."""
        path = self.run.path
        kept = checkpoint.newest(self.checkpoints, self.notice)
        if kept is None:
            (path / "metrics.jsonl").unlink(missing_ok=True)
            runs.write_text(path / "config.yaml", yaml.safe_dump(self.config.to_mapping(), sort_keys=False))
            self.corpus.tokenizer.save(str(path / "tokenizer.json"))
            return 0
        state = checkpoint.read_state(kept)
        checkpoint.put_weights(self.model, checkpoint.load_tensors(kept, "model.safetensors"))
        self.optimizer.load_state(checkpoint.load_tensors(kept, "optimizer.safetensors"))
        self.progress = _Progress(step=state["step"], **{key: state[key] for key in _Progress().saved()})
        metrics = path / "metrics.jsonl"
        if metrics.is_file():
            os.truncate(metrics, self.progress.metrics_bytes)
        self.facts["started"] = self.run.manifest.get("started", self.facts["started"])
        self.notice(f"{self.run.name}: going on from step {state['step']}")
        return int(state["step"])

    def _steps(self, signals: StopSignals, bar: TrainingProgress, tracker: Tracker, fresh_from: int) -> None:
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
                p.train_seconds = seconds_before + time.perf_counter() - began
                paused = time.perf_counter()
                self._validate(tracker, bar)
                pause = time.perf_counter() - paused
                began, window_began = began + pause, window_began + pause
            stop = signals.received
            if p.step % self.checkpoint_every == 0 or last or stop is not None:
                self._look(p)
                p.train_seconds = seconds_before + time.perf_counter() - began
                paused = time.perf_counter()
                self._save()
                pause = time.perf_counter() - paused
                began, window_began = began + pause, window_began + pause
            if stop is not None and not last:
                self.run.update_manifest(status=runs.STOPPED, reason=f"signal {stop}", ended=_now())
                raise Stopped(
                    stop,
                    f"{self.run.name} stopped at step {p.step} of {train.num_steps}, with a checkpoint: give "
                    "the same command again to go on",
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
        for part in tokens.chunk(train.accumulation):
            loss = self.model.nll(part[:, :-1], part[:, 1:]).mean() / train.accumulation
            loss.backward()
            total += loss.detach()
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
                continue
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
        row = {
            "kind": "validation",
            "step": step,
            "tokens": step * self.config.train.tokens_per_step,
            "loss": nll / int(watched["targets"].sum()),
            "bits_per_byte": nll / math.log(2) / int(watched["bytes"].sum()),
        }
        self._append(row, tracker, bar)

    def _append(self, row: dict[str, Any], tracker: Tracker, bar: TrainingProgress) -> None:
        runs.append_metrics(self.run.path / "metrics.jsonl", row)
        tracker.log(row)
        bar.show(row)

    def _save(self) -> None:
        metrics = self.run.path / "metrics.jsonl"
        self.progress.metrics_bytes = metrics.stat().st_size if metrics.is_file() else 0
        checkpoint.save(
            self.checkpoints,
            self.progress.step,
            checkpoint.weights_of(self.model),
            self.optimizer.state(),
            self.progress.saved(),
            self.config.train.keep_checkpoints,
        )

    def _finish(self, tracker: Tracker, bar: TrainingProgress) -> None:
        """Score the whole validation split, store it window by window, and close the manifest."""
        p, config = self.progress, self.config
        peak = self.device.peak_memory_bytes()
        rows, summary = score_split(
            self.model, self.corpus, "validation", "validation", config.train.context_length, config.evaluation
        )
        summary["peak_memory_bytes"] = peak
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
            "perplexity": math.exp(summary["nll_mean"]),
            "bits_per_byte": summary["bits_per_byte"],
        }
        self.run.update_manifest(
            status=runs.FINISHED,
            reason=None,
            skipped_steps=p.skipped_steps,
            costs=costs,
            ended=_now(),
            fingerprints={**self.facts["fingerprints"], "batches": p.batches[:16]},
            **result,
        )
        tracker.summary({**result, **costs})
        self.notice(
            f"{self.run.name}: loss {result['loss']:.4f} nats/token, perplexity {result['perplexity']:.2f}, "
            f"{result['bits_per_byte']:.4f} bits/byte, {costs['tokens_per_second']} tokens/s"
        )
