"""Load a causal model that transformers knows, from a folder or a GGUF file, and refuse what it would load wrongly."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from logging import Handler, getLogger
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from posbench.catalogue.own_files import kinds_in
from posbench.config import ConfigError
from posbench.data.text.tokenizer import CONVERT
from posbench.huggingface import files, gguf_files
from posbench.huggingface.behaviour import wrong_rotations
from posbench.huggingface.files import SAVE
from posbench.huggingface.modeling import PosbenchForCausalLM
from posbench.huggingface.positions import (
    head_width,
    read_positions,
    rotations_in,
    skeleton,
    trained_length,
)
from posbench.huggingface.rotations import change_rotations, is_rescaled
from posbench.huggingface.subject import SubjectModel
from posbench.model.decoder import ScoredModel
from posbench.model.positions import ModelPositions, positions_of
from posbench.schemes.building import with_options
from posbench.schemes.rescaling import ROPE_TYPES, check_lists
from posbench.system.device import Device
from posbench.system.files import sum_of

ADAPTER = 1  # version of this adapter; a change that may change a loss raises it
GGUF = ".gguf"
_COMPLETE = "download all files of the model"
_NOT_POSITIONS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")


@lru_cache(maxsize=8)  # reading a GGUF file takes seconds
def _read_config(source: Source, changed_at: int) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    # Return the configuration, and what transformers warns of in its rotations.
    if source.is_gguf:
        gguf_files.check(source.path)
    with _collected_warnings() as warnings:
        config = AutoConfig.from_pretrained(
            source.folder, trust_remote_code=False, local_files_only=True, **source.file_word
        )
    if source.is_gguf and not is_rescaled(config):
        length = trained_length(config, config.to_dict())
        rescaling = gguf_files.rope_parameters(source.path, length or 0)
        config.rope_parameters = {**(getattr(config, "rope_parameters", None) or {}), **rescaling}
    # `check` names keys that are not used itself.
    notes = [line for line in warnings if "rope" in line.lower() and "Unrecognized keys" not in line]
    return config, tuple(notes)


@lru_cache(maxsize=8)  # building the modules of a large model takes a second
def _skeleton(source: Source, digest: str) -> PreTrainedModel:
    return skeleton(source.config)


@lru_cache(maxsize=8)  # reading large weights takes as long as loading them
def _digest(is_gguf: bool, times: tuple[tuple[Path, int], ...]) -> str:
    # The times of the last change are part of the call, so that a changed file is read again.
    paths = [path for path, _ in times]
    return sum_of(paths[0]) if is_gguf else files.digest(paths)


def versions() -> dict[str, Any]:
    """Return {name: version} of what computes a subject's losses."""
    return {"transformers": transformers.__version__, "adapter": ADAPTER}


