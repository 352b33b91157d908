"""Say what a model does with position (`posbench positions`): read its settings, and check each statement."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.catalogue.choices import choices, nearest
from posbench.catalogue.own_files import is_class_path
from posbench.composition.compose import compose
from posbench.config import Config, ConfigError
from posbench.model.architecture import build_architecture
from posbench.model.decoder import build_model
from posbench.model.positions import ModelPositions, positions_of, row_of
from posbench.runs.finding import run_named
from posbench.system.console import json_text
from posbench.verify.random_model import certificate_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_VOCAB = 257
_ROWS = {  # kind of scheme -> a scheme of conf/scheme with this kind
    "rotary": "qk_rope",
    "partial_rotary": "rotary_pct_25",
    "p_rope": "p_rope_25",
    "interleaved": "rope_nope_interleaved",
}


@dataclass(frozen=True)
class Answer:
    """The positions that a model uses, and the statements about them that a tiny model contradicts."""

    name: str
    length: int  # tokens of the inputs that the table is for
    positions: ModelPositions
    contradictions: list[str]  # statements that a tiny model contradicts
    training: str  # the command that trains these positions, or why there is none
    notes: Sequence[str] = field(default_factory=list)

    def as_json(self) -> str:
        """Return the answer for scripts."""
        facts = {"model": self.name, "length": self.length, **self.positions.as_data()}
        return json_text(facts | {"contradictions": self.contradictions, "train": self.training, "notes": self.notes})


def positions(what: str, length: int | None, runs_dir: Path) -> Answer:
    """Return what a model does with position: of a config.json, a folder, a run, a scheme or a family of transformers.

    Arguments: length, of the inputs in tokens; None means the training length.
    Raises: ConfigError if `what` is none of these, or transformers cannot read it.
    """
    path = Path(what)
    is_scheme = what in choices("scheme") or is_class_path(what)
    if is_scheme:
        # At least one layer for each scheme in a list of alternating ones.
        rows = compose([f"scheme={what}"]).scheme.options.get("layers") or [0, 0]
        config = compose([f"scheme={what}", f"model.num_layers={len(rows)}"])
        return _of_run(what, config, length, f"posbench train scheme={what}")
    if (path / "config.json").is_file() or path.name.endswith(".json"):
        return _of_file(path, length)
    import_module("posbench.huggingface")  # if transformers is missing, its error says how to install it
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if what in CONFIG_MAPPING_NAMES:
        return of_family(what, {}, length)
    try:
        run = run_named(what, runs_dir)
    except ConfigError as error:
        hint = nearest(what, [*choices("scheme"), *CONFIG_MAPPING_NAMES])
        raise ConfigError(
            f"there is no config.json, folder, run, scheme or family of transformers {what!r}{hint}"
        ) from error
    words = run.manifest.command or (f"scheme={run.config.scheme.name}",)
    training = shlex.join(["posbench", "train", *words])
    return _of_run(run.name, run.config, length, training)


def _of_run(name: str, config: Config, length: int | None, training: str) -> Answer:
    from posbench.huggingface.behaviour import contradictions
    from posbench.huggingface.modeling import PosbenchConfig, PosbenchForCausalLM

    length = length or config.train.context_length
    table = positions_of(build_model(config, _VOCAB, build_architecture(config)), length)
    # The widths of the small model of `posbench verify` are enough to see what a layer does.
    small = replace(certificate_config("nope").model, num_layers=config.model.num_layers)
    model: Any = PosbenchForCausalLM(PosbenchConfig.for_run(replace(config, model=small), _VOCAB)).double().eval()
    found = contradictions(model, positions_of(model.decoder, length))
    return Answer(name, length, table, found, training)


def _of_file(path: Path, length: int | None) -> Answer:
    from posbench.huggingface.files import read_json
    from posbench.huggingface.loading import Source

    if path.name != "config.json" and path.suffix == ".json":
        return of_family(str(read_json(path).get("model_type")), read_json(path), length, name=path.name)
    source = Source(path.parent if path.name == "config.json" else path)
    return _of_config(source.name, source.config, source.content, length, source.check_config())


def of_family(family: str, settings: Mapping[str, Any], length: int | None, name: str = "") -> Answer:
    """Return what a family of transformers does with position, with these settings instead of its defaults.

    Raises: ConfigError if transformers lacks the family.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(family, **{key: value for key, value in settings.items() if key != "model_type"})
    except Exception as error:
        raise ConfigError(f"transformers cannot read model_type={family}: {' '.join(str(error).split())}") from error
    note = "the numbers are the class's defaults, which no published model need have"
    return _of_config(name or family, config, settings, length, [] if settings else [note])


def _of_config(
    name: str, config: PreTrainedConfig, content: Mapping[str, Any], length: int | None, notes: Sequence[str]
) -> Answer:
    from posbench.huggingface.behaviour import T, contradictions, moved_layers, tiny_model, wrong_rotations
    from posbench.huggingface.loading import silenced
    from posbench.huggingface.positions import read_positions, skeleton, trained_length

    try:
        trained = trained_length(config, content)
        length = length or trained or T
        with silenced():
            table = read_positions(skeleton(config), config, length, trained=trained)
            model = tiny_model(config)
            found = contradictions(model, read_positions(model, model.config, T))
            found += wrong_rotations(model, model.config) + moved_layers(model)
    # A class may fail in any way on settings that it does not expect.
    except Exception as error:
        raise ConfigError(f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from error
    try:
        training = command_of(row_of(table))
    except ConfigError as error:
        training = f"posbench has no scheme for {error}"
    return Answer(name, length, table, found, training, notes)


def command_of(row: Mapping[str, Any]) -> str:
    """Return the command that trains a scheme."""
    base = _ROWS.get(row["kind"], row["kind"])
    words = ["posbench", "train", f"scheme={base}"]
    for key, value in row.items():
        if key not in ("name", "kind", "sites"):
            words.append(f"scheme.{key}={_hydra(value)}")
    return shlex.join(words)


def _hydra(value: Any) -> str:
    """Return a value as Hydra's command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
