"""What counts as the same code: what files say, not how they are laid out; a scheme's own files are of its row."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import posbench
from posbench.composition import compose
from posbench.model import build_model
from posbench.runs.fingerprints import code_fingerprint, commit, scheme_code

PACKAGE = Path(posbench.__file__).parent


@pytest.mark.parametrize(
    ("file", "old", "new", "is_same"),
    [
        ("schemes/alibi.py", "import", "import json\nimport", True),  # of one scheme
        ("model.py", "class Decoder", "# a decoder\nclass Decoder", True),
        ("training/optimizer.py", '"""', '"""Words. ', True),
        ("cross_entropy.py", "\nimport", "\n\n\nimport", True),
        ("model.py", "ROWS = 4096", "ROWS = 4097", False),
        ("cross_entropy.py", " * ", " + ", False),
        ("schemes/base.py", "return x", "return -x", False),
    ],
)
def test_shared_code_is_what_it_says(tmp_path: Path, file: str, old: str, new: str, is_same: bool) -> None:
    package = Path(shutil.copytree(PACKAGE, tmp_path / "posbench", ignore=shutil.ignore_patterns("__pycache__")))
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new, 1))
    assert (code_fingerprint(package=package) == code_fingerprint()) == is_same


@pytest.mark.slow
def test_schemes_of_one_file_share_their_code() -> None:
    codes = {
        name: scheme_code(build_model(compose([f"scheme={name}", "model=tiny"]), 300))
        for name in ("qk_rope", "vo_rope", "nope", "alibi")
    }
    assert codes["qk_rope"] == codes["vo_rope"] and len(set(codes.values())) == 3


def test_a_class_without_a_file_has_no_code() -> None:
    model = build_model(compose(["scheme=nope", "model=tiny"]), 300)
    mine = type("Mine", (type(model.scheme),), {"__module__": "a_notebook"})
    nope = scheme_code(model)
    model.scheme.__class__ = mine
    assert scheme_code(model) == nope


def test_the_commit_is_that_of_the_checkout() -> None:
    assert commit() is None or len(str(commit())) == 12
