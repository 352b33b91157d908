"""Read from a GGUF file what transformers leaves out: rescaled rotations, and how many tokens the vocabulary has."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from posbench.config import ConfigError
from posbench.schemes.rescaling import LENGTH

_KEYS = {"factor": "factor", "original_context_length": LENGTH, "attn_factor": "attention_factor"}
_APPLIED = ("linear", "yarn")
_FACTORS = "rope_freqs.weight"  # divides each frequency of all lengths, as Llama 3.1's files have


@lru_cache(maxsize=8)  # reading the vocabulary takes seconds
def _read(path: Path, changed_at: int) -> tuple[dict[str, Any], int, dict[str, list[float]]]:
    """Return the keys about rescaling, the number of tokens, and the tensors of rotations."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError(f"{path} is damaged or not complete: download it again ({error})") from error
    family = reader.fields["general.architecture"].contents()
    start = f"{family}.rope.scal"
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith(start)}
    vocabulary = reader.fields.get("tokenizer.ggml.tokens")
    tensors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_")}
    return keys, len(vocabulary.data) if vocabulary else 0, tensors


def check(path: Path) -> None:
    """Raise ConfigError if the file is damaged."""
    _read(path, path.stat().st_mtime_ns)


def rope_parameters(path: Path, length: int) -> dict[str, Any]:
    """Return the rescaling of the file's rotations as `rope_parameters`, {} if it has none.

    Arguments: length, that the file names, in tokens. Raises: ConfigError for a damaged file, or for keys or tensors of
    a rescaling that posbench does not apply.
    """
    keys, _, tensors = _read(path, path.stat().st_mtime_ns)
    settings: dict[str, Any] = {}
    for name, value in keys.items():
        key = name.partition(".rope.scaling.")[2]
        if key == "type" and value in (*_APPLIED, "none"):
            settings["rope_type"] = value
        elif key in _KEYS:
            settings[_KEYS[key]] = value
        elif key != "finetuned":  # says only that the model was trained so
            raise _refused(path, f"{name}={value}")
    for name in tensors:
        if name != _FACTORS or settings.get("rope_type", "none") != "none":
            raise _refused(path, name)
    if _FACTORS in tensors:
        factors = tensors[_FACTORS]
        lists = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        return {"rope_type": "longrope", **lists, LENGTH: length}
    if settings.get("rope_type", "none") == "none":
        return {}
    if settings["rope_type"] == "linear":
        settings.pop(LENGTH, None)
    return settings


def num_tokens(path: Path) -> int:
    """Return how many tokens the file's vocabulary has; 0 if it has no vocabulary."""
    return _read(path, path.stat().st_mtime_ns)[1]


def _refused(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} has {what}, which posbench does not apply: score the folder that it was made from")
