"""Define `Config`, which holds all settings of a run, and describe its keys and their types."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from posbench.config.fields import (
    DataConfig,
    EvaluationConfig,
    ExperimentConfig,
    Group,
    LaunchConfig,
    ModelConfig,
    SchemeConfig,
    TaskConfig,
    TokenizerConfig,
    TrackingConfig,
    TrainConfig,
)
from posbench.config.rules import (
    MISSING,
    ConfigError,
    between,
    branch_name,
    check_name,
    keys_of,
    nearest,
    require,
    ruled,
    user_path,
)


@dataclass
class Config(Group):
    """All settings that define a run. `posbench.compose` makes a `Config` from the overrides of the command line."""

    scheme: Any = MISSING  # SchemeConfig; a flat mapping is converted to one
    model: ModelConfig = MISSING
    data: Any = MISSING  # DataConfig, or TaskConfig if data.source is task
    tokenizer: TokenizerConfig = MISSING
    train: TrainConfig = MISSING
    evaluation: EvaluationConfig = MISSING
    tracking: TrackingConfig = MISSING
    experiment: ExperimentConfig = MISSING
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    experiment_name: str = ruled(check_name)  # folder under runs_dir; by default the name of the experiment
    runs_dir: str = ruled(user_path, "runs")
    seed: int = ruled(between(0, (1 << 63) - 1), 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.command: tuple[str, ...] = ()  # the overrides that composed it, as typed; no setting
        self.shared_lr = self.train.lr  # the rate of schemes without one of their own; no setting
        if not isinstance(self.scheme, SchemeConfig):
            self.scheme = SchemeConfig.from_mapping(self.scheme)
        if isinstance(self.data, dict):
            self.data = TaskConfig.from_mapping(self.data)
        self._resolve_learning_rate()
        if not self.is_task:
            self.check_vocabulary(self.tokenizer.num_entries)
        elif self.train.order_every:
            raise ConfigError(
                f"train.order_every={self.train.order_every} scores order in text, and data={self.data.name} is a "
                "task: leave it out"
            )

    def _resolve_learning_rate(self) -> None:
        # A rate of the scheme's own comes first, then its entry in train.lr_of, then train.lr.
        if self.scheme.lr is None:
            rates = self.train.lr_of or {}
            self.scheme = replace(self.scheme, lr=rates.get(self.scheme.name))
        if self.scheme.lr is not None:
            self.train = replace(self.train, lr=self.scheme.lr)

    def check_vocabulary(self, entries: int) -> None:
        """Raise ConfigError if `model.vocab_size` is less than the tokenizer's vocabulary size `entries`."""
        remedy = "raise it, leave it null, or train a smaller tokenizer (tokenizer=bpe tokenizer.vocab_size=...)"
        if self.train.from_run:
            remedy = (
                "that is the size of the model of train.from_run, so use its own tokenizer. If posbench added <|bos|> "
                'to it, write {"bos_token": "..."} with its own token into tokenizer_config.json beside tokenizer.json'
            )
        rows = self.model.vocab_size
        require(
            rows is None or rows >= entries, f"the tokenizer has {entries} tokens but model.vocab_size={rows}: {remedy}"
        )

    @property
    def is_task(self) -> bool:
        """Return whether the run learns a task instead of text."""
        return isinstance(self.data, TaskConfig)

    @property
    def trained_length(self) -> int:
        """Return the longest length that the run trains on: tokens for text, items for a task."""
        return int(self.data.trained_length(self.train.context_length))

    @property
    def trunk_name(self) -> str | None:
        """Return the experiment name of the longer run, the trunk, of which this run is a shorter version (a branch).

        Returns: None if the run is no branch, or if `branch_name` did not make its own name.
        """
        # A branch of `ladder_s` is called `ladder_s-2M`.
        trunk = self.experiment_name.rpartition("-")[0]
        tokens = self.train.tokens
        is_named = self.train.is_branch and tokens is not None and branch_name(trunk, tokens) == self.experiment_name
        return trunk if trunk and is_named else None

    def branch_words(self) -> list[list[str]]:
        """Return the overrides to append for each shorter run that branches off this one."""
        branches = []
        for tokens in self.train.branch_tokens:
            name = branch_name(self.experiment_name, tokens)
            words = [f"train.tokens={tokens}", f"train.trunk_tokens={self.train.tokens}", "train.branch_tokens=[]"]
            branches.append([*words, f"experiment_name='{name}'"])
        return branches

    def arm_words(self) -> list[list[str]]:
        """Return the overrides of each run (arm) that goes on from where the decay of this run's rate begins."""
        run = f"{self.runs_dir}/{self.experiment_name}/{self.scheme.name}/seed={self.seed}"
        shared = [
            f"train.from_run='{run}/checkpoints/step={self.train.decay_begins:08d}'",
            "train.keep_schedule=true",
            "train.arms=null",
            f"experiment_name='{self.experiment_name}-arms'",
        ]
        arms = self.train.arms or {}
        words = []
        # The overrides in `every` hold for all arms; an arm's own come after them.
        for arm, overrides in arms.get(self.scheme.name, {}).items():
            name = f"{self.scheme.name}_{arm}"
            own = [*arms.get("every", []), f"scheme.name={name}", *overrides]
            # An arm has another name, and its checkpoint brings no rate: it keeps its trunk's.
            has_rate = name in (self.train.lr_of or {}) or bool({"train.lr", "scheme.lr"} & keys_of(own))
            if self.scheme.lr is not None and not has_rate:
                own.append(f"scheme.lr={self.scheme.lr!r}")
            words.append([*shared, *own])
        return words

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Config:
        """Return a `Config` made from nested dicts, such as a run folder's `config.yaml`; `${...}` in it is plain text.

        Raises: ConfigError for an unknown key or a value out of its range, an error of OmegaConf for a wrong type.
        """
        # Imported here, so that `posbench --help` starts without OmegaConf.
        from omegaconf import OmegaConf
        from omegaconf.errors import ConfigKeyError

        schema = OmegaConf.structured(cls)
        # `data` has two classes: text by default, and any mapping for a task.
        if mapping.get("data", {}).get("source") != "task":
            schema.data = OmegaConf.structured(DataConfig)
        try:
            merged = OmegaConf.merge(schema, OmegaConf.create(_without_references(mapping)))
        except ConfigKeyError as error:
            raise ConfigError(no_setting(str(error.full_key))) from error
        config = OmegaConf.to_object(merged)
        assert isinstance(config, cls)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Return the configuration as nested dicts, as written to `config.yaml` of the run folder."""
        return asdict(self) | {"scheme": self.scheme.to_mapping(), "data": self.data.to_mapping()}


def _without_references(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_references(inner) for inner in value]
    if isinstance(value, str):
        # Backslashes before it are doubled, because OmegaConf would read them as escapes.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


# ---------------------------------------------------------------- keys and their types

_ALIASES = {"learning_rate": "lr", "hidden_size": "d_model", "n_embd": "d_model", "block_size": "context_length"}
_ALIASES |= {"n_layer": "num_layers", "n_head": "num_heads", "precision": "dtype", "max_steps": "steps"}
_TYPES = {
    list: "a list",
    int: "a whole number, such as 8",
    float: "a number, such as 0.001",
    bool: "true or false",
    str: "text",
}


@cache
def settings() -> dict[str, Any]:
    """Return {key: type} for all keys, such as `train` and `train.lr`. Paths have type `Path`."""
    groups = [("", Config), *get_type_hints(Config).items()]
    groups += [("scheme", SchemeConfig), ("data", TaskConfig), ("data", DataConfig)]
    types: dict[str, Any] = {}
    # Text and tasks share keys of `data`; the type of the later group holds.
    for group, cls in groups:
        if not is_dataclass(cls):
            continue
        hints = get_type_hints(cls)
        for member in fields(cls):
            is_path = member.metadata.get("rule") is user_path
            hint = Path if is_path else hints[member.name]
            types[f"{group}.{member.name}".lstrip(".")] = member.metadata.get("type", hint)
    return types


def is_text(key: str) -> bool:
    """Return whether values of `key` are text, paths or lists of texts, so that `1e3` is not 1000."""
    hint = settings().get(key)
    return hint is Path or (get_origin(hint) is not dict and str in (hint, *get_args(hint)))


def type_words(key: str) -> str:
    """Return a phrase for the values of the setting `key`, such as `true or false`, or ""."""
    hint = settings().get(key)
    kinds = (hint, get_origin(hint), *get_args(hint))
    matching = (words for kind, words in _TYPES.items() if kind in kinds)
    words = next(matching, "")
    if words and NoneType in kinds:
        words += ", or null"
    return words


def no_setting(key: str) -> str:
    """Return the error message for an unknown key, with the most similar known keys, if any."""
    group, _, name = key.rpartition(".")
    name = _ALIASES.get(name, name)
    # The right name in the wrong group is a better hint than a similar spelling, unless many groups have it.
    same = [known for known in settings() if known == f"{group}.{name}" or (not group and known.endswith(f".{name}"))]
    hint = nearest(key, settings())
    if 0 < len(same) < 3:
        hint = f"; did you mean {' or '.join(map(repr, same))}?"
    if group.partition(".")[0] == "experiment" and key.split(".")[1] in settings():
        hint = "; begin the experiment's file with '# @package _global_'"
    return f"there is no setting {key!r}{hint} (posbench train --cfg job shows them all)"
