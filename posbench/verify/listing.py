"""`posbench schemes`: what a YAML file may name, with what each scheme promises."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.attention import KINDS
from posbench.composition import choices, description, read_row
from posbench.config import ConfigError
from posbench.schemes import SCHEMES, Shape, build_scheme, scheme_class

_GROUPS = ("no position", "rotations", "biases on the scores", "added once", "layers", "kinds of attention")


def list_schemes(console: Console, config_dir: Path | None = None, names: Sequence[str] = ()) -> None:
    """Print the schemes named, by default all of `conf/scheme` and of a user's folder, and the kinds there are."""
    folders = [config_dir] if config_dir else []
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in names or choices("scheme", *folders):
        group, kind, promise, comment = _row(name, folders)
        groups.setdefault(group, []).append((name, *([kind] if names else []), promise, comment))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, expand=True)
    for column in ("scheme", *(["kind"] if names else []), "promises"):
        table.add_column(column, no_wrap=True)
    # A line a scheme; all that there is to say where they are named.
    table.add_column("what it is", ratio=1, no_wrap=not names, overflow="fold" if names else "ellipsis")
    for group in sorted(groups, key=_place):
        table.add_row(Text(group, style="bold"))
        for cells in groups[group]:
            table.add_row(*map(Text, cells))
        table.add_section()
    console.print(table)
    console.print(f"kinds: {', '.join(SCHEMES)}")
    console.print(f"kinds of attention: {', '.join(KINDS)}")


def _place(group: str) -> int:
    return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)


def _row(name: str, folders: Sequence[Path]) -> tuple[str, str, str, str]:
    """Group, kind, promise and description of a scheme; the other rows are worth having where its file is wrong."""
    kind = ""
    try:
        config = read_row(name, *folders)
        kind = config.kind.rpartition("/")[2]  # of a file its name
        scheme = build_scheme(config, Shape(d_model=128, num_heads=2, num_kv_heads=2, head_dim=64))
    except ConfigError as error:
        return "not usable", kind, "", str(error)
    group = "kinds of attention" if config.attention else scheme.group
    what = description("scheme", name, *folders) or (inspect.getdoc(scheme_class(config.kind)) or "").partition("\n")[0]
    return group, kind, "relative" if scheme.is_relative else "absolute", what