@dataclass(frozen=True)
class Source:
    """A model in Hugging Face's format: a folder, or a GGUF file."""

    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF

    @property
    def folder(self) -> Path:
        return self.path.parent if self.is_gguf else self.path

    @property
    def name(self) -> str:
        """Return the name of the subject, from the name of the folder or file."""
        folder = self.path.absolute()  # not resolved: a link keeps its name
        if folder.name == "..":
            folder = folder.resolve()
        name = folder.stem if self.is_gguf else folder.name
        # A hub's cache: models--OWNER--NAME/snapshots/REVISION.
        repository = folder.parent.parent.name
        if folder.parent.name == "snapshots" and repository.startswith("models--"):
            name = f"{repository.rpartition('--')[2]}-{folder.name[:7]}"
        # The subject's run is a folder of this name, so other characters are replaced.
        return re.sub(r"[^\w.+-]", "_", name).lstrip("_.+-")

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of `config.json`, or of the configuration in a GGUF file."""
        if self.is_gguf:
            return self.config.to_dict()
        if not (self.path / "config.json").is_file():
            raise ConfigError(f"{self.path} has no config.json: {_COMPLETE}{self._gguf_hint()}")
        return files.read_json(self.path / "config.json")

    def _gguf_hint(self) -> str:
        files = sorted(self.path.glob(f"*{GGUF}"))
        return f", or give its GGUF file ({files[0]})" if files else ""

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Return the configuration as transformers reads it. Raises: ConfigError if it cannot."""
        return self._read[0]

    @property
    def _read(self) -> tuple[PreTrainedConfig, tuple[str, ...]]:
        with _explained(self):
            file = self.path if self.is_gguf else self.path / "config.json"
            return _read_config(self, file.stat().st_mtime_ns)

    @property
    def file_word(self) -> dict[str, Any]:
        """Return the argument of `from_pretrained` that names a GGUF file, {} for a folder."""
        return {"gguf_file": self.path.name} if self.is_gguf else {}

    @property
    def config_digest(self) -> str:
        """Return a digest of the settings in `config.json` that decide what the model computes."""
        # Names of versions and number types do not change what the model computes.
        settings = {key: value for key, value in self.content.items() if key not in _NOT_POSITIONS}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the weights."""
        paths = [self.path] if self.is_gguf else files.weight_files(self.path)
        return _digest(self.is_gguf, tuple((path, path.stat().st_mtime_ns) for path in paths))

    @property
    def skeleton(self) -> PreTrainedModel:
        """Return the model without weights, in no memory."""
        with _explained(self):
            return _skeleton(self, self.config_digest)

    @property
    def length(self) -> int | None:
        """Return the training length, in tokens, or None if it is not recorded."""
        return trained_length(self.config, self.content)

    @property
    def rotations(self) -> dict[str, dict[str, Any]]:
        """Return {layer type: rope_parameters} as read; the type is "" if all layers share one rotation."""
        rotations = rotations_in(self.config)
        text_config: Any = self.config.get_text_config()
        # "" stands for all layers, and is no type of layer to check.
        for layer_type in filter(None, rotations):
            # The class has one rotation for all layers.
            if layer_type not in text_config.nested_rope_parameter_keys(rotations):
                raise ConfigError(_nested_refused(self, layer_type, type(self.config).__name__))
        return rotations

    @property
    def is_instructed(self) -> bool:
        """Return whether the model has a chat template, as instruction-tuned models do."""
        if (self.folder / "chat_template.jinja").is_file():
            return True
        file = self.folder / "tokenizer_config.json"
        return file.is_file() and bool(files.read_json(file).get("chat_template"))

    def tokenizer_file(self, target: Path) -> Path:
        """Return the path of the model's `tokenizer.json`; a GGUF file's is written to the folder `target`."""
        if not self.is_gguf:
            if not (self.path / "tokenizer.json").is_file():
                existing = files.tokenizer_files(self.path)
                raise ConfigError(f"{self.path} has no tokenizer.json{existing}: {CONVERT}")
            return self.path / "tokenizer.json"
        with _explained(self):
            tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, **self.file_word)
        target.mkdir(parents=True, exist_ok=True)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # transformers adds tokens that the file has not, such as <|endoftext|>.
        count = gguf_files.num_tokens(self.path)
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
        (target / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return target / "tokenizer.json"

    def check(self) -> list[str]:
        """Check `config.json` and the headers of the weights; return notes about what is read in another way.

        Raises: ConfigError for what transformers would not load, or load wrongly.
        """
        if self.is_gguf:
            return []
        file = self.path / "config.json"
        if self.content.get("quantization_config") is not None:
            raise ConfigError(f"{file} has a quantization_config: dequantise the model first ({SAVE})")
        # Only headers are read, so a check takes no memory.
        weights = files.weight_files(self.path)
        files.check_number_types(weights)
        names = files.stored_tensors(weights)
        for prefix, source in (("_orig_mod.", "torch.compile"), ("module.", "DistributedDataParallel")):
            if names and all(name.startswith(prefix) for name in names):
                raise ConfigError(
                    f"every tensor in {self.path} has a name that begins with {prefix}: remove it ({source})"
                )
        notes = self.check_config()
        if heads := self.prediction_heads(names):
            notes.append(f"{self.path}: {len(heads)} tensors of prediction heads are left out, such as {min(heads)}")
        if self.has_two_tables:
            notes.append(
                f"{self.path} says tie_word_embeddings=true and stores an lm_head.weight that differs from the "
                "embeddings: both are used, as transformers 5 does"
            )
        return notes

    def check_config(self) -> list[str]:
        """Check `config.json` alone, as `check` does."""
        file = self.path / "config.json"
        files.check_numbers(self.content, file)
        notes = [f"transformers says of {file}: {line}" for line in self._read[1]]
        for layer_type, parameters in self.rotations.items():
            channels = int(head_width(self.config) * parameters.get("partial_rotary_factor", 1))
            check_lists(parameters, channels, f"{file}: ")
            used = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
            kind = parameters["rope_type"]
            unused = sorted({*parameters} - {*used, *ROPE_TYPES.get(kind, ())})
            # Keys for one type of layer may have a meaning of their own in its class.
            if unused and not layer_type:
                notes.append(f"{file} has rotation keys that rope_type={kind} does not use: {', '.join(unused)}")
        return notes

    def prediction_heads(self, names: Iterable[str]) -> set[str]:
        """Return the names of tensors in layers that predict further tokens, which transformers leaves out."""
        if not self.content.get("num_nextn_predict_layers"):
            return set()
        layers, heads = self.content["num_hidden_layers"], set()
        for name in names:
            match = re.match(r"model\.layers\.(\d+)\.", name)
            if match and int(match[1]) >= layers:
                heads.add(name)
        return heads

    def check_code(self) -> None:
        """Raise ConfigError if the scheme of a folder of posbench export is in a file of somebody's own."""
        if names := kinds_in(self.content.get("scheme") or {}):
            raise ConfigError(f"{self.path} names {next(iter(names))}, and posbench runs no code that a folder names")

    @cached_property
    def has_two_tables(self) -> bool:
        """Return whether `config.json` ties the embedding and output tables, and the files store two that differ."""
        is_tied = bool(getattr(self.config, "tie_word_embeddings", False))
        return is_tied and files.stores_another_head(files.weight_files(self.path))


