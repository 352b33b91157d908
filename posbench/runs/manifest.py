"""The manifest of a run, `run.json`: parsed once into a dataclass, behind which nothing checks again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from posbench.config import ConfigError

FORMAT = 2
FINISHED, RUNNING, STOPPED, DIED = "finished", "running", "stopped", "died"


class TornManifest(ConfigError):
    """`run.json` is missing, or is not what was written."""


@dataclass(frozen=True)
class Fingerprints:
    """Digests of what two runs of one table share (`posbench.runs.fingerprints` computes them).

    The code changes with every commit: `code` and `scheme_code` say which it was, and keep no runs apart.
    """

    data: str  # the text of all splits
    tokenizer: str
    config: str  # the configuration without its scheme and seed
    code: str  # the code that all runs share
    scheme_code: str  # the code of the scheme alone
    initial_weights: dict[str, str]  # a digest for each logical part of the shared weights
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
    weights: str | None = None  # SHA-256 of the last step's model.safetensors; None until finished
    branched_at: int | None = None  # steps done when the run took over its trunk's checkpoint; None: it began at 0
    wandb: dict[str, Any] | None = None
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


def parse(content: Any, file: Path) -> Manifest:
    """The manifest that `file` holds as plain data.

    Raises: TornManifest where a field is missing or of a wrong kind; ConfigError where its format is unknown.
    """
    number = content.get("format") if isinstance(content, dict) else None
    if isinstance(number, int) and number != FORMAT:
        remedy = "upgrade posbench" if number > FORMAT else "read the run with the posbench that wrote it"
        raise ConfigError(f"{file} is of format {number}; this posbench reads format {FORMAT}: {remedy}")
    try:
        manifest: Manifest = _parsed(Manifest, content, "")
    except ValueError as error:
        raise TornManifest(
            f"{file} is not a valid manifest ({error}): give the run's train command again, or delete the folder"
        ) from None
    return manifest


def _parsed(kind: Any, value: Any, name: str) -> Any:
    """`value` as what a field's type says. Raises: ValueError naming the field."""
    if isinstance(kind, UnionType):  # `kind | None`
        return None if value is None else _parsed(get_args(kind)[0], value, name)
    if kind in (Manifest, Fingerprints, Costs) and isinstance(value, dict):
        fields = dataclasses.fields(kind)
        for missing in (f.name for f in fields if f.name not in value and _is_required(f)):
            raise ValueError(f"{name}{missing} is missing")
        known = [f.name for f in fields if f.name in value]
        return kind(**{each: _parsed(_hints(kind)[each], value[each], f"{name}{each}.") for each in known})
    if kind is float and type(value) is int:
        return float(value)
    if kind is not Any and not isinstance(value, get_origin(kind) or kind):
        raise ValueError(f"{name[:-1] or 'it'} is {str(value)[:40]!r}")
    return value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
