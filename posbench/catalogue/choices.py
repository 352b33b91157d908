"""The YAML files that a word such as `scheme=vo_rope` names, and rows of `conf/scheme` read from them without Hydra."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from posbench.catalogue.own_files import name_files, names_file, row_of_file, tidy
from posbench.config import ConfigError, SchemeConfig, nearest

_MEANT = {"rope": "qk_rope", "rotary": "qk_rope", "none": "nope"}  # what people type
_LISTS_OF_ROWS = ("layers", "of")  # the options of a scheme that name rows of conf/scheme


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@cache
def conf_dirs() -> tuple[Path, ...]:
    """`conf_dir()`, and the `conf/` of each package that registers schemes. None of them is imported."""
    modules = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group="posbench.schemes")}
    specs = [find_spec(module) for module in sorted(modules - {"posbench"})]
    folders = [Path(place, "conf") for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return (conf_dir(), *(folder for folder in folders if (folder / "scheme").is_dir()))


def choices(group: str, *folders: Path) -> dict[str, Path]:
    """The names that `group=` accepts, in order, and their files: ours, of packages, of `folders`; the first counts."""
    places = [*conf_dirs(), *folders]
    return dict(sorted({file.stem: file for place in places[::-1] for file in (place / group).glob("*.yaml")}.items()))


def description(group: str, name: str, *folders: Path) -> str:
    """The comment in the first line of a choice: what it is, and its source; empty where there is none."""
    file = choices(group, *folders).get(name)
    line = file.read_text(encoding="utf-8").partition("\n")[0] if file else ""
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def no_choice(group: str, name: str, known: Iterable[str]) -> str:
    """The sentence that refuses a name, with the nearest one."""
    listed = "posbench schemes lists them" if group == "scheme" else f"there are {', '.join(known)}"
    own = f"{group}=my_{group}.py:Name for a class of yours, or " if group in ("scheme", "data") else ""
    hint = nearest(_MEANT.get(name, name), known)
    return f"{group}={name} does not exist{hint} ({listed}; {own}FOLDER/{group} with --config-dir FOLDER)"


def expand(row: Any, read: Callable[[str], dict[str, Any]]) -> Any:
    """A scheme's mapping with the rows themselves in place of their names in `layers` and `of`.

    So a run folder's `layers: [{name: qk_rope, kind: rotary, ...}, {name: nope, ...}]` needs no other file. Mappings in
    those lists stay, with theirs expanded. A kind that is a class in a file is looked up there, and names its row.

    Arguments: row, a mapping, or the name of one; read, what gives the mapping of a name.
    """
    if isinstance(row, str):
        row = read(row)
    if not isinstance(row, dict):
        return row
    if names_file(row.get("kind")):
        own = row_of_file(row["kind"])
        row = {"name": own["name"], **row, "kind": own["kind"]}
    return {
        option: [expand(value, read) for value in values]
        if option in _LISTS_OF_ROWS and isinstance(values, list)
        else values
        for option, values in row.items()
    }


def read_row(name: str, *folders: Path) -> SchemeConfig:
    """A row of `conf/scheme` or of `folders`, or of a file of one's own, without a whole configuration around it.

    Raises: ConfigError for an unknown name, and for what its file says wrongly.
    """
    files = choices("scheme", *folders)

    def read(name: str) -> dict[str, Any]:
        if names_file(name):
            row = tidy(row_of_file(name))
            name_files(row)
        elif name not in files:
            raise ConfigError(no_choice("scheme", name, files))
        else:
            try:
                row = yaml.safe_load(files[name].read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise ConfigError(" ".join(f"{error} (in {files[name]})".split())) from error
        return row

    return SchemeConfig.from_mapping(expand(name, read))
