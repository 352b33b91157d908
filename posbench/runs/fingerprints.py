"""What must be equal for two runs to be compared, or for one to be resumed, as hashes and readable differences."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from posbench.config import Config
from posbench.model import Decoder

# Not part of what a run computes: names, places, and what only watches.
_ASIDE = ("tracking", "launch", "experiment", "experiment_name", "runs_dir", "evaluation", "data", "tokenizer")
_ASIDE_IN_TRAIN = (
    "device",
    "dtype",
    "compile",
    "steps",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "validation_tokens",
    "log_every",
    "max_skipped_steps",
)
# Code that decides what a run computes; the rest of the package reads, prints or checks.
_CODE = ("attention/*.py", "cross_entropy.py", "model.py", "schemes/*.py", "data/*.py", "training/*.py")


def digest(content: bytes | str) -> str:
    """The first 16 hex digits of the SHA-256."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def identity(config: Config, device: dict[str, Any]) -> dict[str, Any]:
    """What a run computes, as flat `group.field` -> value: its configuration without names, places and watching.

    The text and the tokenizer are not in it (they have fingerprints of their own), the device's number format is.
    """
    mapping = config.to_mapping()
    train = mapping["train"]
    train = {key: value for key, value in train.items() if key not in _ASIDE_IN_TRAIN} | {
        "num_steps": config.train.num_steps
    }
    train["tokens"] = config.train.num_steps * config.train.tokens_per_step
    kept = {key: value for key, value in mapping.items() if key not in _ASIDE} | {"train": train}
    kept["device"] = {key: device[key] for key in ("type", "dtype", "compiled")}
    return flat(kept)


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`group.field` -> value of a mapping of mappings."""
    fields: dict[str, Any] = {}
    for key, value in mapping.items():
        fields |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return fields


def config_fingerprint(identity: dict[str, Any]) -> str:
    """Of the configuration without its scheme and seed: what all runs of a table must share."""
    shared = {
        key: value
        for key, value in identity.items()
        if not key.startswith("scheme.") and key not in ("seed", "device.compiled")
    }
    return digest(json.dumps(shared, sort_keys=True))


def continued(before: str | None, now: str) -> str:
    """What a run was made with from its first step on: `now`, or `before+now` where it went on under something else."""
    return now if before is None or before == now else before if before.endswith(f"+{now}") else f"{before}+{now}"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: before -> now`, a line for each value that differs."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: before -> now` for all that two manifests of one run must share."""
    return differences(*({**_part(m, "identity"), **_texts(m)} for m in (before, json.loads(json.dumps(now)))))


def changes_in(config: Config, manifest: dict[str, Any]) -> list[str]:
    """... that differs between a manifest and the configuration beside it; what the manifest does not say is not asked.

    Not the device, which is what trained; nor settings that are newer than the manifest.
    """
    kept = {key: value for key, value in _part(manifest, "identity").items() if not key.startswith("device.")}
    now = json.loads(json.dumps(identity(config, dict.fromkeys(("type", "dtype", "compiled")))))
    asked = {key: value for key, value in now.items() if key in kept or key.startswith("scheme.")}
    return differences(kept, asked) if kept else []


def _part(manifest: Any, name: str) -> dict[str, Any]:
    part = manifest.get(name) if isinstance(manifest, dict) else None
    return part if isinstance(part, dict) else {}


def _texts(manifest: dict[str, Any]) -> dict[str, Any]:
    return {f"fingerprint of {key}": _part(manifest, "fingerprints").get(key) for key in ("data", "tokenizer")}


def weights_fingerprint(model: Decoder) -> str:
    """Of the initial weights that every scheme shares."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not name.startswith("scheme."):
            total.update(name.encode())
            total.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


@cache
def code_fingerprint(patterns: tuple[str, ...] = _CODE) -> str:
    """Of source files, given as patterns within the package; those that decide what training computes by default."""
    package = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(package.glob(pattern)):
            total.update(file.relative_to(package).as_posix().encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:16]
