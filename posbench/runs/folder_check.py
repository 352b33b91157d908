"""Check that posbench's decoder can represent a Hugging Face folder, before its weights are read.

Errors use the names in the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from posbench.config import ConfigError, ModelConfig, SchemeConfig
from posbench.model.architecture import Architecture
from posbench.model.decoder import Decoder
from posbench.model.layers import Block
from posbench.model.names import LAYER, PARTS, to_hugging_face
from posbench.runs.pretrained import SAVE, Positions, positions, raw_rotation, read_json, sizes
from posbench.schemes.rescaling import LENGTH, ROPE_TYPES

_FLOATS = ("F64", "F32", "F16", "BF16")
_ADAPTER = "adapter_config.json"
_TOKENIZER_PARTS = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken")
_PER_LAYER = ("layer_types", "no_rope_layers")  # keys of config.json with an entry for each layer
_MAY_BE_NULL = ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_slow", "beta_fast")
_LISTS = ("short_factor", "long_factor")
_NUMBERS = {"rope_theta", "partial_rotary_factor"}.union(*ROPE_TYPES.values())
_NUMBERS -= {"truncate", *_LISTS}
_ABOVE_ZERO = ("rope_theta", "factor", LENGTH, *_LISTS)  # frequencies are divided by these, or by their logarithms
_LAYER_TYPES = ("full_attention", "sliding_attention")
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_TABLES = (  # embedding and output, in transformers' classes and in ours
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("decoder.embedding.weight", "decoder.unembedding.weight"),
)
_NAMED_BY = {"model.embed_tokens.weight": "vocab_size", "lm_head.weight": "vocab_size"}  # the key that decides the rows


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, as its header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' words, such as BF16


def check_adapter(folder: Path) -> None:
    """Raise ConfigError if the folder has an adapter (LoRA), which posbench does not add to the weights."""
    if not (folder / _ADAPTER).is_file():
        return
    content = read_json(folder / _ADAPTER)
    without = ""
    if (folder / "model.safetensors").is_file():
        without = ", or delete the adapter's files to score the model without it"
    raise ConfigError(
        f"{folder} has {_ADAPTER}, an adapter of {content.get('base_model_name_or_path')}, and posbench reads whole "
        f"models: merge it with PEFT (merge_and_unload, then save_pretrained){without}"
    )


def tokenizer_files(folder: Path) -> str:
    """Return the folder's tokenizer files other than tokenizer.json, as text: ` (it has vocab.json)`, or ""."""
    names = []
    for pattern in _TOKENIZER_PARTS:
        names += [file.name for file in folder.glob(pattern)]
    names.sort()
    return f" (it has {', '.join(names)})" if names else ""


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for a `config.json` that posbench's decoder cannot represent."""
    check_numbers(config, file)
    if unknown := [kind for kind in config.get("layer_types") or () if kind not in _LAYER_TYPES]:
        raise ConfigError(f"{file} has layer_types with {unknown[0]}, and posbench has {' and '.join(_LAYER_TYPES)}")