def load(source: Source, options: Sequence[str], length: int, device: Device) -> ScoredModel:
    """Return the model, with changed options of its rotations, for windows of `length` tokens.

    Arguments: options, such as `rescale=yarn`, whose factor is length / training length unless it is given.
    Raises: ConfigError if transformers cannot load it, or for tensors that do not fit its configuration.
    """
    if isinstance(source.config, _POSBENCH):
        # Our own decoder inside it reads rescalings from its scheme.
        return _posbench_decoder(source, options, device)
    config = copied_config(source)
    with _explained(source):
        methods = change_rotations(config, options, length, source.length or length, source.name)
    settings = json.dumps(rotations_in(config), sort_keys=True)  # tells changed configurations apart
    model = _load(source, config, settings, device)
    wrong: list[str] = []
    # A class whose layers cannot be watched one by one is not compared.
    with suppress(KeyError, TypeError, ValueError, RuntimeError, IndexError):
        wrong = wrong_rotations(model.model, config, methods)
    # A difference is our error, not the user's.
    assert not wrong, wrong[0]
    return model


def positions_under(source: Source, options: Sequence[str], length: int) -> ModelPositions:
    """Return what the model's layers do at `length` tokens, with changed options, without loading its weights.

    Raises: ConfigError for options it does not have.
    """
    config = copied_config(source)
    if isinstance(source.config, _POSBENCH):
        config.scheme = with_options(config.scheme, options)
        return positions_of(config.build(), length)
    with _explained(source):
        methods = change_rotations(config, options, length, source.length or length, source.name)
        return read_positions(source.skeleton, config, length, methods, source.length)


_POSBENCH = PosbenchForCausalLM.config_class


def _posbench_decoder(source: Source, options: Sequence[str], device: Device) -> ScoredModel:
    # Weights stay float32; the device's dtype is the type of the activations, as in training.
    config: Any = copied_config(source)
    config.scheme = with_options(config.scheme, options)
    model = from_pretrained(source, config, torch.float32)
    decoder = model.decoder.to(device.torch)
    decoder.compute_dtype = device.dtype
    return decoder


def copied_config(source: Source) -> Any:
    """Return a copy of the model's configuration, to be changed."""
    with _explained(source):
        return source.config.__class__.from_dict(source.config.to_dict())


class _Loaded:
    key: tuple[Any, ...] = ()
    model: SubjectModel | None = None


