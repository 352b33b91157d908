"""Where choices such as `scheme=vo_rope` are found: the YAML files of `conf/` and of a folder of the user's.

`ChoiceFolder` is Hydra's view of the user's folder, a plug-in of its own kind (`ConfigSource`). It checks the names in
the `defaults` list of each file before Hydra follows them. The files of `conf/` are trusted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from posbench.config import ConfigError

GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "launch", "experiment")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_FILES = 200  # that one chooses, by lists of defaults
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
    if name not in choices(group):
        return ""
    return comment_of((conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8"))


def comment_of(text: str) -> str:
    """The comment in the first line of a YAML file."""
    line = text.partition("\n")[0]
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
            f"{group}={name} cannot be the name of a choice: give a name from conf/{group} or --config-dir, with "
            "only letters, digits and _ . -"
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
        config, text = load_choice(file)
        if isinstance(config, DictConfig):
            check_defaults(OmegaConf.to_container(config, resolve=False), file)
            self._count(file, {}, ())
        header = self._get_header_dict(text[:512])
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

    def _count(self, file: Path, counts: dict[Path, int], within: tuple[Path, ...]) -> int:
        """How many files Hydra would read for this one, by the lists of defaults here. Raises: ConfigError."""
        if file in within:
            raise ConfigError(
                f"{file} chooses itself: {' -> '.join(place.stem for place in (*within, file))}; break that circle"
            )
        if file not in counts:
            config, _ = load_choice(file)
            content: Any = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else {}
            counts[file] = 1
            for group, name in (pair for item in content.get("defaults", []) for pair in _chosen(item)):
                base = Path(self.path) if group.startswith("/") else file.parent
                chosen = base / group.strip("/") / f"{name.removesuffix('.yaml')}.yaml"
                if chosen.is_file():
                    counts[file] += self._count(chosen, counts, (*within, file))
        if counts[file] > _MOST_FILES:
            raise ConfigError(f"{file} chooses more than {_MOST_FILES} files through lists of defaults: choose fewer")
        return counts[file]

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


def load_choice(file: Path) -> tuple[Any, str]:
    """What a YAML file of choices says, and its text. Raises: ConfigError where it is not such a file."""
    try:
        content = file.read_bytes()
        yaml.safe_load(content)
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is not a choice: {error}") from error
    return OmegaConf.load(io.StringIO(text)), text


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
        group, slash, name = item.partition("@")[0].rpartition("/")
        yield group or slash, name
    elif isinstance(item, dict):
        for key, value in item.items():
            group = str(key).split(" ")[-1].partition("@")[0]
            for name in value if isinstance(value, list) else [value]:
                if name is not None:
                    yield group, str(name)
