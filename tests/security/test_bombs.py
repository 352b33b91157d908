"""A small file of choices that stands for more than fits into memory, or has no end, is an error at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posbench import ConfigError, compose


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "an alias, \\*a, is not allowed"),
        ("x: &x [*x]\n", "an alias, \\*x, is not allowed"),
        ("x: " + "[" * 20000, "nested too deep"),
        ("# " + "x" * (1 << 21), "larger than 1 MiB"),
        ("---\nname: other\n", "single document"),
    ],
    ids=["aliases", "of itself", "deep", "large", "two"],
)
def test_yaml_of_others_is_plain_and_small(tmp_path: Path, content: str, says: str) -> None:
    write(tmp_path / "scheme/mine.yaml", f"name: mine\nkind: nope\n{content}")
    with pytest.raises(ConfigError, match=rf"mine\.yaml (is not a choice|cannot be read): .*{says}"):
        compose([f"--config-dir={tmp_path}", "scheme=mine"])


def test_a_pipe_among_choices_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "scheme").mkdir()
    os.mkfifo(tmp_path / "scheme/mine.yaml")
    with pytest.raises(ConfigError, match="scheme=mine does not exist"):
        compose([f"--config-dir={tmp_path}", "scheme=mine"])


@pytest.mark.parametrize("place", ["", "/experiment/"])
def test_lists_of_defaults_that_double_are_counted_first(tmp_path: Path, place: str) -> None:
    """Forty files, each of which chooses the next one twice: Hydra would read 2^40."""
    for n in range(40):
        doubled = f"defaults: [{place}m{n + 1}@x.a{n}, {place}m{n + 1}@x.b{n}]\n"
        write(tmp_path / f"experiment/m{n}.yaml", f"# @package _global_\n{doubled}")
    write(tmp_path / "experiment/m40.yaml", "# @package _global_\nexperiment: {name: x}\n")
    with pytest.raises(ConfigError, match="chooses more than 200 files"):
        compose([f"--config-dir={tmp_path}", "experiment=m0"])


def test_a_list_of_defaults_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        write(tmp_path / f"experiment/{one}.yaml", f"# @package _global_\ndefaults: [{other}@x.{one}]\n")
    with pytest.raises(ConfigError, match=r"a\.yaml chooses itself: a -> b -> a"):
        compose([f"--config-dir={tmp_path}", "experiment=a"])


def test_references_to_references_are_counted() -> None:
    words = [f"+scheme.a{n}='${{scheme.a{n - 1}}}${{scheme.a{n - 1}}}'" for n in range(1, 40)]
    with pytest.raises(ConfigError, match="79 references to other fields"):
        compose(["+scheme.a0=x", *words])
