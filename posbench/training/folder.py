"""What a run folder holds before training begins: nothing, this run (finished or cut off), or another run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import yaml

from posbench import runs, scheme_file
from posbench.config import Config, ConfigError
from posbench.data import Corpus
from posbench.machine.device import Device
from posbench.machine.files import write_text
from posbench.model import Decoder
from posbench.runs import DamagedFile, Manifest, Run, checkpoint, fingerprints
from posbench.runs.manifest import Fingerprints
from posbench.size import num_parameters, training_flops_per_token
from posbench.training.branch import trunk_checkpoint
from posbench.training.loop import Died, Training

Notice = Callable[[str], None]


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def first_manifest(config: Config, corpus: Corpus, model: Decoder, device: Device) -> Manifest:
    """What `run.json` says of a run before its first step. `model` holds the initial weights."""
    identity = fingerprints.identity(config, device.describe())
    entries, tokens = model.embedding.num_embeddings, config.train.num_steps * config.train.tokens_per_step
    has_stated_flops = model.scheme.flops_per_token(config.train.context_length) is not None
    return Manifest(
        format=runs.FORMAT,
        status=runs.RUNNING,
        experiment=config.experiment_name,
        scheme=config.scheme.name,
        seed=config.seed,
        vocab_size=corpus.vocab_size,
        num_parameters={
            **num_parameters(config, entries),
            "scheme": sum(p.numel() for p in model.scheme.parameters()),
        },
        is_relative=bool(model.scheme.is_relative),
        fingerprints=Fingerprints(
            data=corpus.fingerprint,
            tokenizer=corpus.tokenizer_fingerprint,
            config=fingerprints.config_fingerprint(identity),
            code=fingerprints.code_fingerprint(),
            scheme_code=fingerprints.scheme_code(model),
            initial_weights=fingerprints.weights_fingerprints(model),
        ),
        identity=identity,
        versions=_versions(),
        device=device.describe(),
        num_steps=config.train.num_steps,
        tokens=tokens,
        text_tokens=corpus.train.num_tokens,
        training_flops=tokens * training_flops_per_token(config, entries) if has_stated_flops else None,
        started=now(),
        scheme_files=scheme_file.recorded_files(config.scheme.to_mapping()),
    )


def _versions() -> dict[str, str]:
    from posbench.version import __version__

    versions = {"posbench": __version__, "python": platform.python_version(), "torch": torch.__version__}
    commit = fingerprints.commit()
    return versions if commit is None else {**versions, "commit": commit}


def manifest_before(run: Run, notice: Notice = lambda text: None) -> Manifest | None:
    """`run.json`, or the manifest in the newest intact checkpoint; None where the folder has neither."""
    try:
        return run.manifest
    except DamagedFile:
        newest = checkpoint.newest(run.path / "checkpoints", lambda text: None)
        if newest is None:
            return None
        notice(f"{run.path / 'run.json'} is missing or damaged: restored from checkpoint {newest.name}")
        return checkpoint.manifest_in(newest)


def is_finished(run: Run, config: Config, corpus: Corpus, device: Device, notice: Notice) -> bool:
    """Whether the folder, or a pack, holds the run of `config`, finished. No model is built to know it.

    Raises: ConfigError naming what differs where it holds another run; Died where the run cannot continue.
    """
    before = manifest_before(run)
    if before is None:
        return False
    identity = fingerprints.identity(config, device.describe())
    files = scheme_file.recorded_files(config.scheme.to_mapping())
    now = fingerprints.facts(identity, corpus.fingerprint, corpus.tokenizer_fingerprint, files)
    changes = fingerprints.differences(fingerprints.facts_of(before), now)
    has_ended = before.status in (runs.FINISHED, runs.DIED)
    if changes and not has_ended and not checkpoint.any_written(run.path / "checkpoints"):
        return False  # its first step ran out of memory, say. It left nothing, so the new run may take the folder.
    if changes:
        raise ConfigError(
            f"{run.path} contains a run of another configuration: {'; '.join(changes)}. Give the new run its own name "
            "(experiment_name=..., or scheme.name=... for a variant of a scheme), or delete the folder"
        )
    if before.status == runs.FINISHED:
        loss = "" if before.loss is None else f" (loss {before.loss:.4f})"
        notice(f"{run.name} is finished{loss}: nothing to do")
        return True
    if before.status == runs.DIED and before.skipped_steps > config.train.max_skipped_steps:
        raise Died(
            f"it died earlier: {before.reason}. Train it under another name (experiment_name=...), or delete "
            f"{run.path}; train.max_skipped_steps={before.skipped_steps} or more resumes its last checkpoint"
        )
    return False


def continued(run: Run, manifest: Manifest, notice: Notice) -> Manifest:
    """`manifest` with what a resumed run takes over from its own: when it began, and its wandb run.

    What changed since it began, and may change, is said.
    """
    before = manifest_before(run, notice)
    if before is None or fingerprints.changes(before, manifest):
        return manifest
    circumstances = (
        fingerprints.flat(
            {
                "versions": each.versions,
                "device": each.device,
                "code": each.fingerprints.code,
                "code of the scheme": each.fingerprints.scheme_code,
            }
        )
        for each in (before, manifest)
    )
    for change in fingerprints.differences(*circumstances):
        notice(
            f"{run.name}: changed since the run began, {change}: from here on the last digits may differ from those of "
            "an uninterrupted run"
        )
    return replace(manifest, started=before.started, wandb=before.wandb)


def begin(training: Training) -> None:
    """Write the first files, and resume the newest intact checkpoint, or begin from the trunk's, where there is one."""
    folder, processes = training.run.path, training.step.processes
    if training.is_first:
        runs.remove_unfinished(folder)
        training.run.write_manifest(training.manifest)
        write_text(folder / "config.yaml", yaml.safe_dump(training.config.to_mapping(), sort_keys=False))
        write_text(folder / "tokenizer.json", training.corpus.tokenizer.to_str(pretty=True))
        for name in training.manifest.scheme_files:
            write_text(folder / Path(name).name, scheme_file.source(Path(name)))  # to read: it is never imported
    newest, trunk = processes.broadcast(_found(training) if training.is_first else None)
    if newest is not None:
        resume(training, newest)
    elif trunk is not None:
        branch_off(training, trunk)
    elif training.is_first:
        (folder / "metrics.jsonl").unlink(missing_ok=True)


