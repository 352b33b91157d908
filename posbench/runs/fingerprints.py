"""Decide which runs can be compared and which can be resumed, by hashes and readable differences."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ModelConfig, TrainConfig

if TYPE_CHECKING:  # a report reads fingerprints and needs no torch
    from posbench.model.decoder import Decoder

# These settings do not decide what a run computes: names, folders, and logging. For tasks, `data` is added again.
_NOT_IN_IDENTITY = (
    "tracking",
    "launch",
    "experiment",
    "experiment_name",
    "runs_dir",
    "evaluation",
    "data",
    "tokenizer",
)
_TRAIN_NOT_IN_IDENTITY = (
    "device",
    "dtype",
    "compile",
    "steps",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "validation_tokens",
    "order_every",
    "log_every",
    "max_skipped_steps",
    "branch_tokens",
    "arms",
    "trunk_tokens",
    "lr_of",  # the learning rate it gives this run is `train.lr`
    "from_run",  # see `Start.comparable`
    "keep_schedule",
)
# Newer settings of `train` with what older runs used. They are recorded only if they differ, so that all runs agree.
TRAIN_DEFAULTS = {"optimizer": "adamw", "matrix_lr_factor": 1, "drawn_length": None, "optimizer_options": {}}
_MUON_SETTINGS = ("momentum", "ns_steps")  # AdamW does not read them
_PACKAGE = Path(__file__).resolve().parent.parent


def digest(content: bytes | str) -> str:
    """Return the first 16 hex digits of the SHA-256 of `content`."""
    if isinstance(content, str):
        content = content.encode()
    return hashlib.sha256(content).hexdigest()[:16]


def settings_in_use(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `train` that its optimizer reads, without newer ones that are as older runs had them."""
    used = {key: value for key, value in train.items() if TRAIN_DEFAULTS.get(key) != value}
    # Without an entry the optimizer is AdamW, the default.
    if "optimizer" not in used:
        used = {key: value for key, value in used.items() if key not in _MUON_SETTINGS}
    return used


def identity(config: Config, device: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what a run computes, {`group.field`: value}.

    Names, folders and logging are left out, and text and tokenizer, which have fingerprints of their own. Arguments:
    device, from `Device.describe`.
    """
    mapping = config.to_mapping()
    train = {key: value for key, value in mapping["train"].items() if key not in _TRAIN_NOT_IN_IDENTITY}
    train = settings_in_use(train)
    train["num_steps"] = config.train.num_steps
    train["tokens"] = config.train.num_steps * config.train.tokens_per_step
    train["trunk_tokens"] = config.train.trunk_steps * config.train.tokens_per_step
    fields = {key: value for key, value in mapping.items() if key not in _NOT_IN_IDENTITY}
    fields |= {"train": train, "data": config.data.identity}
    # None: the scheme has no rate of its own. The rate itself is `train.lr`; only that it is the scheme's is recorded.
    if config.scheme.lr is not None:
        fields["scheme"].pop("lr")
        fields["scheme"]["own_lr"] = True
    model = config.model
    # Newer options are recorded only if they are on, so that runs from before they existed still agree.
    fields["model"] = {key: on for key, on in mapping["model"].items() if on or key not in ("qk_norm", "qkv_bias")}
    fields["model"] |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_width, "ffn_dim": model.ffn_width}
    # A stacked run (`posbench.training.stack`) sums in another order; others do not record that they are not.
    fields["device"] = {key: device[key] for key in ("type", "dtype", "compiled", "stacked") if key in device}
    # As JSON has them, so that they equal what is read back: tuples become lists.
    return dict(json.loads(json.dumps(flat(fields))))


def with_one_rate(identity: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded identity with the run's learning rate as `train.lr`."""
    # Runs from before 27 November 2026 recorded a scheme's own rate as `scheme.lr` beside the experiment's `train.lr`.
    if "scheme.lr" not in identity:
        return identity
    settings = {key: value for key, value in identity.items() if key != "scheme.lr"}
    return settings | {"train.lr": identity["scheme.lr"], "scheme.own_lr": True}


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a mapping of mappings to {`group.field`: value}, with `prefix` before each name."""
    fields: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            fields |= flat(value, f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = value
    return fields


def config_fingerprint(identity: dict[str, Any]) -> str:
    """Return the digest of the settings in `identity` that all runs of a table must share."""
    ignored = {"seed", "device.compiled", "device.stacked"}
    # A table compares schemes, each at its own learning rate.
    if identity.get("scheme.own_lr"):
        ignored.add("train.lr")
    shared = {key: value for key, value in identity.items() if not key.startswith("scheme.") and key not in ignored}
    return digest(json.dumps(shared, sort_keys=True))


def comparable_fingerprint(identity: dict[str, Any]) -> str:
    """Return the fingerprint of a recorded identity without scheme, seed and default values."""
    # So a run made before a setting existed has the same fingerprint as a run with the setting at its default.
    defaults = {f"model.{entry.name}": entry.default for entry in fields(ModelConfig)}
    defaults |= {f"train.{entry.name}": entry.default for entry in fields(TrainConfig)}
    return config_fingerprint({key: value for key, value in identity.items() if defaults.get(key, MISSING) != value})


def versions_used(previous: str | None, current: str) -> str:
    """Return the versions of posbench that trained a run: `previous+current` if a resume changed it."""
    if previous is None or previous == current:
        return current
    # A second resume with the same version adds nothing.
    if previous.endswith(f"+{current}"):
        return previous
    return f"{previous}+{current}"


def changes(previous: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a line `key: previous -> current` for each key whose values differ; a missing key counts as None."""
    keys = [key for key in {**previous, **current} if previous.get(key) != current.get(key)]
    return [f"{key}: {previous.get(key)} -> {current.get(key)}" for key in keys]


def facts(
    identity: dict[str, Any], data: str, tokenizer: str, scheme_files: dict[str, str], began_with: str | None = None
) -> dict[str, Any]:
    """Return the facts about a run that must not change when it is resumed, {name: value}.

    Arguments: scheme_files, the user's own, {path: SHA-256}; began_with, the digest of the weights that the run began
    with, None if they were drawn from its seed.
    """
    # Twelve digits are enough to tell files apart, and can be read.
    files = {f"file {name}": sha[:12] for name, sha in scheme_files.items()}
    texts = {"fingerprint of data": data, "fingerprint of tokenizer": tokenizer}
    facts = {**identity, **texts, **files}
    if began_with is not None:
        facts["train.from_run"] = began_with[:12]
    return facts


def weights_fingerprints(model: Decoder) -> dict[str, str]:
    """Return {name: digest of initial weights} for the weights that all schemes share, such as `attention.q`."""
    totals: dict[str, Any] = {}
    # Layers have equal names, so one digest covers all layers.
    for name, tensor in model.shared_parts():
        total = totals.setdefault(name, hashlib.sha256())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return {name: total.hexdigest()[:16] for name, total in totals.items()}


@cache
def code_fingerprint() -> str:
    """Return the digest of this package's Python files. Runs with different code are still comparable."""
    return digest(b"".join(file.read_bytes() for file in sorted(_PACKAGE.rglob("*.py"))))


@cache
def commit() -> str | None:
    """Return the Git commit of the package, or None if it is not imported from a checkout."""
    if not (_PACKAGE.parent / ".git").exists():
        return None
    with suppress(OSError):
        words = ["git", "-C", str(_PACKAGE), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    return None
