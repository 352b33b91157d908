"""What a configuration may not say: it is data, and names no code, asks no environment and holds no credential.

Hydra can build whatever `_target_` names (callbacks, logging, launchers), and OmegaConf can look values up
(`${oc.env:HOME}`). posbench needs neither, so both are refused before Hydra acts on them: in the words of the command
line, in every configuration composed of YAML files, each job of a sweep among them, and in a run folder's config.yaml.
Nor does the name of a choice (`scheme=../../mine`) lead to a file elsewhere.
Everything here raises ConfigError.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

from posbench.composition.credentials import scrub
from posbench.config import ConfigError

_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")  # ${experiment.name}: another value of the same configuration
_CHOICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_JOBS = 10_000  # of a sweep, whose words Hydra holds in memory, all of them
_LAUNCHING = ("hydra/launcher", "hydra.launcher.", "hydra.sweeper.params.", "hydra.sweeper.max_batch_size")
_PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")  # that are installed
_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# Hydra's own settings that decide what runs and what is written where, as conf/config.yaml has them.
_SETTLED: dict[str, Any] = {
    "callbacks": {},
    "job_logging": _LOGGING,
    "hydra_logging": _LOGGING,
    "job.env_set": {},
    "job.chdir": False,
    "run.dir": ".",
    "output_subdir": None,
    "sweep": {"dir": "${runs_dir}/.hydra", "subdir": "."},
}


def refuse_words(words: Sequence[str]) -> None:
    """Hold overrides to values: no code, no lookups, and of Hydra's own settings the launcher and the sweep alone."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        _refuse_code(word, word)
        if re.match(r"hydra\b", key) and not key.startswith(_LAUNCHING) and key != "hydra.mode":
            raise ConfigError(
                f"{word!r} is a setting of Hydra that posbench keeps as it is (the run folder is named by the run, "
                f"see runs_dir and experiment_name): of Hydra's own there are {', '.join(_LAUNCHING)}"
            )
        if word.startswith("experiment=") and "," in word:
            raise ConfigError(
                f"{word!r}: each experiment names a sweep of its own, so give them one after another: "
                "posbench train -m experiment=NAME"
            )


def refuse_flags(given: Namespace) -> None:
    """Of Hydra's flags, those that would unpickle a file or put another root in place of conf/config.yaml."""
    for flag in ("experimental_rerun", "config_path", "config_name"):
        if getattr(given, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(given, flag)} is not taken: choices of your own, such as "
                "FOLDER/scheme/mine.yaml, are added with --config-dir FOLDER"
            )
    if given.config_dir is not None:
        refuse_folder(Path(given.config_dir))


def refuse_folder(folder: Path) -> None:
    """Hold `--config-dir` to a folder that adds choices."""
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir {folder} is no folder: give one that holds choices, such as FOLDER/scheme/mine.yaml"
        )
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder / 'config.yaml'} would take the place of posbench's own root, and --config-dir adds "
            "choices, such as FOLDER/scheme/mine.yaml or FOLDER/experiment/mine.yaml: rename it"
        )


class InertRepository(ConfigRepository):
    """Hydra's YAML files; the name of a choice does not lead out of the folders they are in."""

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        if config_path and not all(map(_CHOICE.fullmatch, config_path.split("/"))):
            group, _, name = config_path.partition("/")
            raise ConfigError(
                f"{group}={name} cannot be the name of a choice: take one of conf/{group} or of --config-dir, of "
                "letters, digits and _ . -"
            )
        return super()._find_object_source(config_path, object_type)


