"""Begin or resume a run: make or check its manifest, load other weights or a checkpoint."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from posbench import runs
from posbench.catalogue import own_files
from posbench.config import Config, ConfigError
from posbench.data import Dataset
from posbench.model.decoder import Decoder
from posbench.model.size import cache_per_token, num_parameters, training_flops_per_token
from posbench.runs import DamagedFile, Manifest, Run, checkpoint, fingerprints
from posbench.runs.manifest import Fingerprints
from posbench.runs.start import Start
from posbench.system.console import Say
from posbench.system.device import Device
from posbench.training.step import Died, TrainingStep
from posbench.version import __version__

_SAVED = (
    "batches",
    "loss_sum",
    "loss_count",
    "grad_norm_max",
    "skipped_steps",
    "train_seconds",
    "timed_steps",
    "first_step_seconds",
)


@dataclass
class LoopState:
    """The part of a checkpoint that is neither weights nor moments: steps, losses (nats per token), times."""

    steps_done: int = 0
    batches: str = ""  # SHA-256 digest of all batches consumed
    loss_sum: float = 0.0  # sum over the finite steps since the last logged row
    loss_count: int = 0  # number of these steps
    grad_norm_max: float | None = None  # largest gradient norm of these steps, before clipping
    skipped_steps: int = 0
    train_seconds: float = 0.0  # time of the timed steps: all but the first of each process, which compiles
    timed_steps: int = 0
    first_step_seconds: float = 0.0  # time of the first steps
    pending: list[Tensor] = field(default_factory=list)  # [loss, norm] of steps that the host has not fetched yet
    grad_norm: float | None = None  # norm of the last fetched step, before clipping; None if it was skipped
    skipped_in_a_row: int = 0  # steps skipped since the last one that changed the weights, in this process

    def fetch(self) -> Iterator[tuple[int, float, float]]:
        """Wait for the device, fetch the losses and norms of recent steps, and add up the finite losses.

        Yields: (n, loss, norm) of each step n (0-based) that was skipped because one of them was not finite.
        """
        if not self.pending:
            return
        first = self.steps_done - len(self.pending)
        fetched = torch.stack(self.pending).tolist()  # one wait for all steps
        self.pending = []
        for n, (loss, norm) in enumerate(fetched, first):
            if math.isfinite(loss) and math.isfinite(norm):
                self.loss_sum += loss
                self.loss_count += 1
                self.skipped_in_a_row = 0
                self.grad_norm = norm
                self.grad_norm_max = norm if self.grad_norm_max is None else max(self.grad_norm_max, norm)
            else:
                self.grad_norm = None
                self.skipped_steps += 1
                self.skipped_in_a_row += 1
                yield n, loss, norm

    def take_row(self) -> dict[str, float | None]:
        """Return the fields of a metrics.jsonl row about the steps since the last call; None if none was finite."""
        mean = self.loss_sum / self.loss_count if self.loss_count else None
        row = {"loss": mean, "grad_norm": self.grad_norm, "grad_norm_max": self.grad_norm_max}
        self.loss_sum, self.loss_count, self.grad_norm_max = 0.0, 0, None
        return row

    def saved(self) -> dict[str, Any]:
        """Return the fields to save in a checkpoint. Losses of all steps must have been fetched."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the fields from what `saved` returned, plus `step`, the number of steps done."""
        self.steps_done = self.timed_steps = saved["step"]
        for name in _SAVED:
            # Checkpoints of older versions lack some, which then stay as they are.
            setattr(self, name, saved.get(name, getattr(self, name)))


