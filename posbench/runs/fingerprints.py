"""What must be equal for two runs to be compared, or for one to be resumed, as hashes and readable differences."""

from __future__ import annotations

import hashlib
import json
import subprocess
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ModelConfig, TrainConfig

if TYPE_CHECKING:  # a report reads fingerprints and needs no torch
    from posbench.model.decoder import Decoder
    from posbench.runs.start import Start

# Not part of what a run computes: names, places, and what only watches. The data of a task are.
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
    "order_every",
    "log_every",
    "max_skipped_steps",
    "branch_tokens",
    "trunk_tokens",
    "lr_of",  # what of it holds for a run is `scheme.lr`
    "from_run",  # see `_continued`
)
_WINDOWS = ("context_length", "batch_size")
_PACKAGE = Path(__file__).resolve().parent.parent


def digest(content: bytes | str) -> str:
    """The first 16 hex digits of the SHA-256."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def identity(config: Config, device: dict[str, Any], start: Start | None = None) -> dict[str, Any]:
    """What a run computes, as flat `group.field` -> value: its configuration without names, places and watching.

    The text and the tokenizer are not in it (they have fingerprints of their own), a task and its lengths are, and the
    device's number format. Arguments: start, the model that the run begins with (`train.from_run`).
    """
    mapping = config.to_mapping()
    train = mapping["train"]
    train = {key: value for key, value in train.items() if key not in _ASIDE_IN_TRAIN} | {
        "num_steps": config.train.num_steps
    }
    train["tokens"] = config.train.num_steps * config.train.tokens_per_step
    train["trunk_tokens"] = config.train.trunk_steps * config.train.tokens_per_step
    fields = {key: value for key, value in mapping.items() if key not in _ASIDE}
    fields |= {"train": train, "data": config.data.identity}
    if config.scheme_lr is not None:
        fields["scheme"]["lr"] = config.scheme_lr
    model = config.model
    # Options that came later stand here where they are on, so that runs of before and of now agree.
    fields["model"] = {key: on for key, on in mapping["model"].items() if on or key not in ("qk_norm", "qkv_bias")}
    fields["model"] |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_width, "ffn_dim": model.ffn_width}
    fields["device"] = {key: device[key] for key in ("type", "dtype", "compiled")}
    if start is not None:
        _continued(fields, config, start)
    return dict(json.loads(json.dumps(flat(fields))))


def _continued(fields: dict[str, Any], config: Config, start: Start) -> None:
    """Make `fields` those of a run that continues another: it stands in a table with runs trained as that one was.

    So `train` is that run's with the tokens of both, and what differs is a setting of the row, `scheme.continued`. With
    other windows than that run's it stands in no table with it.
    """
    own, before = fields["train"], start.identity or {}
    was = {key: value if key in _WINDOWS else before.get(f"train.{key}", value) for key, value in own.items()}
    tokens = start.tokens + own["tokens"]
    differing = {key: value for key, value in own.items() if value != was[key] and key not in ("lr", "trunk_tokens")}
    fields["scheme"] |= {
        "lr": config.row_train.lr,
        "continued": {"scheme": start.scheme, **differing, "tokens": own["tokens"]},
    }
    per_step = own["tokens"] // own["num_steps"]
    fields["train"] = was | {
        "tokens": tokens,
        "num_steps": tokens // per_step,
        "trunk_tokens": start.tokens + own["trunk_tokens"],
    }


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


def comparable_fingerprint(identity: dict[str, Any]) -> str:
    """Return `config_fingerprint` of a recorded identity without the settings that have their default.

    So a run that was made before a setting existed agrees with one that has the setting at its default.
    """
    groups = {"model": ModelConfig, "train": TrainConfig}
    defaults = {f"{group}.{entry.name}": entry.default for group, cls in groups.items() for entry in fields(cls)}
    return config_fingerprint({key: value for key, value in identity.items() if defaults.get(key, MISSING) != value})


def mixed(before: str | None, now: str) -> str:
    """The code that a run was trained by: `now`, or `before+now` where the code changed before it was resumed."""
    return now if before is None or before == now else before if before.endswith(f"+{now}") else f"{before}+{now}"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: before -> now`, a line for each value that differs."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def facts(
    identity: dict[str, Any], data: str, tokenizer: str, scheme_files: dict[str, str], began_with: str | None = None
) -> dict[str, Any]:
    """What a run is, and stays when it is resumed: its identity, text, tokenizer, the user's own files.

    And the digest of the weights that it began with in place of initial ones.
    """
    files = {f"file {name}": sha[:12] for name, sha in scheme_files.items()}
    texts = {"fingerprint of data": data, "fingerprint of tokenizer": tokenizer}
    return {**identity, **texts, **files} | ({} if began_with is None else {"train.from_run": began_with[:12]})


def weights_fingerprints(model: Decoder) -> dict[str, str]:
    """A digest of the initial weights for each logical part that schemes share, such as `attention.q`."""
    totals: dict[str, Any] = {}
    for name, tensor in model.shared_parts():
        total = totals.setdefault(name, hashlib.sha256())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return {name: total.hexdigest()[:16] for name, total in totals.items()}


@cache
def code_fingerprint() -> str:
    """Of the Python files of this package: it changes with every version, and keeps no runs apart."""
    return digest(b"".join(file.read_bytes() for file in sorted(_PACKAGE.rglob("*.py"))))


@cache
def commit() -> str | None:
    """The Git commit of the package where it is imported from a checkout; None elsewhere."""
    if not (_PACKAGE.parent / ".git").exists():
        return None
    with suppress(OSError):
        words = ["git", "-C", str(_PACKAGE), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    return None
