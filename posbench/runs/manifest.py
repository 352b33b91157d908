"""The manifest of a run: `run.json`, parsed once at the door into a dataclass, and written back under a seal.

A run folder says in `format` which version of the layout it has. Format 1 knew no seal, one digest of all initial
weights and no digest of the trained ones: such a run can be reported and packed, but neither trained nor evaluated.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from posbench.config import ConfigError
from posbench.machine.files import has_its_seal, sealed

FORMAT = 2
FINISHED, RUNNING, STOPPED, DIED = "finished", "running", "stopped", "died"


class TornManifest(ConfigError):
    """`run.json` is missing, or is not what was written."""


@dataclass(frozen=True)
class Fingerprints:
    """Digests of what must be equal for two runs to be compared (`posbench.runs.fingerprints` computes them)."""

    data: str  # the text of all splits
    tokenizer: str
    config: str  # the configuration without its scheme and seed
    code: str  # the code that all runs share
    scheme_code: str  # the code of the scheme alone; empty in format 1
    initial_weights: dict[str, str]  # a digest for each logical part of the shared weights; {"all": ...} in format 1
    batches: str | None = None  # the batches consumed; None while training


@dataclass(frozen=True)
class Costs:
    """What training took. None: not measured."""

    tokens_per_second: float | None
    train_seconds: float | None
    peak_memory_bytes: int | None
    first_step_seconds: float | None = None  # of each process, which compiles: not among the others


@dataclass(frozen=True)
class Manifest:
    """What a run records about itself. Losses are those of the final validation, None until the run is finished."""

    format: int
    status: str  # finished | running | stopped | died
    experiment: str
    scheme: str
    seed: int
    vocab_size: int  # of the tokenizer
    num_parameters: dict[str, int]  # embedding, body, scheme
    is_relative: bool  # what the scheme promises
    fingerprints: Fingerprints
    identity: dict[str, Any]  # what the run computes, flat: `group.field` -> value
    versions: dict[str, str]
    device: dict[str, Any]
    num_steps: int
    tokens: int  # to train on
    started: str
    ended: str | None = None
    reason: str | None = None  # why it stopped or died
    skipped_steps: int = 0
    costs: Costs | None = None
    loss: float | None = None  # nats/token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    training_flops: float | None = None  # model FLOPs of all steps (`posbench.size`); None where not recorded
    text_tokens: int | None = None  # of the train split; None where not recorded
    weights: str | None = None  # SHA-256 of the last step's model.safetensors; None until finished, and in format 1
    branched_at: int | None = None  # steps done when the run took over its trunk's checkpoint; None: it began at 0
    wandb: dict[str, Any] | None = field(default=None)
    scheme_files: dict[str, str] = field(default_factory=dict)  # the user's own, by path as recorded: SHA-256

    @property
    def run_name(self) -> str:
        """`experiment/scheme/seed=n`: what a result of the run is bound to."""
        return f"{self.experiment}/{self.scheme}/seed={self.seed}"

    @property
    def epochs(self) -> float | None:
        """How often the run reads its text; None where that was not recorded."""
        return self.tokens / self.text_tokens if self.text_tokens else None

    @property
    def figures(self) -> dict[str, float | None]:
        """Single figures of a finished run, as trackers show them: final losses, costs, tokens, FLOPs."""
        costs = {} if self.costs is None else dataclasses.asdict(self.costs)
        losses = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**losses, **costs, "tokens": self.tokens, "training_flops": self.training_flops}

    def check_current(self, what: str) -> None:
        """Raises: ConfigError where the run is of an older format, which can be reported and no more."""
        if self.format != FORMAT:
            raise ConfigError(
                f"{self.run_name} is of format {self.format} and this posbench writes format {FORMAT}: it can be "
                f"reported, but not {what}. Train it again under another experiment_name=..., or delete its "
                "folder and train it again"
            )


def parse(content: Any, file: Path) -> Manifest:
    """The manifest that `file` holds as plain data.

    Raises: TornManifest where it is none, or not as it was written; ConfigError where its format is unknown.
    """
    number = content.get("format") if isinstance(content, dict) else None
    if not isinstance(number, int):
        raise _torn(file, "it has no format number")
    if not 1 <= number <= FORMAT:
        raise ConfigError(
            f"{file} is of format {number}; this posbench reads formats 1 to {FORMAT}: upgrade posbench, or read the "
            "run with the posbench that wrote it"
        )
    if number == FORMAT and not has_its_seal(content):
        raise _torn(file, "it does not match its checksum")
    try:
        manifest: Manifest = _parsed(Manifest, _of_format_1(content) if number == 1 else content, "")
    except ValueError as error:
        raise _torn(file, str(error)) from None
    return manifest


def to_mapping(manifest: Manifest) -> dict[str, Any]:
    """Plain data under a seal, as written to `run.json`."""
    assert manifest.format == FORMAT, "a run of an older format is never written"
    return sealed(dataclasses.asdict(manifest))


def _torn(file: Path, why: str) -> TornManifest:
    return TornManifest(
        f"{file} is not a valid manifest ({why}): give the run's train command again, or delete the folder"
    )


def _of_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """The same manifest in today's fields."""
    prints = content.get("fingerprints")
    if isinstance(prints, dict):
        prints = {"scheme_code": "", **prints, "initial_weights": {"all": prints.get("initial_weights")}}
    return {"identity": {}, **content, "fingerprints": prints}


def _parsed(kind: Any, value: Any, name: str) -> Any:
    """`value` as what a field's type says. Raises: ValueError naming the field."""
    if isinstance(kind, UnionType):  # optional, all of them
        return None if value is None else _parsed(get_args(kind)[0], value, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _parsed_fields(kind, value, f"{name}." if name else "")
    if get_origin(kind) is dict and isinstance(value, dict):
        of_value = get_args(kind)[1]
        return {str(key): _parsed(of_value, each, f"{name}.{key}") for key, each in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 63 else math.inf
    is_kept = kind not in (int, float) or is_plain_number(value)
    if kind is Any or (isinstance(kind, type) and type(value) is kind and is_kept):
        return value
    raise ValueError(f"{name} is {str(value)[:40]!r}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _parsed_fields(kind: Any, mapping: dict[str, Any], prefix: str) -> Any:
    hints = _hints(kind)
    values = {}
    for each in dataclasses.fields(kind):
        if each.name in mapping:
            values[each.name] = _parsed(hints[each.name], mapping[each.name], f"{prefix}{each.name}")
        elif each.default is dataclasses.MISSING:
            raise ValueError(f"{prefix}{each.name} is missing")
    return kind(**values)


def is_plain_number(value: Any) -> bool:
    """Whether it is a number of JSON that tables can hold: a whole one of 64 bits, or a finite one."""
    return (type(value) is int and abs(value) < 1 << 63) or (type(value) is float and math.isfinite(value))