def now() -> str:
    """Return the current UTC time as an ISO 8601 string in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _identity(config: Config, device: Device, start: Start | None) -> dict[str, Any]:
    identity = fingerprints.identity(config, device.describe())
    if start is None:
        return identity
    return start.comparable(identity, config)


def new_manifest(
    config: Config,
    corpus: Dataset,
    model: Decoder,
    device: Device,
    existing: Manifest | None,
    start: Start | None = None,
) -> Manifest:
    """Return the run's manifest (`run.json`) before the first step.

    Arguments: existing, the manifest of the interrupted run, whose start time and wandb run are kept, or None; start,
    the weights to begin with, or None if they are drawn from the seed.
    """
    identity = _identity(config, device, start)
    entries = model.embedding.num_embeddings
    tokens = config.train.num_steps * config.train.tokens_per_step
    flops = None  # unknown if the scheme does not state its own
    if model.scheme.flops_per_token(config.train.context_length) is not None:
        flops = tokens * training_flops_per_token(model.architecture, entries)
    initial_weights = fingerprints.weights_fingerprints(model)
    continued, started_at, wandb = None, now(), None
    # A continued run counts what its source cost.
    if start is not None:
        if start.checkpoint is None:
            tokens += start.tokens
        # The schedule is kept: `tokens` and `flops` count from the source's first step on. The source's part is taken
        # off here, and added below as the source has recorded it.
        elif flops is not None:
            flops *= 1 - start.tokens / tokens
        if flops is not None and start.training_flops is not None:
            flops += start.training_flops
        else:
            flops = None
        # A Hugging Face folder has no initial weights, so the digest of its weights stands for them.
        initial_weights = start.initial_weights or {"train.from_run": start.digest[:16]}
        continued = start.record
    if existing is not None:
        started_at, wandb = existing.started, existing.wandb
    sizes = num_parameters(model.architecture, entries)
    sizes["scheme"] = sum(parameter.numel() for parameter in model.scheme.parameters())
    versions = {"posbench": __version__, "python": platform.python_version(), "torch": torch.__version__}
    commit = fingerprints.commit()
    if commit is not None:
        versions["commit"] = commit
    return Manifest(
        format=runs.FORMAT,
        status=runs.RUNNING,
        experiment=config.experiment_name,
        scheme=config.scheme.name,
        seed=config.seed,
        vocab_size=corpus.vocab_size,
        num_parameters=sizes,
        is_relative=bool(model.scheme.is_relative),
        fingerprints=Fingerprints(
            data=corpus.fingerprint,
            tokenizer=corpus.tokenizer_fingerprint,
            config=fingerprints.config_fingerprint(identity),
            code=fingerprints.code_fingerprint(),
            initial_weights=initial_weights,
        ),
        identity=identity,
        versions=versions,
        device=device.describe(),
        num_steps=config.train.num_steps,
        tokens=tokens,
        text_tokens=corpus.splits["train"].num_tokens,
        training_flops=flops,
        cache_per_token=cache_per_token(model.architecture),
        continued=continued,
        started=started_at,
        wandb=wandb,
        scheme_files=own_files.recorded_files(config.to_mapping()),
        command=list(config.command) or None,
    )


def existing_manifest(
    run: Run, config: Config, corpus: Dataset, device: Device, say: Say, start: Start | None = None
) -> Manifest | None:
    """Return the manifest that `run` already has, if it agrees with `config`.

    Returns: None if the run has no manifest, or if a different run stopped there before its first checkpoint.
    Raises: ConfigError with the differences if the folder holds another run; Died if the run cannot continue.
    """
    try:
        manifest = run.manifest
    except DamagedFile:
        # Every checkpoint holds a copy of the manifest.
        newest = checkpoint.newest(run.path / "checkpoints", lambda text: None)
        if newest is None:
            return None
        say(f"{run.path / 'run.json'} is missing or damaged: restored from checkpoint {newest.name}")
        manifest = checkpoint.manifest_in(newest)
    # Compare what the folder records with what this command would record.
    identity = _identity(config, device, start)
    files = own_files.recorded_files(config.to_mapping())
    start_digest = None if start is None else start.digest
    current_facts = fingerprints.facts(identity, corpus.fingerprint, corpus.tokenizer_fingerprint, files, start_digest)
    prints = manifest.fingerprints
    recorded_start_digest = None  # None: the weights were drawn from the seed
    if manifest.continued:
        recorded_start_digest = manifest.continued["weights"]
    recorded_facts = fingerprints.facts(
        manifest.identity, prints.data, prints.tokenizer, manifest.scheme_files, recorded_start_digest
    )
    changes = fingerprints.changes(recorded_facts, current_facts)
    has_ended = manifest.status in (runs.FINISHED, runs.DIED)
    # The other run stopped before its first checkpoint and left nothing, so the new run may use the folder.
    if changes and not has_ended and not run.has_weights:
        return None
    if changes:
        # Without branches, `trunk_tokens` follows from `train.tokens`, which the message has too.
        if not config.train.is_branch and len(changes) > 1:
            changes = [change for change in changes if not change.startswith("train.trunk_tokens")]
        # Shorten SHA-256s, which are too long to read, to 12 digits.
        differences = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", "; ".join(changes))
        raise ConfigError(
            f"{run.path} contains a run of another configuration (recorded -> now): {differences}. Give the new run "
            "its own name (experiment_name=..., or scheme.name=... for a variant of a scheme), or delete the folder"
        )
    # With a higher limit the run may resume; otherwise it would die again.
    if manifest.status == runs.DIED and manifest.skipped_steps > config.train.max_skipped_steps:
        raise Died(
            f"it died earlier: {manifest.reason}. Train it under another name (experiment_name=...), or delete "
            f"{run.path}; train.max_skipped_steps={manifest.skipped_steps} or more resumes its last checkpoint"
        )
    return manifest


def report_changes(existing: Manifest, manifest: Manifest, say: Say) -> None:
    """Print which versions, device settings or code changed since an interrupted run began."""

    # Facts in which the resumed run may differ, unlike its identity.
    def circumstances(m: Manifest) -> dict[str, Any]:
        return fingerprints.flat({"versions": m.versions, "device": m.device, "code": m.fingerprints.code})

    for change in fingerprints.changes(circumstances(existing), circumstances(manifest)):
        say(
            f"{manifest.run_name}: changed since the run began, {change}: from here on the last digits may differ from "
            "an uninterrupted run"
        )


def load(start: Start, step: TrainingStep, state: LoopState) -> tuple[list[str], list[str]]:
    """Load the weights of `start` into the model; of a checkpoint to continue exactly, also moments and progress.

    Returns: names of parameters that keep their initial values, and names of weights that were not used.
    Raises: ConfigError if `start` holds another model.
    """
    differences = start.load_into(step.model)
    if start.checkpoint is None:
        state.batches = start.batches
    else:
        step.optimizer.load_state(checkpoint.load_tensors(start.checkpoint, checkpoint.OPTIMIZER))
        state.restore(checkpoint.read_state(start.checkpoint))
    return differences
