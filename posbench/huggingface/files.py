"""Read the files of a Hugging Face folder, and refuse what transformers would read wrongly.

Errors use the names in the files. Only `config.json` and the headers of the weights are read, apart from two tables.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.rescaling import check_values
from posbench.system.files import sum_of

SAVE = "AutoModelForCausalLM.from_pretrained('FOLDER').save_pretrained('OUT'), and copy the tokenizer's files"
ADAPTER = "adapter_config.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_TOKENIZER_PARTS = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken")
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # embedding and output


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, as its header describes it."""

    file: Path
    dtype: str  # in safetensors' words, such as BF16


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises: ConfigError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return content
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path.parent} has no {path.name}: download all files of the model again") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON object ({error}): download it again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of a folder's weight files.

    Raises: ConfigError if the folder has no weight files, or if a file in the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    # One file, or else those that an index names, or else all model*.safetensors, or else all safetensors files.
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index} has no weight_map, which names the file of each tensor: download it again")
        files = sorted({folder / name for name in names.values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{index} names {missing[0]}, which is not in the folder: download it")
    elif not (files := sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))):
        raise ConfigError(f"{folder} has no safetensors files: transformers writes them ({SAVE})")
    return files


def digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the digests of all weight files."""
    return hashlib.sha256("".join(map(sum_of, files)).encode()).hexdigest()


def check_adapter(folder: Path) -> None:
    """Raise ConfigError if the folder has an adapter (LoRA), which posbench does not add to the weights."""
    if not (folder / ADAPTER).is_file():
        return
    content = read_json(folder / ADAPTER)
    without = ""
    if (folder / "model.safetensors").is_file():
        without = ", or delete the adapter's files to score the model without it"
    raise ConfigError(
        f"{folder} has {ADAPTER}, an adapter of {content.get('base_model_name_or_path')}, and posbench reads whole "
        f"models: merge it with PEFT (merge_and_unload, then save_pretrained){without}"
    )


def tokenizer_files(folder: Path) -> str:
    """Return the folder's tokenizer files other than tokenizer.json, as text: ` (it has vocab.json)`, or ""."""
    names = []
    for pattern in _TOKENIZER_PARTS:
        names += [file.name for file in folder.glob(pattern)]
    names.sort()
    return f" (it has {', '.join(names)})" if names else ""


def check_numbers(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for numbers in `config.json` from which transformers would compute nonsense, or break down."""
    rotation = raw_rotation(config)
    # Some models have rotations for each type of layer.
    for parameters in (rotation, *(rotation[key] for key in nested_rotations(config))):
        check_values(parameters, str(file))
    layers, flags = config.get("num_hidden_layers"), config.get("no_rope_layers")
    if flags and layers and len(flags) != layers:
        raise ConfigError(f"{file} has {len(flags)} entries in no_rope_layers for num_hidden_layers={layers}")


def raw_rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings in `config.json`, from new or older keys, with `rope_theta` and `rope_type`."""
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    rope = {"rope_theta": 1e4, **older, **(config.get("rope_scaling") or config.get("rope_parameters") or {})}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    # Phi-3's rescaling had other names before it was called `longrope`.
    if kind in ("su", "yarn") and config.get("model_type") == "phi3":
        rope["rope_type"] = "longrope"
    return rope


def nested_rotations(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the rotation whose values are rotations of one type of layer each."""
    return [key for key, value in raw_rotation(config).items() if isinstance(value, dict)]


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the file and number type of all tensors in safetensors files, from the headers only.

    Raises: ConfigError if a file is damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118  (it has no iterator)
                    tensors[name] = StoredTensor(file, content.get_slice(name).get_dtype())
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a safetensors file ({error}): download it (git lfs pull)") from error
    return {name: tensor for name, tensor in tensors.items() if "inv_freq" not in name}  # computed from config.json


def check_number_types(files: Sequence[Path]) -> None:
    """Raise ConfigError if weights are not floating-point numbers, such as quantised ones."""
    for name, tensor in stored_tensors(files).items():
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{tensor.file} has {name} in the number type {tensor.dtype}, and posbench reads {', '.join(_FLOATS)}: "
                "dequantise the model first"
            )


def stores_another_head(files: Sequence[Path]) -> bool:
    """Return whether the files store an output table and an embedding table with different numbers."""
    tensors = stored_tensors(files)
    if not all(name in tensors for name in _TABLES):
        return False
    embedding, head = (_read(tensors[name].file, name) for name in _TABLES)
    return not torch.equal(embedding, head)


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name)
    return tensor
