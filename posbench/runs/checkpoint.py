"""Checkpoints: safetensors and JSON, checksummed, written beside and renamed. No pickle.

    checkpoints/step=00000200/    model.safetensors  optimizer.safetensors  metrics.jsonl  state.json  SHA256SUMS

`state.json` holds the loop's state and the manifest, so a checkpoint is all that a run needs to be resumed.
`SHA256SUMS` is read by `sha256sum -c` too. There is no pointer to the newest checkpoint: it is the highest step whose
files match their checksums, which are computed when a checkpoint is loaded.
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
import torch.distributed as dist
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
    """A checkpoint that is not as it was written; the message says in what."""


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
    """Write `folder/step=...`, then remove all but the newest `keep` (two at least), and those of steps to come.

    Those of the steps `branching` stay too: shorter runs begin from them.

    Raises: ConfigError when the disk is full; the checkpoints before stay as they were.
    """
    final = folder / _name(step)
    try:
        with folder_beside(final) as beside:
            for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
                save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, beside / name)
            (beside / METRICS).write_bytes(metrics)
            content = json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
            (beside / STATE).write_text(content + "\n", encoding="utf-8")
            sums = [f"{sum_of(beside / name, sync=True)}  {name}\n" for name in (MODEL, OPTIMIZER, METRICS, STATE)]
            (beside / SUMS).write_text("".join(sums), encoding="utf-8")
            sum_of(beside / SUMS, sync=True)
            publish_folder(beside, final)  # a torn one of this step was passed over on resume, and is made again
    except (OSError, SafetensorError) as error:  # the latter is what a full disk is to safetensors
        raise ConfigError(
            f"could not write the checkpoint of step {step} to {folder}: {error}. Make room and run the same "
            "command again; a checkpoint before it is intact"
        ) from error
    prune(folder, final, keep, branching)
    return final


def prune(folder: Path, newest: Path, keep: int, branching: Set[int] = frozenset()) -> None:
    """Remove checkpoints of later steps than `newest`, and all but the last `keep` (at least two) up to it.

    Those of the steps `branching` stay. If the process is killed meanwhile, a checkpoint is whole, or has a name that
    is removed when the run is resumed.
    """
    behind = [each for each in _folders(folder) if step_of(each) > step_of(newest)]
    old = [each for each in _folders(folder) if each not in behind][max(2, keep) :]
    for unwanted in [*behind, *(each for each in old if step_of(each) not in branching)]:
        rest = unwanted.with_name(f".{unwanted.name}.tmp")
        with suppress(OSError):
            unwanted.rename(rest)
        shutil.rmtree(rest, ignore_errors=True)


def newest(folder: Path, notice: Say) -> Path | None:
    """The newest intact checkpoint, torn ones named and passed over."""
    for candidate in _folders(folder):
        try:
            check(candidate)
            return candidate
        except TornCheckpoint as torn:
            notice(f"checkpoint {candidate.name} is damaged ({torn}): skipped")
    return None


def at_step(folder: Path, step: int) -> Path | None:
    """The intact checkpoint of a step, None where there is none. Raises: TornCheckpoint."""
    checkpoint = folder / _name(step)
    if not checkpoint.is_dir():
        return None
    check(checkpoint)
    return checkpoint


def check(checkpoint: Path, expected: dict[str, str] | None = None) -> None:
    """Compare the checksums of the files `expected`, else of all as they were written. Raises: TornCheckpoint."""
    try:
        sums = expected or _sums(checkpoint)
        for name in expected or (STATE, MODEL, OPTIMIZER, METRICS):
            if sum_of(checkpoint / name) != sums.get(name):
                raise TornCheckpoint(f"{name} does not match its checksum")
    except OSError as error:
        raise TornCheckpoint(f"{Path(error.filename).name} is missing") from None


def _sums(checkpoint: Path) -> dict[str, str]:
    """File -> SHA-256, as they were written. Raises: OSError."""
    lines = (checkpoint / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The loop's state, of a checkpoint that was found intact."""
    return dict(read_json(checkpoint / STATE))


def manifest_in(checkpoint: Path) -> Manifest:
    """The manifest that an intact checkpoint keeps. Raises: ConfigError for one of another format."""
    return parse(json.dumps(read_state(checkpoint).get("manifest")).encode(), checkpoint / STATE)


def weights_digest(folder: Path, step: int) -> str:
    """The SHA-256 of the model's weights at a step, as they were written. Raises: OSError."""
    return _sums(folder / _name(step))[MODEL]


def load_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint that was found intact."""
    return load_file(checkpoint / name)


def load_weights(folder: Path, manifest: Manifest, at_step: int | None = None) -> dict[str, Tensor]:
    """The weights of the run's last step, or of an older one.

    Those of the last step are bound to the run by their digest in its manifest, older ones by the checkpoint's.
    Raises: ConfigError with the steps that are left where they are gone or damaged.
    """
    step = manifest.num_steps if at_step is None else at_step
    checkpoint = folder / _name(step)
    try:
        check(checkpoint, {MODEL: manifest.weights} if step == manifest.num_steps and manifest.weights else None)
    except TornCheckpoint as why:
        others = ", ".join(str(step_of(other)) for other in reversed(_folders(folder)) if other != checkpoint)
        raise ConfigError(
            f"the weights of step {step} in {folder} cannot be used: {why}. Use those of another step with --at-step "
            f"(there are: {others or 'none'}), or delete the folder {folder.parent} and train it again"
        ) from why
    return load_tensors(checkpoint, MODEL)


def put_weights(model: nn.Module, weights: dict[str, Tensor], fresh: Set[str] = frozenset()) -> None:
    """Set the parameters of `model` by name, all but those that stay `fresh`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in fresh}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != given:
        differing = sorted(name for name, _ in shapes.items() ^ given.items())
        raise ConfigError(
            f"the checkpoint's weights are not this model's ({differing[0]} differs): it belongs to another "
            "configuration, or --under changes the parameters"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # buffers are computed, a shared parameter is stored once
            if name not in fresh:
                shard_of(parameter).copy_(shard_like(weights[name], parameter))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name, each shared one once."""
    return {name: put_together(shard_of(p).detach(), p) for name, p in model.named_parameters()}


def _folders(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    return sorted((child for child in folder.iterdir() if _FOLDER.fullmatch(child.name)), key=step_of, reverse=True)


def _name(step: int) -> str:
    return f"step={step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step="))


# ---------------------------------------------------------------- tensors of which each process holds a part (FSDP2)


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """This process's part of a sharded parameter, in the same memory; an unsharded parameter as it is."""
    return nn.Parameter(parameter.to_local().detach()) if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def put_together(shard: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each process holds a `shard`, laid out as `like` is: on the CPU of the first process.

    The others get an empty tensor: what does not fit one device must not be whole on each.
    """
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    gathered = whole.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of `value`, which every process holds whole, laid out as `like` is."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements).to_local()


def is_sharded(value: Any) -> bool:
    """Whether it is one process's view of a tensor that several processes hold (a DTensor)."""
    return hasattr(value, "to_local")
