"""What must be equal for two runs to be compared, or for one to be resumed, as hashes and readable differences."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from posbench.config import Config
from posbench.model import Decoder
from posbench.runs.manifest import Fingerprints, Manifest
from posbench.schemes import Scheme

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
# Code that decides what every run computes; the rest of the package reads, prints or checks. The schemes' own files
# are not in it: see `scheme_code`.
_CODE = ("attention/*.py", "cross_entropy.py", "model.py", "schemes/base.py", "data/*.py", "training/*.py")


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
    return dict(json.loads(json.dumps(flat(kept))))


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


def continued(before: Fingerprints, now: Fingerprints) -> Fingerprints:
    """Those of a run that was resumed: what changed on the way is `before+now`, since a mixture is neither of them."""
    parts = {**before.initial_weights, **now.initial_weights}
    return Fingerprints(
        data=now.data,
        tokenizer=now.tokenizer,
        config=mixed(before.config, now.config),
        code=mixed(before.code, now.code),
        scheme_code=mixed(before.scheme_code, now.scheme_code),
        initial_weights={name: mixed(before.initial_weights.get(name), now.initial_weights[name]) for name in parts},
    )


def mixed(before: str | None, now: str) -> str:
    """What a run was made with from its first step on: `now`, or `before+now` where it went on under something else."""
    return now if before is None or before == now else before if before.endswith(f"+{now}") else f"{before}+{now}"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: before -> now`, a line for each value that differs."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def changes(before: Manifest, now: Manifest) -> list[str]:
    """`key: before -> now` for all that two manifests of one run must share."""
    return differences(*({**m.identity, **_texts(m)} for m in (before, now)))


def changes_in(config: Config, manifest: Manifest) -> list[str]:
    """... that differs between a manifest and the configuration beside it.

    Not the device, which is what trained; nor settings that are newer than the manifest.
    """
    kept = {key: value for key, value in manifest.identity.items() if not key.startswith("device.")}
    now = identity(config, dict.fromkeys(("type", "dtype", "compiled")))
    asked = {key: value for key, value in now.items() if key in kept or key.startswith("scheme.")}
    return differences(kept, asked)


def _texts(manifest: Manifest) -> dict[str, str]:
    prints = manifest.fingerprints
    return {"fingerprint of data": prints.data, "fingerprint of tokenizer": prints.tokenizer}


def weights_fingerprints(model: Decoder) -> dict[str, str]:
    """A digest of the initial weights for each logical part that schemes share, such as `attention.q`."""
    totals: dict[str, Any] = {}
    for name, tensor in model.shared_parts():
        total = totals.setdefault(name, hashlib.sha256())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return {name: total.hexdigest()[:16] for name, total in totals.items()}


@cache
def code_fingerprint(patterns: tuple[str, ...] = _CODE) -> str:
    """Of source files, given as patterns within the package; those that decide what all runs compute by default."""
    package = Path(__file__).resolve().parent.parent
    files = sorted({file for pattern in patterns for file in package.glob(pattern)})
    return digest("".join(f"{file.relative_to(package).as_posix()} {_syntax(file)}\n" for file in files))


def scheme_code(scheme: Scheme) -> str:
    """Of the modules that define a scheme, its parents and the schemes within it; the base class alone is shared code.

    A module is named by its place among the classes, not by its path: a plug-in may be installed anywhere.
    """
    classes = {kind for part in scheme.modules() if isinstance(part, Scheme) for kind in type(part).__mro__}
    modules = {kind.__module__ for kind in classes if issubclass(kind, Scheme) and kind is not Scheme}
    return digest("".join(f"{name} {_syntax_of_module(name)}\n" for name in sorted(modules)))


def _syntax_of_module(name: str) -> str:
    file = getattr(sys.modules[name], "__file__", None)
    return _syntax(Path(file)) if file and file.endswith(".py") else ""


def _syntax(file: Path) -> str:
    """What a Python file says, without comments, layout and docstrings."""
    return _canonical(ast.parse(file.read_bytes()))


def _canonical(node: Any) -> str:
    """A syntax tree as text, the same under every version of Python: empty and version-bound fields are left out."""
    if isinstance(node, list):
        return f"[{' '.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    values = {name: value for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        values["body"] = node.body[ast.get_docstring(node, clean=False) is not None :]
    fields = " ".join(f"{name}={_canonical(value)}" for name, value in values.items() if value not in (None, []))
    return f"{type(node).__name__}({fields})"
