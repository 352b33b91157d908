"""Where choices such as `scheme=vo_rope` are found: the YAML files of `conf/` and of a folder of the user's.

`ChoiceFolder` is Hydra's view of the user's folder, a plug-in of its own kind (`ConfigSource`). It checks the names in
the `defaults` list of each file before Hydra follows them. The files of `conf/` are trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from posbench.config import ConfigError

GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "launch", "experiment")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_Names = list[str]


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices(group: str, *folders: Path) -> list[str]:
    """The names that `group=` accepts: those of `conf/` and of folders of the user's."""
    return sorted({path.stem for folder in (conf_dir(), *folders) for path in (folder / group).glob("*.yaml")})


def description(group: str, name: str) -> str:
    """The comment in the first line of a choice of ours: what it is, and its source; empty where there is none."""
    return comment_of(conf_dir() / group / f"{name}.yaml") if name in choices(group) else ""


def comment_of(file: Path) -> str:
    """The comment in the first line of a YAML file."""
    line = file.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def is_group(key: str, folder: Path | None = None) -> bool:
    """Whether the values of `key` are names of choices, as `scheme` and `hydra/launcher` have them."""
    places = [conf_dir(), *([folder] if folder is not None else [])]
    return "/" in key or key == "schema" or (bool(key) and any((place / key).is_dir() for place in places))


def check_choice(group: str, name: str) -> None:
    """Hold the name of a choice to one that leads to no file outside the folders of choices. Raises: ConfigError."""
    if not all(map(_NAME.fullmatch, f"{group}/{name}".removeprefix("/").split("/"))):
        group = group.strip("/")
        raise ConfigError(
            f"{group}={name} cannot be the name of a choice: take one of conf/{group} or of --config-dir, of "
            "letters, digits and _ . -"
        )


class ChoiceFolder(ConfigSource):
    """The user's folder of choices, `posbench:///home/ada/conf` in Hydra's search path."""

    @staticmethod
    def scheme() -> str:
        """What its addresses begin with."""
        return "posbench"

    def load_config(self, config_path: str) -> ConfigResult:
        """A YAML file, whose `defaults` list was checked. Raises: ConfigError; what YAML and OmegaConf raise."""
        file = self._file(config_path)
        config: Any = OmegaConf.load(file)
        if isinstance(config, DictConfig):
            check_defaults(OmegaConf.to_container(config, resolve=False), file)
        header = self._get_header_dict(file.read_text(encoding="utf-8")[:512])
        return ConfigResult(self.provider, self.full_path(), config, header)

    def is_group(self, config_path: str) -> bool:
        """Whether it has such a folder."""
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether it has such a YAML file."""
        return self._file(config_path).is_file()

    def available(self) -> bool:
        """Whether the folder exists."""
        return Path(self.path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> _Names:
        """The names of a group."""
        names: _Names = []
        for path in sorted((Path(self.path) / config_path).iterdir()):
            self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


def check_defaults(content: Any, file: Path) -> None:
    """Check the names of choices in the `defaults` list of a YAML file's content. Raises: ConfigError."""
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults={defaults!r} is not a list: write it as - group: choice")
    for item in defaults:
        for group, name in _chosen(item):
            check_choice(group, name)


def _chosen(item: Any) -> Iterator[tuple[str, str]]:
    """The group and the name of an entry: `override /scheme@package: nope`, `{scheme: [a, b]}`, `/scheme/nope`."""
    if isinstance(item, str):
        group, _, name = item.partition("@")[0].rpartition("/")
        yield group, name
    elif isinstance(item, dict):
        for key, value in item.items():
            group = str(key).split(" ")[-1].partition("@")[0]
            for name in value if isinstance(value, list) else [value]:
                if name is not None:
                    yield group, str(name)