class InertLoader(ConfigLoaderImpl):
    """Hydra's loader; what it composes is checked before Hydra acts on it."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = InertRepository(config_search_path)

    sweep_folder: Path | None = None  # of the sweep that was composed, where it was one
    _made_folders: Sequence[Path] | None = None  # by a sweep: those that were not there when it was composed

    def remove_sweep_folder(self) -> None:
        """Take away what Hydra writes for a sweep before its first job; folders that were there before stay."""
        for folder in self._made_folders or ():
            with suppress(OSError):
                (folder / "multirun.yaml").unlink(missing_ok=folder.name != ".hydra")
                folder.rmdir()

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        composed = super().load_configuration(*arguments, **options)
        if "config" not in (*arguments, *options.values()):
            return composed  # of --hydra-help, which prints Hydra's own settings
        plain: Any = OmegaConf.to_container(composed, resolve=False)
        hydra = plain.pop("hydra")
        for name, settled in _SETTLED.items():
            value = reduce(getitem, name.split("."), hydra)
            if value != settled:
                raise ConfigError(
                    f"hydra.{name}={value!r}, which a YAML file sets, could run code or write elsewhere: take it out "
                    "(an experiment may set hydra.sweeper.params and hydra.launcher)"
                )
        for plugin in (hydra["launcher"], hydra["sweeper"]):
            if not str(target := plugin.pop("_target_")).startswith(_PLUGINS):
                _refuse_code("_target_", f"_target_={target}")
            for key, value in _leaves(plugin):
                _refuse_code(key, f"{key}={value!r}")
        swept = [f"{key}={value}" for key, value in (hydra["sweeper"].get("params") or {}).items()]
        refuse_words(swept)
        refuse_many([*swept, *hydra["overrides"]["task"]])
        check_inert(plain)
        if self._made_folders is None:
            folder = self.sweep_folder = Path(str(composed.hydra.sweep.dir))
            self._made_folders = [place for place in (folder, folder.parent) if not place.exists()]
        return composed


def refuse_many(words: Sequence[str]) -> None:
    """Hold what a sweep over these words would make to 10,000 jobs, counted before any of them is; the last word of a
    key decides."""
    last = {word.partition("=")[0]: word for word in words}.values()
    parsed = OverridesParser.create().parse_overrides([word for word in last if "(" in word or "," in word])
    sizes = {override.get_key_element(): _count(override.value()) for override in parsed}
    if (jobs := math.prod(sizes.values())) > _MOST_JOBS:
        raise ConfigError(
            f"a sweep of {jobs:,.0f} jobs ({', '.join(f'{count:,.0f} of {key}' for key, count in sizes.items())}) is "
            f"more than {_MOST_JOBS:,}: sweep over fewer values, or in parts"
        )


def _count(value: Any) -> float:
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if isinstance(value, RangeSweep) and value.start is not None and value.stop is not None and value.step:
        return max(0.0, math.ceil(min((float(value.stop) - float(value.start)) / float(value.step), 1e300)))
    return 1


def check_inert(mapping: Any, resolved: bool = False) -> None:
    """Hold a configuration to plain data. `resolved`: no `${...}` is left to be, else those of other fields may stand.

    A credential is refused where `credentials.scrub` knows one, without showing it.
    """
    for key, value in _leaves(mapping):
        if isinstance(value, int) and abs(value) >= 1 << 64:
            raise ConfigError(f"{key} is out of range: no setting takes a number of more than 64 bits")
        _refuse_code(key, f"{key}={value!r}")
        if not isinstance(value, str):
            continue
        if "${" in (value if resolved else _REFERENCE.sub("", value)):
            raise ConfigError(
                f"{key}={value!r} would look a value up when it is read: write the value itself "
                "(${experiment.name}, another field, is all that may stand in braces)"
            )
        if scrub(value) != value:
            raise ConfigError(
                f"{key} holds what looks like a key or a password, and configurations are written to files and to the "
                "tracker: take it out (hf auth login and wandb login keep theirs elsewhere)"
            )


def _refuse_code(text: str, shown: str) -> None:
    if "_target_" in text:
        raise ConfigError(
            f"{shown} names code to run (_target_), and configuration is data: remove it. A scheme of your own is a "
            "class in a package that is installed, see docs/adding-a-scheme.md"
        )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
        if not value:
            yield key, None
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
