"""Write, check, load and remove checkpoints: safetensors and JSON with checksums, without pickle.

    checkpoints/step=00000200/    model.safetensors  optimizer.safetensors  metrics.jsonl  state.json  SHA256SUMS

`state.json` holds the training loop's state and the manifest, so a checkpoint is all that is needed to resume a run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.runs.manifest import Manifest, parse
from posbench.system.console import Say
from posbench.system.files import folder_beside, publish_folder, read_json, sum_of

FORMAT = 2
MODEL, OPTIMIZER, METRICS, STATE = "model.safetensors", "optimizer.safetensors", "metrics.jsonl", "state.json"
SUMS = "SHA256SUMS"
_FOLDER = re.compile(r"step=(\d{8,})")


class TornCheckpoint(Exception):
    """A checkpoint whose files are missing or differ from what was written."""


def save(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    metrics: bytes,
    state: dict[str, Any],
    keep: int,
    branching: Set[int] = frozenset(),
) -> Path:
    """Write the checkpoint `folder/step=<step>`, remove checkpoints that are no longer needed, and return its path.

    Arguments: state, entries for state.json; keep, how many of the newest to keep, at least two; branching, steps whose
    checkpoints are kept because shorter runs begin from them.
    Raises: ConfigError if the disk is full; earlier checkpoints stay as they were.
    """
    final = folder / _name(step)
    try:
        # Written under a temporary name and then renamed, so a kill leaves no half checkpoint.
        with folder_beside(final) as temporary:
            for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
                on_cpu = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                save_file(on_cpu, temporary / name)
            (temporary / METRICS).write_bytes(metrics)
            content = json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
            (temporary / STATE).write_text(content + "\n", encoding="utf-8")
            sums = [f"{sum_of(temporary / name, sync=True)}  {name}\n" for name in (MODEL, OPTIMIZER, METRICS, STATE)]
            (temporary / SUMS).write_text("".join(sums), encoding="utf-8")
            sum_of(temporary / SUMS, sync=True)
            publish_folder(temporary, final)  # replaces a damaged checkpoint of this step, which resuming skipped
    except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
        raise ConfigError(
            f"could not write the checkpoint of step {step} to {folder}: {error}. Make room and run the same "
            "command again; earlier checkpoints are intact"
        ) from error
    prune(folder, final, keep, branching)
    return final


def prune(folder: Path, newest: Path, keep: int, branching: Set[int] = frozenset()) -> None:
    """Remove checkpoints of later steps than `newest`, and all but the last `keep` (at least two) of the others.

    Arguments: branching, steps whose checkpoints stay.
    """
    checkpoints = _folders(folder)  # the newest first
    later = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) > step_of(newest)]
    no_longer_kept = [checkpoint for checkpoint in checkpoints if checkpoint not in later][max(2, keep) :]
    for unwanted in [*later, *(checkpoint for checkpoint in no_longer_kept if step_of(checkpoint) not in branching)]:
        # Renamed first: a kill leaves a whole checkpoint, or one with a temporary name that the next resume removes.
        renamed = unwanted.with_name(f".{unwanted.name}.tmp")
        with suppress(OSError):
            unwanted.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def newest(folder: Path, notice: Say) -> Path | None:
    """Return the newest intact checkpoint in `folder`, or None. `notice` tells of damaged ones."""
    for candidate in _folders(folder):
        try:
            check(candidate)
            return candidate
        except TornCheckpoint as torn:
            notice(f"checkpoint {candidate.name} is damaged ({torn}): skipped")
    return None


def at_step(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of `step`, or None. Raises: TornCheckpoint if it is damaged."""
    checkpoint = folder / _name(step)
    if not checkpoint.is_dir():
        return None
    check(checkpoint)
    return checkpoint


