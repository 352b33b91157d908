"""Read a decoder's sizes, position scheme and weights from a Hugging Face folder, without transformers.

A key of `config.json` that is missing or has an older form is read as transformers 5 does. No code in the folder is
run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.catalogue.own_files import kinds_in
from posbench.config import ConfigError
from posbench.schemes.rescaling import LENGTH, ROPE_TYPES, Rescaling
from posbench.system.files import sum_of

if TYPE_CHECKING:
    from torch import Tensor

_CLASSES = {  # model_type -> the class of transformers
    "llama": "LlamaForCausalLM",  # SmolLM 2 too
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "posbench": "PosbenchForCausalLM",
}
_READ = (
    "posbench reads Llama, Mistral, Qwen 2 and 3, SmolLM 2 and 3, Phi-3 and folders of posbench export, whose weights "
    "are safetensors files, not quantised"
)
_SIZES = {  # our field -> the key that every config.json has
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # values of missing keys, if they are not those of Llama
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    "phi3": {"original_max_position_embeddings": 4096},
}
_FIXED = {  # keys for which posbench has one value, the default: that value, and what posbench has
    "hidden_act": ("silu", "SiLU"),
    "attention_bias": (False, "no bias in the projection after attention"),
    "mlp_bias": (False, "no biases in the MLP"),
    "quantization_config": (None, "plain weights: dequantise the model first"),
}
SAVE = "AutoModelForCausalLM.from_pretrained('FOLDER').save_pretrained('OUT'), and copy the tokenizer's files"


@dataclass(frozen=True)
class Positions:
    """The position scheme of a trained model, and the lengths that it may be used at."""

    row: dict[str, Any] | None  # the scheme as in conf/scheme/*.yaml; None: posbench has no such scheme
    described: str  # the scheme in one line
    length: int | None = None  # longest input in the model's own training, tokens; None: not known

    @property
    def trained_length(self) -> int | None:
        """Return L of the formulas for positions, tokens: `length`, or less if the model continued another."""
        return (self.row or {}).get("trained_length") or self.length

    def checked_row(self, from_run: str) -> dict[str, Any]:
        """Return the scheme's settings, as in a YAML file. Raises: ConfigError if posbench has no such scheme."""
        if self.row is not None:
            return self.row
        raise ConfigError(
            f"train.from_run={from_run} has positions {self.described}, which posbench lacks: name the scheme to train "
            "it with, such as scheme=nope, or scheme=qk_rope scheme.base=..."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`. Raises: ConfigError if posbench's decoder cannot represent it."""
    config = read_json(folder / "config.json")
    family, architectures = config.get("model_type"), config.get("architectures")
    # `architectures` may be missing; the class then follows from the family.
    if family not in _CLASSES or (architectures or [_CLASSES[family]]) != [_CLASSES[family]]:
        facts = f"model_type={family}"
        if architectures:
            facts += f" and architectures={architectures}"
        raise ConfigError(f"{folder}/config.json has {facts}, and {_READ}")
    config = _DEFAULTS.get(family, {}) | config
    if config.get("hidden_act") == "swish":  # another name of SiLU in transformers
        config["hidden_act"] = "silu"
    for key, (value, description) in _FIXED.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{folder}/config.json has {key}={str(config[key])[:80]}, and posbench has {description}")
    needed = (*_SIZES.values(), "max_position_embeddings")
    if family == "posbench":
        needed = ("sizes", "scheme")
    if missing := [key for key in (*needed, "vocab_size") if key not in config]:
        raise ConfigError(f"{folder}/config.json has no {missing[0]}: save the model again with transformers ({SAVE})")
    return config


def described(row: Mapping[str, Any]) -> str:
    """Return a scheme's settings as one line of JSON, without name and learning rate."""
    return json.dumps({key: value for key, value in row.items() if key not in ("name", "lr", "lr_factor")})


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


# ---------------------------------------------------------------- sizes and positions in config.json


def sizes(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return {field: value} of ModelConfig, and `vocab_size`, from the content of `config.json`."""
    family, entries = config["model_type"], {"vocab_size": config["vocab_size"]}
    if family == "posbench":
        return config["sizes"] | entries
    return entries | {
        "name": name,
        **{ours: config[theirs] for ours, theirs in _SIZES.items()},
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "init_std": config.get("initializer_range", 0.02),
    }


def positions(config: Mapping[str, Any]) -> Positions:
    """Return the position scheme in the content of `config.json`; without a `row` if posbench has none such."""
    if config["model_type"] == "posbench":
        row = config["scheme"]
        length = config.get("context_length")
        # A folder must not name code to run, so a scheme of the user's own files is not read.
        return Positions(None if kinds_in(row) else row, described(row), length)
    rope = _rope_parameters(config)
    rope_text, length = json.dumps(rope), config["max_position_embeddings"]
    # With YaRN, `max_position_embeddings` is the extended length; training with the other types reaches it.
    if rope["rope_type"] == "yarn":
        length = rope[LENGTH]
    rotary = {"name": "rotary", "kind": "rotary", "sites": ["q", "k"], "base": rope.pop("rope_theta")}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    partial_factor = rope.pop("partial_rotary_factor", 1)
    # Of these families only Phi-3 reads the factor.
    rotated_share = partial_factor if config["model_type"] == "phi3" else 1
    if rotated_share != 1:
        rotary |= {"name": "partial_rotary", "kind": "partial_rotary", "fraction": rotated_share}
    if rope["rope_type"] != "default":
        try:
            rescaling = Rescaling.of(rope, None, length)
            rescaling.check_lists(int(rotated_share * head_dim))
            rotary["rescale"] = dict(rescaling.parameters)
        except ConfigError as error:
            return Positions(None, f"{rope_text} ({error})", length)
    is_rotated = _rotated_layers(config)
    rows = []  # the scheme of each layer
    for rotated, window in zip(is_rotated, _windows(config, is_rotated), strict=True):
        row = dict(rotary) if rotated else {"name": "nope", "kind": "nope"}
        if window:
            row["window"] = window
        rows.append(row)
    # The shortest period in which the layers repeat: 1 if all are equal.
    period = 1
    while rows[period:] != rows[: len(rows) - period]:
        period += 1
    row = rows[0]
    if period > 1:
        row = {"name": "interleaved", "kind": "interleaved", "layers": rows[:period]}
    return Positions(row, described(row), length)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    # Return the RoPE settings with the training length and the factor that transformers would use.
    rope, longest = raw_rotation(config), config["max_position_embeddings"]
    kind = rope["rope_type"]
    original = config.get(LENGTH) or rope.get(LENGTH)
    if kind == "dynamic":
        original = None  # transformers takes max_position_embeddings for this type
    rope[LENGTH] = original or longest
    rope["factor"] = rope.get("factor") or longest / rope[LENGTH]
    # Keys that a type does not have are left out.
    keys = {"rope_theta", "partial_rotary_factor", "rope_type", *ROPE_TYPES.get(kind, rope)}
    return {key: value for key, value in rope.items() if key in keys}


def raw_rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings in `config.json`, from new or older keys, with `rope_theta` and `rope_type`."""
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    rope = {"rope_theta": 1e4, **older, **(config.get("rope_scaling") or config.get("rope_parameters") or {})}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    # Phi-3's rescaling had other names before it was called `longrope`.
    if kind in ("su", "yarn") and config.get("model_type") == "phi3":
        rope["rope_type"] = "longrope"
    return rope


def _rotated_layers(config: Mapping[str, Any]) -> list[bool]:
    # Only SmolLM 3 has layers without rotation.
    layers = range(config["num_hidden_layers"])
    if config["model_type"] != "smollm3":
        return [True for _ in layers]
    interval = config.get("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers") or [(n + 1) % interval for n in layers]  # despite the name, 1 means rotated
    return [bool(flags[n]) for n in layers]


def _windows(config: Mapping[str, Any], is_rotated: Sequence[bool]) -> list[int | None]:
    """Return the sliding window of each layer, in tokens; None for a layer that sees all earlier tokens.

    Each family of models has its own rules for which layers have one.
    """
    family = config["model_type"]
    num_layers = len(is_rotated)
    default = 4096 if family in ("mistral", "qwen2", "qwen3") else None
    window = config.get("sliding_window", default)
    if family in ("mistral", "phi3"):
        return [window] * num_layers
    if family == "llama" or not config.get("use_sliding_window"):
        return [None] * num_layers
    if types := config.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in types]
    elif family == "smollm3":
        slides = [not rotated for rotated in is_rotated]
    else:
        first_sliding = config.get("max_window_layers", 28)
        slides = [n >= first_sliding for n in range(num_layers)]
    return [window if slide else None for slide in slides]


# ---------------------------------------------------------------- weights


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


def load_weights(files: Sequence[Path], is_tied: bool) -> dict[str, Tensor]:
    """Read safetensors files in Hugging Face's format, and return float32 weights by posbench's names.

    Arguments: is_tied, True if the embedding and unembedding are one tensor, returned once. Raises: ConfigError if a
    file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from posbench.model.names import from_hugging_face

    theirs: dict[str, Tensor] = {}
    for file in files:
        try:
            theirs |= load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a safetensors file ({error}): download it (git lfs pull)") from error
    theirs = {name: tensor.float() for name, tensor in theirs.items() if "inv_freq" not in name}
    if any(name.startswith("decoder.") for name in theirs):  # our own class
        ours = {name.removeprefix("decoder."): tensor for name, tensor in theirs.items()}
    else:
        # Unknown names are kept, so loading them into a model will fail.
        ours = from_hugging_face(theirs)
    # A file may store the same table under both names.
    if is_tied:
        ours.pop("unembedding.weight", None)
    return ours
