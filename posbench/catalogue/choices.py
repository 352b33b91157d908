"""Find the YAML files that words such as `scheme=vo_rope` name, and read entries of `conf/scheme` without Hydra."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from posbench.catalogue.own_files import as_recorded, is_class_path, row_of_file, trust_files
from posbench.config import ConfigError, SchemeConfig, nearest

_ALIASES = {"rope": "qk_rope", "rotary": "qk_rope", "none": "nope"}  # what people type -> our name
_LISTS_OF_ROWS = ("layers", "of")  # options of a scheme that list other entries of conf/scheme


def conf_dir() -> Path:
    """Return the folder of YAML files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@cache
def conf_dirs() -> tuple[Path, ...]:
    """Return the folders of YAML files: posbench's, and the `conf/` of each package that registers schemes."""
    # An entry point is `package.module:Class`.
    modules = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group="posbench.schemes")}
    folders = [conf_dir()]
    # posbench's own folder is in the list already.
    for module in sorted(modules - {"posbench"}):
        # The packages are found, not imported.
        spec = find_spec(module)
        places = (spec and spec.submodule_search_locations) or ()
        folders += [Path(place, "conf") for place in places if Path(place, "conf", "scheme").is_dir()]
    return tuple(folders)


def choices(group: str, *folders: Path) -> dict[str, Path]:
    """Return {name: YAML file} for the names that `group=` (such as `scheme=`) accepts, sorted."""
    files: dict[str, Path] = {}
    for place in [*conf_dirs(), *folders]:
        for file in (place / group).glob("*.yaml"):
            # The first file of a name counts: posbench's, then a package's, then one in `folders`.
            files.setdefault(file.stem, file)
    return dict(sorted(files.items()))


def description(group: str, name: str, *folders: Path) -> str:
    """Return the comment in the first line of the YAML file of `group=name`, or ""."""
    file = choices(group, *folders).get(name)
    if file is None:
        return ""
    line = file.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def no_choice(group: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown `group=name`, with the most similar of the `known` names."""
    # An alias points to the scheme that people mean by it.
    hint = nearest(_ALIASES.get(name, name), known)
    folder = f"a YAML file in FOLDER/{group} with --config-dir FOLDER"
    if group == "scheme":
        cause = f"there is no scheme {name!r}" if name else "no scheme is named"
        return (
            f"{cause}{hint} (posbench schemes lists them; for your own, give a class, my_scheme.py:Name, or {folder})"
        )
    class_path = "a class, data=my_data.py:Name, or " if group == "data" else ""
    return f"{group}={name} does not exist{hint} (choices: {', '.join(known)}; your own: {class_path}{folder})"


def expand(row: Any, read: Callable[[str], dict[str, Any]]) -> Any:
    """Return a scheme's mapping with the names in `layers` and `of` replaced by those schemes' mappings.

    Arguments: row, a mapping or name; read, a function from names to mappings.
    """
    # Lists in a YAML file hold names or mappings.
    if isinstance(row, str):
        row = read(row)
    if not isinstance(row, dict):
        return row
    # A class in a file also names a scheme; its path is as runs record it.
    if is_class_path(row.get("kind")):
        entry = row_of_file(row["kind"])
        row = {"name": entry["name"], **row, "kind": as_recorded(entry["kind"])}
    expanded = dict(row)
    # Written out, so that a run folder needs no other file.
    for option in _LISTS_OF_ROWS:
        if isinstance(members := row.get(option), list):
            expanded[option] = [expand(member, read) for member in members]
    return expanded


def settings_in(file: Path) -> dict[str, Any]:
    """Return the settings in a YAML file, {} if it is empty. Raises: ConfigError if they are no mapping."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(" ".join(f"{error} (in {file})".split())) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must have settings, in lines such as key: value")
    return settings


def read_row(name: str, *folders: Path) -> SchemeConfig:
    """Return the configuration of scheme `name`: a file in `conf/scheme` or `folders`, or a class in a Python file.

    Raises: ConfigError for an unknown name or an invalid file.
    """
    files = choices("scheme", *folders)

    def read(name: str) -> dict[str, Any]:
        if is_class_path(name):
            row = row_of_file(name)
            # The user typed this name, so its file may be imported.
            trust_files(row)
        elif name not in files:
            raise ConfigError(no_choice("scheme", name, files))
        else:
            row = settings_in(files[name])
        return row

    return SchemeConfig.from_mapping(expand(name, read))
