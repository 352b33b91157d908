"""What the words of a command may say: overrides are values, and the name of a choice leads to no file elsewhere.

Everything here raises ConfigError.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override

from posbench.composition.choices import GROUPS, check_choice, choices, is_group
from posbench.composition.inert import refuse_code
from posbench.config import ConfigError

_FOLDER = "--config-dir="
_OF_HYDRA = ("hydra/launcher", "hydra.launcher.", "hydra.sweeper.params.", "hydra.sweeper.max_batch_size")
_FOLDERS = "runs_dir and experiment_name set the run folder; Hydra writes no other folder"
_LOGGING = "posbench prints its own messages, and a logging configuration can name code"
# Settings of Hydra that are refused -> why, and what to do instead.
_WHY_NOT = {
    "hydra.run": _FOLDERS,
    "hydra.sweep.": _FOLDERS,
    "hydra.output_subdir": _FOLDERS,
    "hydra.job.chdir": _FOLDERS,
    "hydra.job.env": "set a variable in the shell instead, before the command",
    "hydra.job.name": "experiment_name names a run",
    "hydra/job_logging": _LOGGING,
    "hydra.job_logging": _LOGGING,
    "hydra/hydra_logging": _LOGGING,
    "hydra.hydra_logging": _LOGGING,
    "hydra.verbose": _LOGGING,
    "hydra.callbacks": "a callback names code",
    "hydra/callbacks": "a callback names code",
    "hydra.searchpath": "choices of your own are added with --config-dir FOLDER",
    "hydra/sweeper": "posbench's own sweeper checks all runs before the first; sweep over values with key=a,b",
    "hydra.sweeper": "posbench's own sweeper checks all runs before the first; sweep over values with key=a,b",
}
_NOT_TAKEN = {
    "config_path": "the root is conf/config.yaml; choices of your own, such as FOLDER/scheme/mine.yaml, are added with "
    "--config-dir FOLDER",
    "config_name": "the root is conf/config.yaml; choices of your own, such as FOLDER/scheme/mine.yaml, are added with "
    "--config-dir FOLDER",
    "experimental_rerun": "it would unpickle a file, which can run code; give the words of the run again",
}


@dataclass(frozen=True)
class Words:
    """The overrides of a command, and the folder of the user's own choices."""

    overrides: tuple[str, ...] = ()
    folder: Path | None = None

    def __post_init__(self) -> None:
        refuse_words(self.overrides)
        if self.folder is not None:
            refuse_folder(self.folder)

    def only(self, overrides: Iterable[str]) -> Words:
        """Other overrides beside the same folder."""
        return replace(self, overrides=tuple(overrides))

    @property
    def name_an_experiment(self) -> bool:
        """Whether an experiment is chosen here, and not left at the default."""
        return any(word.lstrip("+").startswith("experiment=") for word in self.overrides)

    def given(self) -> list[tuple[str, Any]]:
        """Each override as a key and its value. Raises: as `parsed`."""
        return [(override.key_or_group, override.value()) for override in self.parsed()]

    def parsed(self) -> list[Override]:
        """What Hydra reads in the overrides. Raises: Hydra's OverrideParseException; ConfigError as `check_choices`."""
        return parse(self.overrides, self.folder)


def read(words: Sequence[str]) -> Words:
    """The words of `posbench.compose`: overrides, and `--config-dir=FOLDER`."""
    folders = [Path(word.removeprefix(_FOLDER)) for word in words if word.startswith(_FOLDER)]
    overrides = tuple(word for word in words if not word.startswith(_FOLDER))
    return Words(overrides, folders[-1] if folders else None)


def read_command(program: str, words: Sequence[str]) -> tuple[Words, Namespace]:
    """The words of `posbench train`: overrides with Hydra's flags before, between and after them.

    Returns: the words, and the flags by name (`multirun`, `cfg`, ...).
    An unknown flag exits with status 2 and the usage.
    """
    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not word.startswith("-")]
    _refuse_options(words)
    flags = _parser(program).parse_args([word for word in words if word not in overrides])
    for name, why in _NOT_TAKEN.items():
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)} cannot be used: {why}")
    folder = Path(flags.config_dir) if flags.config_dir is not None else None
    return Words((*flags.words, *overrides), folder), flags


def _parser(program: str) -> ArgumentParser:
    """Hydra's own flags, those that posbench takes; Hydra's parser is not public."""
    parser = ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="OVERRIDES", help="overrides: key=value")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true", help="a sweep: a run for each combination of values")
    mode.add_argument("--run", "-r", action="store_true", help="one run")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="show the configuration; run nothing")
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    mode.add_argument("--info", "-i", nargs="?", const="all", choices=topics, help="show how it was composed")
    mode.add_argument("--hydra-help", action="store_true", help="Hydra's own help")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: references replaced by their values")
    parser.add_argument("--package", "-p", help="with --cfg: one part, such as train")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="a folder of your own choices")
    for name, short in (("config-path", "-cp"), ("config-name", "-cn"), ("experimental-rerun", "-er")):
        parser.add_argument(f"--{name}", short, help=SUPPRESS)  # refused, with the reason
    return parser


def refuse_words(words: Sequence[str]) -> None:
    """Hold overrides to values: no code, no lookups; of Hydra's own settings only the launcher and the sweep."""
    _refuse_options(words)
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        refuse_code(word, word)
        if re.match(r"hydra\b", key) and not key.startswith(_OF_HYDRA) and key != "hydra.mode":
            why = next((why for prefix, why in _WHY_NOT.items() if key.startswith(prefix)), "posbench relies on it")
            raise ConfigError(
                f"{word!r} cannot be changed in posbench ({why}); settings of Hydra that can be changed: "
                f"{', '.join(_OF_HYDRA)}"
            )
        if word.startswith("experiment=") and "," in word:
            raise ConfigError(
                f"{word!r}: each experiment has its own sweep, so run one after another: "
                "posbench train -m experiment=NAME"
            )
        if key in GROUPS and (value == "null" or value.startswith("[")):
            raise ConfigError(f"{word!r}: {key} needs the name of one choice: {', '.join(choices(key))}")


def _refuse_options(words: Sequence[str]) -> None:
    """Refuse `--model tiny`, which is written `model=tiny`."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        key, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (key.partition(".")[0] in GROUPS or key in ("seed", "runs_dir")):
            value = value or (following if not following.startswith("-") else "")
            raise ConfigError(f"{word!r} is not an option; did you mean {key}={value or '...'}?")


def refuse_folder(folder: Path) -> None:
    """Hold `--config-dir` to a folder that adds choices."""
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir {folder} is not a folder: give one that contains choices, such as FOLDER/scheme/mine.yaml"
        )
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder / 'config.yaml'} would replace posbench's own root; --config-dir only adds choices, such as "
            "FOLDER/scheme/mine.yaml or FOLDER/experiment/mine.yaml: rename that file"
        )


def parse(words: Sequence[str], folder: Path | None = None) -> list[Override]:
    """What Hydra reads in overrides, with the names of choices checked, those of a sweep too.

    Raises: Hydra's OverrideParseException; ConfigError for a name that could lead out of the folders of choices.
    """
    overrides: list[Override] = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        if is_group(override.key_or_group, folder):
            value = override.value()
            values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
            for name in values:
                name = getattr(name, "text", name)  # of a quoted one
                if isinstance(name, str):
                    check_choice(override.key_or_group, name)
    return overrides
