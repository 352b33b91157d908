"""What counts as the same code: all that runs share, by what it says; a scheme's own files are a fact of its row."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

import posbench
from posbench.composition import compose
from posbench.model import build_model, shape_of
from posbench.runs import fingerprints
from posbench.runs.fingerprints import scheme_code
from posbench.schemes import Scheme

PACKAGE = Path(posbench.__file__).parent
SHAPE = shape_of(compose(["model=tiny"]))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's source, to change."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "posbench", ignore=shutil.ignore_patterns("__pycache__")))


def shared_code(package: Path) -> str:
    fingerprints.code_fingerprint.cache_clear()
    return fingerprints.code_fingerprint(package=package)


def edited(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(package: Path) -> None:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new, 1))

    return edit


def another_scheme(package: Path) -> None:
    (package / "schemes" / "newest.py").write_text("from posbench.schemes import Scheme\n\nclass Newest(Scheme): ...\n")


def another_kind(package: Path) -> None:
    (package / "attention" / "linear.py").write_text("DECAY = 0.5\n")


SAME = {
    "another scheme": another_scheme,
    "another kind of attention": another_kind,
    "a scheme that changed": edited("schemes/alibi.py", "import", "# why\nimport"),
    "a comment": edited("model.py", "class Decoder", "# a decoder\nclass Decoder"),
    "a docstring": edited("training/optimizer.py", '"""', '"""Words. '),
    "a blank line": edited("cross_entropy.py", "\nimport", "\n\n\nimport"),
    "what only reads": edited("reporting/tables.py", "import", "import json\nimport"),
}
OTHER = {
    "a number": edited("model.py", "ROWS = 4096", "ROWS = 4097"),
    "an operator": edited("cross_entropy.py", " * ", " + "),
    "the base class": edited("schemes/base.py", "return x", "return -x"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_run_does_not_change_the_fingerprint(package: Path, name: str) -> None:
    before = shared_code(package)
    SAME[name](package)
    assert shared_code(package) == before


@pytest.mark.parametrize("name", OTHER)
def test_what_all_runs_share_does(package: Path, name: str) -> None:
    before = shared_code(package)
    OTHER[name](package)
    assert shared_code(package) != before


SCHEME = """
from posbench.schemes import Scheme

from .{helper} import RATE

class Mine(Scheme):
    '''A scheme.'''
    def q(self, x, pos):
        return x * {number} * RATE
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scheme]]:
    """A scheme of another package, with a number in its class and one in a file that it imports."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(number: int = 2, rate: int = 3, comment: str = "") -> Scheme:
        for name in [name for name in sys.modules if name.startswith("plugged")]:
            del sys.modules[name]
        folder = tmp_path / "plugged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "rates.py").write_text(f"RATE = {rate}\n")
        (folder / "scheme.py").write_text(SCHEME.format(helper="rates", number=number) + comment)
        importlib.invalidate_caches()
        fingerprints._code_of.cache_clear()
        return importlib.import_module("plugged.scheme").Mine(SHAPE)

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = before
    for name in [name for name in sys.modules if name.startswith("plugged")]:
        del sys.modules[name]


def test_a_schemes_code_is_its_class_and_what_that_imports_of_its_package(plugin: Callable[..., Scheme]) -> None:
    as_written = scheme_code(plugin())
    assert scheme_code(plugin(comment="# words\n")) == as_written
    assert scheme_code(plugin(number=7)) != as_written
    assert scheme_code(plugin(rate=7)) != as_written


def test_parents_and_schemes_within_a_scheme_count(plugin: Callable[..., Scheme]) -> None:
    codes = set()
    for number in (2, 7):
        mine = plugin(number=number)

        class Child(type(mine)):  # type: ignore[misc]
            pass

        outer = Scheme(SHAPE)
        outer.inner = nn.ModuleList([mine])
        codes |= {scheme_code(Child(SHAPE)), scheme_code(outer)}
    assert len(codes) == 4


def test_schemes_of_one_file_share_it() -> None:

    codes = {
        name: scheme_code(build_model(compose([f"scheme={name}", "model=tiny"]), 300))
        for name in ("qk_rope", "vo_rope", "nope", "alibi")
    }
    assert codes["qk_rope"] == codes["vo_rope"] and len(set(codes.values())) == 3