def check_numbers(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for sizes that are no whole numbers, and for lists without an entry for each layer."""
    # Our own class has its sizes elsewhere, under `sizes`.
    if config.get("model_type") == "posbench":
        return
    for key in [key for key in _COUNTS if key in config]:
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{file} has {key}={value!r}, which must be a whole number, 1 or more: correct it")
    _check_rotation_numbers(config, file)
    layers = config.get("num_hidden_layers")
    for key in _PER_LAYER:
        entries = config.get(key)
        if entries and layers and len(entries) != layers:
            raise ConfigError(f"{file} has {len(entries)} entries in {key} for num_hidden_layers={layers}: correct one")


def positions_in(config: Mapping[str, Any]) -> Positions:
    """Return the position scheme in `config.json`, without a `row` if its layers have rotations of their own."""
    if config["model_type"] == "posbench":
        return positions(config)
    nested = nested_rotations(config)
    if not nested:
        return positions(config)
    reason = f"rope_parameters.{nested[0]} is for some of the layers, and posbench reads one rotation for all"
    return Positions(None, f"{json.dumps(raw_rotation(config))} ({reason})", config["max_position_embeddings"])


def nested_rotations(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the rotation whose values are rotations of one type of layer each."""
    return [key for key, value in raw_rotation(config).items() if isinstance(value, dict)]


def _check_rotation_numbers(config: Mapping[str, Any], file: Path) -> None:
    rotation = raw_rotation(config)
    # Some models have rotations for each type of layer.
    settings = [*rotation.items()]
    for key in nested_rotations(config):
        settings += rotation[key].items()
    for key, value in settings:
        is_missing = value is None and key in _MAY_BE_NULL
        if key in _NUMBERS and not is_missing and not _is_number(value):
            raise ConfigError(f"{file} has {key}={json.dumps(value)}, which is not a number: correct it")
        if key in _LISTS and not (isinstance(value, list) and all(_is_number(number) for number in value)):
            raise ConfigError(f"{file} has {key}={json.dumps(value)}, which is not a list of numbers: correct it")
        numbers = value if key in _LISTS else [value]
        if key in _ABOVE_ZERO and not is_missing and not all(number > 0 for number in numbers):
            raise ConfigError(f"{file} has {key}={json.dumps(value)}, which must be above 0: correct it")


def check_rotation_lists(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError unless the lists of `longrope` have a factor for each pair of rotated channels."""
    rotation = raw_rotation(config)
    width = config.get("head_dim")
    if width is None and config.get("num_attention_heads"):
        width = config.get("hidden_size", 0) // config["num_attention_heads"]
    # Without these keys the width of a head is not known.
    if not width:
        return
    channels = int(width * rotation.get("partial_rotary_factor", config.get("rotary_pct", 1)))
    for key in _LISTS:
        factors = rotation.get(key)
        if factors is not None and len(factors) != channels // 2:
            raise ConfigError(
                f"{file}: {key} has {len(factors)} entries, and {channels} channels a head are rotated: it needs "
                f"{channels // 2}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the shape and number type of all tensors in safetensors files, from the headers only.

    Raises: ConfigError if a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118  (it has no iterator)
                    part = content.get_slice(name)
                    tensors[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a safetensors file ({error}): download it (git lfs pull)") from error
    return {name: tensor for name, tensor in tensors.items() if "inv_freq" not in name}  # computed from config.json


def check_number_types(files: Sequence[Path]) -> None:
    """Raise ConfigError if weights are not floating-point numbers, such as quantised ones."""
    for name, tensor in stored_tensors(files).items():
        if tensor.dtype not in _FLOATS:
            raise ConfigError(_wrong_number_type(name, tensor))


def _wrong_number_type(name: str, tensor: StoredTensor) -> str:
    return (
        f"{tensor.file} has {name} in the number type {tensor.dtype}, and posbench reads {', '.join(_FLOATS)}: "
        "dequantise the model first"
    )


def stores_another_head(files: Sequence[Path]) -> bool:
    """Return whether the files store an output table and an embedding table with different numbers."""
    tensors = stored_tensors(files)
    for names in _TABLES:
        if all(name in tensors for name in names):
            embedding, head = (_read(tensors[name].file, name) for name in names)
            return not torch.equal(embedding, head)
    return False


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name)
    return tensor


def check_tensors(files: Sequence[Path], config: Mapping[str, Any], scheme: Positions, is_tied: bool) -> None:
    """Raise ConfigError unless the files have the tensors of the decoder that `config` describes, and no others.

    Arguments: is_tied, whether the embedding is also the output table.
    """
    # The scheme of such a folder is not read, and it decides which tensors there are.
    if config["model_type"] == "posbench" and scheme.row is None:
        return
    folder = files[0].parent
    tensors = stored_tensors(files)
    differences: list[str] = []
    # The names in the files decide whether shapes are expected by our names or by those of transformers, and for which
    # products, such as q, k and v in one matrix.
    expected = _expected_shapes(config, scheme, is_tied, tensors)
    # Another scheme may be named for the run, so a scheme's own tensors may be missing or too many.
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_of_scheme(name)}
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            differences.append(_wrong_number_type(name, tensor))
        elif name not in expected and not _is_spare_head(name, is_tied):
            differences.append(
                f"{tensor.file} has {name}, which posbench's model has not: rename it, or save the model again with "
                f"transformers, which leaves out what its class has not ({SAVE})"
            )
        elif name in expected and tensor.shape != expected[name]:
            differences.append(
                f"{tensor.file} has {name} {list(tensor.shape)}, and config.json{asks_for(name, config)} makes it "
                f"{list(expected[name])}: correct the one that is wrong"
            )
    for name in [name for name in expected if name not in tensors and not _is_of_scheme(name)]:
        reason = " (tie_word_embeddings=false)" if name == "lm_head.weight" else ""
        differences.append(f"{folder} lacks {name}{reason}: download the model again, or correct its config.json")
    check_none(differences)


def check_none(differences: Sequence[str]) -> None:
    """Raise ConfigError if tensors do not fit, with the first difference and the number of the others."""
    if not differences:
        return
    message = differences[0]
    if len(differences) > 1:
        message += f" ({len(differences) - 1} more tensors do not fit)"
    raise ConfigError(message)


def notes(folder: Path, config: Mapping[str, Any], is_untied: bool) -> list[str]:
    """Return a line for each thing in the folder that posbench reads in another way than `config.json` suggests.

    Arguments: is_untied, whether tables that `config.json` ties are not.
    """
    lines: list[str] = []
    # A folder of posbench export is read as it says.
    if config.get("model_type") == "posbench":
        return lines
    if is_untied:
        lines.append(
            f"{folder} says tie_word_embeddings=true and stores an lm_head.weight that differs from the embeddings: "
            "both are used, as transformers 5 does"
        )
    rotation = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rotation_type = raw_rotation(config)["rope_type"]
    used_keys = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPES.get(rotation_type, ()))
    unused = sorted(key for key in rotation if key not in (*used_keys, *nested_rotations(config)))
    if unused and not nested_rotations(config):
        lines.append(
            f"{folder}/config.json has rotation keys that rope_type={rotation_type} does not use: {', '.join(unused)}"
        )
    return lines


def _is_of_scheme(name: str) -> bool:
    # Also a tensor of a kind of attention.
    return name.startswith("decoder.scheme.") or ".kind." in name


def _is_spare_head(name: str, is_tied: bool) -> bool:
    # A folder may store the output table although it is the embedding table.
    return is_tied and name in {head for _, head in _TABLES}


def asks_for(name: str, config: Mapping[str, Any]) -> str:
    """Return the words that name the key of `config.json` that decides a tensor's shape, or ""."""
    key = _NAMED_BY.get(name)
    return "" if key is None else f" says {key}={config[key]}, which"


def _expected_shapes(
    config: Mapping[str, Any], scheme: Positions, is_tied: bool, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors that the files should have, by the names that they use.

    Arguments: stored, the tensors in the files: their names are ours or those of transformers, and a product that is
    packed in them, such as q, k and v, stays packed.
    """
    fields = sizes(config, "subject")
    model = ModelConfig(**{**fields, "tied_embeddings": is_tied})
    # Tensors of the scheme are not checked, so without a scheme of posbench any other will do, and so will any length.
    row = scheme.row or {"name": "nope", "kind": "nope"}
    architecture = Architecture.build(model, SchemeConfig.from_mapping(dict(row)), scheme.length or 1)
    # On the device `meta`, a decoder has shapes and no memory.
    with torch.device("meta"):
        decoder = Decoder(architecture, config["vocab_size"])
    ours = dict(decoder.named_parameters())
    # The names of posbench's own class.
    if any(name.startswith("decoder.") for name in stored):
        return {f"decoder.{name}": tuple(tensor.shape) for name, tensor in ours.items()}
    block = cast(Block, decoder.blocks[0])
    # Product -> the rows of its parts, if they are separate tensors in the files.
    rows = {"attention.qkv": [*block.attention.rows().values()], "ffn.gate_up": 2 * [model.ffn_width]}
    for product in PARTS:
        # Their file has this product in one piece too.
        if any(LAYER[product] in name for name in stored):
            rows.pop(product, None)
    theirs = to_hugging_face(ours, rows)
    return {name: tuple(tensor.shape) for name, tensor in theirs.items()}
