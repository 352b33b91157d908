"""Load the model of a subject (a run that was scored here and not trained) through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.model.scored import ScoredModel
from posbench.runs import Run
from posbench.system.device import Device

if TYPE_CHECKING:
    from posbench.huggingface.loading import Source
    from posbench.model.rotations import Rotation


def source_of(run: Run) -> Source:
    """Return where the model of a subject is. Raises: ConfigError if it is gone or has changed since it was scored."""
    # transformers is optional, so it is imported when a subject is first read.
    from posbench.huggingface.loading import Source

    subject = run.manifest.subject
    assert subject is not None
    source = Source(Path(subject["path"]))
    if not source.path.exists():
        raise ConfigError(f"{source.path}, the model of {run.name}, is gone: put it back, or delete {run.path}")
    source.content  # noqa: B018  (raises the error if there is no config.json)
    if source.digest != run.weights_digest:
        raise ConfigError(f"the weights in {source.path} have changed since {run.name} was scored")
    return source


def load(source: Source, options: Sequence[str], length: int, device: Device) -> ScoredModel:
    """Return a model with changed options, for windows of `length` tokens.

    Raises: ConfigError for tensors that do not fit.
    """
    from posbench.huggingface.loading import load as load_model

    return load_model(source, options, length, device.dtype, device.torch)


def check_options(run: Run, options: Sequence[str]) -> None:
    """Raise ConfigError if a subject's model does not have these options."""
    rotations(run, options, run.config.train.context_length)


def rotations(run: Run, options: Sequence[str], length: int) -> list[Rotation]:
    """Return the rotations that a subject uses at `length` tokens, with changed options.

    The list is empty for a model without rotations, and for an export of posbench's own class.
    """
    from posbench.huggingface.loading import rotations_under

    return rotations_under(source_of(run), options, length)


def changes_nothing(run: Run, options: Sequence[str], length: int) -> bool:
    """Return whether options only rescale by length / training length, up to the training length."""
    names = {option.partition("=")[0].rpartition(".")[2] for option in options}  # without types of layers
    # A value in braces is a mapping, which may change more than the factor.
    if names != {"rescale"} or any("{" in option for option in options):
        return False
    if length > run.config.train.context_length:
        return False
    # Up to the training length the factor is 1, unless the model's own rotation is rescaled.
    changed, unchanged = rotations(run, options, length), rotations(run, (), length)
    keeps_rotations = all(new.factor == 1 and old.method == "none" for new, old in zip(changed, unchanged, strict=True))
    # Without rotations nothing is known of the options, such as for an export of posbench's own class.
    return keeps_rotations and bool(changed)


@dataclass(frozen=True)
class Facts:
    """Facts that a loaded model gives about itself."""

    class_name: str
    parameters: dict[str, int]  # in the embedding tables, and in the rest
    longest: int | None  # the longest input in tokens, for learned positions; None: no limit


def facts(model: Any) -> Facts:
    """Return facts about a loaded model."""
    from posbench.model.decoder import Decoder

    if isinstance(model, Decoder):
        module = model
        longest, name = model.scheme.longest, "PosbenchForCausalLM"
        tables = [model.embedding.weight, model.unembedding.weight]
    else:
        module = model.model
        longest, name = model.longest, type(module).__name__
        output_layer = module.get_output_embeddings()
        tables = [module.get_input_embeddings().weight]
        if output_layer is not None:  # None: the class has no output layer that it gives
            tables.append(output_layer.weight)
    total = sum(parameter.numel() for parameter in module.parameters())
    distinct = {id(table): table for table in tables}  # a tied table counts once
    embedding = sum(table.numel() for table in distinct.values())
    return Facts(name, {"embedding": embedding, "body": total - embedding}, longest)
