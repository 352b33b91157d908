"""Checkpoints: safetensors and JSON, checksummed, written beside and renamed. No pickle.

    checkpoints/step=00000200/    model.safetensors  optimizer.safetensors  state.json

`state.json` holds the loop's state and the SHA-256 of the other files, and of itself. There is no pointer to the newest
one: it is the highest step whose files are whole, so nothing can point to a checkpoint that is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.runs import sync_folder

FORMAT = 1
_FOLDER = re.compile(r"step=(\d{8,})")
Notice = Callable[[str], None]


class TornCheckpoint(Exception):
    """A checkpoint that is not as it was written; the message says in what."""


def save(
    folder: Path, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step=...`, then remove all but the newest `keep` (never the newest two).

    Raises: ConfigError when the disk is full, naming how much was needed; the checkpoints before stay as they were.
    """
    from safetensors.torch import save_file

    final = folder / f"step={step:08d}"
    beside = folder / f".step={step:08d}.tmp"
    needed = sum(t.numel() * t.element_size() for part in (model, optimizer) for t in part.values())
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        checksums = {}
        for name, tensors in (("model.safetensors", model), ("optimizer.safetensors", optimizer)):
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, beside / name)
            checksums[name] = _sync_and_sum(beside / name)
        content = {"format": FORMAT, "step": step, **state, "sha256": checksums}
        (beside / "state.json").write_text(_sealed(content), encoding="utf-8")
        _sync_and_sum(beside / "state.json")
        sync_folder(beside)
        if final.exists():  # from before a resume at an earlier step: the same step, made again
            shutil.rmtree(final)
        beside.rename(final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
        raise ConfigError(
            f"could not write the checkpoint of step {step} to {folder}: {error.strerror or error} "
            f"({needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free; the checkpoint before is "
            "intact). Make room and give the same command again"
        ) from error
    for old in _folders(folder)[max(2, keep) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(folder: Path, notice: Notice) -> Path | None:
    """The newest intact checkpoint, torn ones named and passed over. Raises: ConfigError for a newer format."""
    for candidate in _folders(folder):
        try:
            read_state(candidate, verify_tensors=True)
            return candidate
        except TornCheckpoint as torn:
            notice(f"checkpoint {candidate.name} is not as it was written ({torn}): passed over")
    return None


def read_state(checkpoint: Path, verify_tensors: bool = False) -> dict[str, Any]:
    """The loop's state as saved. Raises: TornCheckpoint; ConfigError for a newer format."""
    file = checkpoint / "state.json"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
        seal = content.pop("seal")
        formed = content["format"]
    except FileNotFoundError:
        raise TornCheckpoint("state.json is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise TornCheckpoint(f"state.json cannot be read: {error}") from None
    if hashlib.sha256(_canonical(content)).hexdigest() != seal:
        raise TornCheckpoint("state.json does not match its checksum")
    if formed > FORMAT:
        raise ConfigError(f"{checkpoint} is of format {formed}; this posbench reads up to {FORMAT}: upgrade posbench")
    if verify_tensors:
        for name, expected in content["sha256"].items():
            try:
                found = _sum(checkpoint / name)
            except OSError:
                raise TornCheckpoint(f"{name} is missing") from None
            if found != expected:
                raise TornCheckpoint(f"{name} does not match its checksum")
    return content


def load_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint that `newest` found intact."""
    from safetensors.torch import load_file

    return load_file(checkpoint / name)


def load_weights(folder: Path, model: nn.Module) -> None:
    """The newest intact checkpoint's weights into `model`. Raises: ConfigError where there is none."""
    notes: list[str] = []
    checkpoint = newest(folder, notes.append)
    if checkpoint is None:
        raise ConfigError(
            f"{folder} holds no intact checkpoint ({'; '.join(notes) or 'none was written'}): train the run again"
        )
    put_weights(model, load_tensors(checkpoint, "model.safetensors"))


def put_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the parameters of `model`, all of them, by name."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    shared = {name for name, _ in model.named_parameters()}
    lacking = [name for name in missing if name in shared]
    if lacking or unexpected:
        raise ConfigError(
            f"the checkpoint's weights are not this model's (lacking {lacking[:3]}, unknown "
            f"{unexpected[:3]}): it belongs to another configuration"
        )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name, each shared one once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def _folders(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), child) for child in folder.iterdir() if (match := _FOLDER.fullmatch(child.name))]
    return [child for _, child in sorted(found, reverse=True)]


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False).encode()


def _sealed(content: dict[str, Any]) -> str:
    plain = json.loads(_canonical(content))
    return json.dumps({**plain, "seal": hashlib.sha256(_canonical(plain)).hexdigest()}, indent=1) + "\n"


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_and_sum(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