def check(checkpoint: Path, expected: dict[str, str] | None = None) -> None:
    """Check a checkpoint's files against their checksums. Raises: TornCheckpoint if a file is missing or differs.

    Arguments: expected, {file: SHA-256}, to check only these files.
    """
    name = SUMS
    try:
        expected_sums = expected or _sums(checkpoint)
        for name in expected or (STATE, MODEL, OPTIMIZER, METRICS):
            # A file that SHA256SUMS does not list counts as damaged.
            if sum_of(checkpoint / name) != expected_sums.get(name):
                raise TornCheckpoint(f"{name} does not match its checksum")
    except FileNotFoundError:
        raise TornCheckpoint(f"{name} is missing") from None
    except OSError as error:
        raise TornCheckpoint(f"{name} cannot be read: {error.strerror or error}") from None


def check_state(checkpoint: Path) -> None:
    """Check `state.json`, and that the weights have a checksum. Raises: TornCheckpoint if not."""
    sums = _sums(checkpoint)
    if MODEL not in sums:
        raise TornCheckpoint(f"{SUMS} lacks {MODEL}")
    check(checkpoint, {STATE: sums.get(STATE, "")})


def _sums(checkpoint: Path) -> dict[str, str]:
    lines = (checkpoint / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        sums[name] = digest
    return sums


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `state.json` (step, loop state, manifest) in a checkpoint that was checked."""
    return dict(read_json(checkpoint / STATE))


def manifest_in(checkpoint: Path) -> Manifest:
    """Return the manifest in a checkpoint that was checked. Raises: ConfigError for another format."""
    return parse(json.dumps(read_state(checkpoint).get("manifest")).encode(), checkpoint / STATE)


def weights_digest(folder: Path, step: int) -> str:
    """Return the SHA-256 of the weights at `step`. Raises: OSError if that step has no checkpoint."""
    return _sums(folder / _name(step))[MODEL]


def load_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors, by name, in file `name` of a checkpoint that was checked."""
    return load_file(checkpoint / name)


def load_weights(folder: Path, manifest: Manifest, at_step: int | None = None) -> dict[str, Tensor]:
    """Return the weights of the run's last step, or of the step `at_step`, by name.

    Raises: ConfigError if they are missing or damaged; the message lists the other steps.
    """
    step = manifest.num_steps if at_step is None else at_step
    checkpoint = folder / _name(step)
    try:
        expected = None  # all files are checked, by the checkpoint's own checksums
        # The manifest has a digest of the last step's weights only. It tells whether they are this run's.
        if step == manifest.num_steps and manifest.weights:
            expected = {MODEL: manifest.weights}
        check(checkpoint, expected)
    except TornCheckpoint as error:
        steps = ", ".join(str(step_of(path)) for path in reversed(_folders(folder)) if path != checkpoint)
        raise ConfigError(
            f"the weights of step {step} in {folder} cannot be used: {error}. Use another step with --at-step "
            f"(there are: {steps or 'none'}), or delete the folder {folder.parent} and train the run again"
        ) from error
    return load_tensors(checkpoint, MODEL)


def put_weights(model: nn.Module, weights: dict[str, Tensor], fresh: Set[str] = frozenset()) -> None:
    """Set the parameters of `model` from `weights`, except those named in `fresh`.

    Raises: ConfigError if names or shapes differ.
    """
    model_shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in fresh}
    weight_shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if model_shapes != weight_shapes:
        differing = sorted(name for name, _ in model_shapes.items() ^ weight_shapes.items())
        raise ConfigError(
            f"the checkpoint's weights do not fit this model ({differing[0]} differs): the checkpoint belongs to "
            "another configuration, or --under changes the parameters"
        )
    with torch.no_grad():
        # Buffers are not loaded, because they are computed. A shared parameter has one name here, and is stored once.
        for name, parameter in model.named_parameters():
            if name not in fresh:
                parameter.copy_(weights[name])


def _folders(folder: Path) -> list[Path]:
    # All checkpoints in `folder`, the newest first, without checking them.
    if not folder.is_dir():
        return []
    checkpoints = [child for child in folder.iterdir() if _FOLDER.fullmatch(child.name)]
    return sorted(checkpoints, key=step_of, reverse=True)


def _name(step: int) -> str:
    return f"step={step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step="))
