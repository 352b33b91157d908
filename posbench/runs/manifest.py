"""Define the manifest, `run.json`: the record of a run's settings, state and result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from posbench.config import ConfigError
from posbench.runs.fingerprints import with_one_rate

FORMAT = 2
FINISHED, RUNNING, STOPPED, DIED = "finished", "running", "stopped", "died"


class DamagedFile(ConfigError):
    """A file of a run that is missing or damaged."""


@dataclass(frozen=True)
class Fingerprints:
    """Digests by which runs are compared (`posbench.runs.fingerprints` computes them)."""

    data: str  # the text of all splits
    tokenizer: str
    config: str  # the configuration without its scheme and seed
    # Runs of one table must share all but this, which changes with every commit.
    code: str  # the package's source files
    initial_weights: dict[str, str]  # a digest for each logical part of the shared weights
    batches: str | None = None  # the batches consumed; None while training


@dataclass(frozen=True)
class Costs:
    """The speed, time and memory of a run's training. A field is None if it was not measured."""

    tokens_per_second: float | None
    train_seconds: float | None
    peak_memory_bytes: int | None
    first_step_seconds: float | None = None  # first step of each process, with compilation; not in the other figures


@dataclass(frozen=True)
class Manifest:
    """The record of a run, `run.json`. Losses are from the final validation, None until the run is finished."""

    format: int
    status: str  # finished | running | stopped | died
    experiment: str
    scheme: str
    seed: int
    vocab_size: int  # entries of the tokenizer
    num_parameters: dict[str, int]  # embedding, body, scheme
    is_relative: bool  # True if the scheme claims that its scores depend on distances only
    fingerprints: Fingerprints
    identity: dict[str, Any]  # settings that decide what the run computes, flat: `group.field` -> value
    versions: dict[str, str]
    device: dict[str, Any]
    num_steps: int
    tokens: int  # tokens to train on, including the tokens of the model it began with
    started: str
    ended: str | None = None
    reason: str | None = None  # why it stopped or died
    skipped_steps: int = 0
    costs: Costs | None = None
    loss: float | None = None  # nats/token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    training_flops: float | None = None  # model FLOPs of all steps (`posbench.model.size`); None if not recorded
    cache_per_token: float | None = None  # numbers that decoding keeps (`posbench.model.size`); None if not recorded
    text_tokens: int | None = None  # tokens of the train split; None if not recorded
    weights: str | None = None  # SHA-256 of the last step's model.safetensors; None until finished
    branched_at: int | None = None  # step of the trunk's checkpoint that the run began with; None: it began at 0
    subject: dict[str, Any] | None = None  # facts about a model that was not trained here, such as its path
    continued: dict[str, Any] | None = None  # the model it began with (`posbench.runs.start.Start.record`)
    optimizer: dict[str, Any] | None = None  # what each optimizer trains (`Optimizer.record`); None: AdamW trains all
    wandb: dict[str, Any] | None = None
    scheme_files: dict[str, str] = field(default_factory=dict)  # the user's own files: path -> SHA-256
    command: list[str] | None = None  # the overrides of the command that trains it; None if not recorded

    @property
    def run_name(self) -> str:
        """Return `experiment/scheme/seed=n`, the name by which results refer to the run."""
        return f"{self.experiment}/{self.scheme}/seed={self.seed}"

    @property
    def epochs(self) -> float | None:
        """Return how many times training reads the train split, or None if its size was not recorded."""
        return self.tokens / self.text_tokens if self.text_tokens else None

    @property
    def figures(self) -> dict[str, float | None]:
        """Return a finished run's losses, costs, tokens and FLOPs, as shown in wandb."""
        costs = {} if self.costs is None else asdict(self.costs)
        losses = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**losses, **costs, "tokens": self.tokens, "training_flops": self.training_flops}


@lru_cache(maxsize=256)  # a report asks for the manifest of a run several times
def parse(content: bytes, file: Path) -> Manifest:
    """Parse `run.json`. Fields that this version does not know are ignored.

    Raises: DamagedFile if the JSON is damaged or a field is missing; ConfigError if its format is unknown.
    """
    try:
        mapping = json.loads(content)
        number = int(mapping["format"])
        if number == FORMAT:
            prints = mapping["fingerprints"]
            costs = mapping.get("costs")  # may be None
            nested = {"fingerprints": _from_known(Fingerprints, prints), "costs": costs and _from_known(Costs, costs)}
            manifest: Manifest = _from_known(Manifest, mapping | nested)
            return replace(manifest, identity=with_one_rate(manifest.identity))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFile(
            f"{file} cannot be read ({error}): give the run's train command again, which resumes from its last "
            "checkpoint, or delete the folder"
        ) from error
    raise ConfigError(f"{file} has format {number}; this posbench reads format {FORMAT}: use the version that wrote it")


def _from_known(cls: Any, mapping: dict[str, Any]) -> Any:
    # A field that the mapping lacks gets its default; without one, the class raises TypeError.
    known = {entry.name: mapping[entry.name] for entry in fields(cls) if entry.name in mapping}
    return cls(**known)
