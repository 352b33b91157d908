"""The manifest of a run, `run.json`: parsed once into a dataclass, behind which nothing checks again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from posbench.config import ConfigError

FORMAT = 2
FINISHED, RUNNING, STOPPED, DIED = "finished", "running", "stopped", "died"


class DamagedFile(ConfigError):
    """A file of a run is missing, or is not what was written."""


@dataclass(frozen=True)
class Fingerprints:
    """Digests of what two runs of one table share (`posbench.runs.fingerprints` computes them).

    The code changes with every commit: `code` says which it was, and keeps no runs apart.
    """

    data: str  # the text of all splits
    tokenizer: str
    config: str  # the configuration without its scheme and seed
    code: str  # the package's source files
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
    tokens: int  # to train on, with those of the model that it began with
    started: str
    ended: str | None = None
    reason: str | None = None  # why it stopped or died
    skipped_steps: int = 0
    costs: Costs | None = None
    loss: float | None = None  # nats/token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    training_flops: float | None = None  # model FLOPs of all steps (`posbench.model.size`); None where not recorded
    text_tokens: int | None = None  # of the train split; None where not recorded
    weights: str | None = None  # SHA-256 of the last step's model.safetensors; None until finished
    branched_at: int | None = None  # steps done when the run took over its trunk's checkpoint; None: it began at 0
    continued: dict[str, Any] | None = None  # the model it began with (`posbench.runs.start.Start.record`)
    wandb: dict[str, Any] | None = None
    scheme_files: dict[str, str] = field(default_factory=dict)  # the user's own, by path as recorded: SHA-256
    command: list[str] | None = None  # the overrides of the command that trains it; None: it was not recorded

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
        costs = {} if self.costs is None else asdict(self.costs)
        losses = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**losses, **costs, "tokens": self.tokens, "training_flops": self.training_flops}


def parse(content: bytes, file: Path) -> Manifest:
    """The manifest in that JSON. Fields that this version does not know are passed over.

    Raises: DamagedFile where it is torn or a field is missing; ConfigError where its format is unknown.
    """
    try:
        written = json.loads(content)
        number = int(written["format"])
        if number == FORMAT:
            prints, costs = written["fingerprints"], written.get("costs")
            nested = {"fingerprints": _known(Fingerprints, prints), "costs": costs and _known(Costs, costs)}
            manifest: Manifest = _known(Manifest, written | nested)
            return manifest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFile(
            f"{file} cannot be read ({error}): give the run's train command again, which resumes from its last "
            "checkpoint, or delete the folder"
        ) from error
    raise ConfigError(f"{file} is of format {number}; this posbench reads format {FORMAT}: use the one that wrote it")


def _known(kind: Any, content: dict[str, Any]) -> Any:
    return kind(**{each.name: content[each.name] for each in fields(kind) if each.name in content})