def _found(training: Training) -> tuple[Path | None, Path | None]:
    """The run's newest intact checkpoint, and where it has none its trunk's of the step where its decay begins."""
    newest = checkpoint.newest(training.run.path / "checkpoints", training.notice)
    if newest is not None:
        return newest, None
    return None, trunk_checkpoint(training.config, training.manifest, training.run.name, training.notice)


def resume(training: Training, newest: Path) -> None:
    """Take weights, moments, metrics and the loop's state from a checkpoint. Raises: ConfigError for another run's."""
    before = checkpoint.manifest_in(newest)
    changes = fingerprints.changes(before, training.manifest)
    if changes:
        raise ConfigError(
            f"{newest} belongs to a run of another configuration: {'; '.join(changes)}. Delete {newest.parent} to "
            "begin again"
        )
    versions = training.manifest.versions.items()
    training.manifest = replace(
        training.manifest,
        versions={key: fingerprints.mixed(before.versions.get(key), version) for key, version in versions},
        fingerprints=fingerprints.continued(before.fingerprints, training.manifest.fingerprints),
        branched_at=before.branched_at,
    )
    _take_over(training, newest)
    if training.is_first:
        train = training.config.train
        checkpoint.prune(newest.parent, newest, train.keep_checkpoints, train.branching_steps)
    training.notice(f"{training.run.name}: resumed at step {training.state.steps_done}")


def branch_off(training: Training, trunk: Path) -> None:
    """Begin from a checkpoint of the trunk in place of the first step."""
    before, versions = checkpoint.manifest_in(trunk), training.manifest.versions.items()
    training.manifest = replace(
        training.manifest,
        versions={key: fingerprints.mixed(before.versions.get(key), version) for key, version in versions},
        branched_at=checkpoint.read_state(trunk)["step"],
    )
    _take_over(training, trunk)


def _take_over(training: Training, found: Path) -> None:
    """Take weights, moments, metrics and the loop's state from a checkpoint that was found intact."""
    checkpoint.put_weights(training.step.model, checkpoint.load_tensors(found, checkpoint.MODEL))
    training.step.optimizer.load_state(checkpoint.load_tensors(found, checkpoint.OPTIMIZER))
    training.state.restore(checkpoint.read_state(found))
    training.step.processes.barrier()  # before the first process changes what the others read
    if training.is_first:
        metrics = (found / checkpoint.METRICS).read_text(encoding="utf-8")
        write_text(training.run.path / "metrics.jsonl", metrics)
