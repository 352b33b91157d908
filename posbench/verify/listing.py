"""`posbench schemes`: what a YAML file may name, with what each scheme promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posbench.attention import KINDS
from posbench.composition import choices, conf_dir
from posbench.composition.choices import comment_of, load_choice
from posbench.composition.rows import expand
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes import SCHEMES, Shape, build_scheme

_GROUPS = ("no position", "rotations", "biases on the scores", "added once", "layers", "kinds of attention")

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def list_schemes(console: Console, config_dir: Path | None = None) -> None:
    """Print every scheme of `conf/scheme`, and of a folder of the user's, and the kinds that a YAML file may name."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    theirs = sorted((config_dir / "scheme").glob("*.yaml")) if config_dir else []
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for file in [*(conf_dir() / "scheme" / f"{name}.yaml" for name in choices("scheme")), *theirs]:
        group, kind, promise, comment = _row(file, config_dir)
        groups.setdefault(group, []).append((file.stem, kind, promise, comment))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("scheme", "kind", "promises"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is")
    for group in sorted(groups, key=_place):
        table.add_section()
        table.add_row(Text(group, style="bold"))
        for name, kind, promise, comment in groups[group]:
            table.add_row(name, kind, promise, Text(comment))
    console.print(table)
    console.print(f"kinds: {', '.join(SCHEMES)}", markup=False, highlight=False)
    console.print(f"kinds of attention: {', '.join(KINDS)}", markup=False, highlight=False)


def _place(group: str) -> int:
    return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)


def _row(file: Path, config_dir: Path | None) -> tuple[str, str, str, str]:
    """Group, kind, promise and description of a scheme's file; the other rows are worth having where it is wrong."""
    from omegaconf import OmegaConf

    kind = ""
    comment = ""
    try:
        content, text = load_choice(file)
        comment = comment_of(text)
        config = SchemeConfig.from_mapping(expand(OmegaConf.to_container(content), config_dir))
        kind = config.kind.rpartition("/")[2]  # of a file its name
        scheme = build_scheme(config, Shape(d_model=128, num_heads=2, num_kv_heads=2, head_dim=64))
    except ConfigError as error:
        return "not usable", kind, "", str(error)
    group = "kinds of attention" if config.attention else scheme.group
    return group, kind, "relative" if scheme.is_relative else "absolute", comment