def _load(source: Source, config: PreTrainedConfig, settings: str, device: Device) -> SubjectModel:
    """Return the model, which stays loaded until another one is asked for.

    So one command loads a model once, for its check and all its lengths. Arguments: settings, the changed rotations.
    """
    key = (source.path.resolve(), source.digest, source.config_digest, settings, device.dtype, device.torch)
    if _Loaded.key != key or _Loaded.model is None:
        # The last model goes before the next one comes, so that memory holds one.
        _Loaded.key, _Loaded.model = (), None
        model = from_pretrained(source, config, device.dtype)
        _Loaded.key, _Loaded.model = key, SubjectModel(model.to(device.torch).eval())
    return _Loaded.model


def from_pretrained(source: Source, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return the model of the class that `config` is for. Raises: ConfigError as `load`."""
    with _explained(source):
        # A GGUF file is named; of a folder only safetensors files are read.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by their names
            **(source.file_word or {"use_safetensors": True}),
        )
    model, info = loaded
    _check_tensors(source, info, type(model).__name__)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(f"{source.path} has {name} with values that are not finite: save the model again")
    return model


@contextmanager
def silenced() -> Iterator[None]:
    """Silence transformers in a `with` block."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the reader of GGUF files draws a bar that nothing switches off
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn any error of transformers in a `with` block into a ConfigError of one sentence, and silence its output."""
    try:
        with silenced():
            yield
    except ConfigError:
        raise
    except Exception as error:  # transformers raises KeyError, TypeError and others for a configuration
        # A class with one rotation for all layers may fail on rotations for some of them, so these are named first.
        nested_types = [] if source.is_gguf else files.nested_rotations(source.content)
        if nested_types:
            raise ConfigError(_nested_refused(source, nested_types[0], "its class")) from error
        if source.is_gguf:
            missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
            remedy = f" (GGUF files need packages: pip install {' '.join(missing)})" if missing else ""
            raise ConfigError(
                f"transformers {transformers.__version__} cannot load {source.path}: {type(error).__name__}: "
                f"{_line(error)}{remedy}"
            ) from error
        kind = f" (model_type={source.content.get('model_type')})"
        raise ConfigError(
            f"transformers {transformers.__version__} cannot load {source.path}{kind} without code from the folder: "
            f"{type(error).__name__}: {_line(error)}. Correct config.json, install the version that the model needs, "
            f"or save the model again with it ({SAVE})"
        ) from error


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of transformers in a `with` block, a line each."""
    lines: list[str] = []
    handler, root, level = Handler(), getLogger("transformers"), logging.get_verbosity()
    handler.emit = lambda record: lines.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.set_verbosity_warning()
    root.addHandler(handler)
    logging.disable_default_handler()
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        logging.enable_default_handler()
        logging.set_verbosity(level)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _nested_refused(source: Source, layer_type: str, class_name: str) -> str:
    return (
        f"{source.folder}/config.json has rope_parameters.{layer_type}, which is for some of the layers, and "
        f"{class_name} has one rotation for all: write rope_parameters without layer types"
    )


def _check_tensors(source: Source, info: Mapping[str, Any], class_name: str) -> None:
    """Raise ConfigError if the files lack tensors of the class, or have others. Arguments: info, of `from_pretrained`.

    transformers itself would fill missing tensors with random numbers, or only warn.
    """
    stored_in = files.stored_tensors([] if source.is_gguf else files.weight_files(source.path))

    def file_of(name: str) -> Path:
        return stored_in[name].file if name in stored_in else source.path

    differences = []
    # Unknown names come before missing ones, because the missing tensors may be there by other names.
    for name in sorted({*info["unexpected_keys"]} - source.prediction_heads(info["unexpected_keys"])):
        differences.append(
            f"{file_of(name)} has {name}, which {class_name} has not: rename it, or save the model again with "
            f"transformers, which leaves out what its class has not ({SAVE})"
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        vocabulary = ""
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            vocabulary = f" says vocab_size={source.content['vocab_size']}, which"
        differences.append(
            f"{file_of(name)} has {name} {list(stored)}, and config.json{vocabulary} makes it {list(expected)}: "
            "correct the one that is wrong"
        )
    for name in sorted(info["missing_keys"]):
        is_head = name == "lm_head.weight"
        reason = " (tie_word_embeddings=false)" if is_head else ""
        differences.append(f"{source.path} lacks {name}{reason}: download the model again, or correct its config.json")
    if not differences:
        return
    message = differences[0]
    if len(differences) > 1:
        message += f" ({len(differences) - 1} more tensors do not fit)"
    raise ConfigError(message)
