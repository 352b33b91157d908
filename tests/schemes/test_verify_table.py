"""What `posbench verify` and `posbench schemes` print, and when verify fails."""

import io
import re

import pytest
from rich.console import Console

from posbench.composition import choices
from posbench.config import ConfigError
from posbench.schemes import SCHEMES, Scheme
from posbench.verify import list_schemes, verify


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


@pytest.mark.slow
def test_verify_prints_a_row_a_scheme_and_holds(console):
    assert verify(None, console)
    lines = console.file.getvalue().splitlines()
    for name in choices("scheme"):
        row = next(line.split() for line in lines if line.split()[:1] == [name])
        assert row[1] in ("rel", "abs") and row[-1] == "ok" and len(row) == 12
    assert lines[-1] == f"{len(choices('scheme'))} schemes: every certificate holds"
    assert "…" not in console.file.getvalue() and max(map(len, lines)) <= 80


def test_verify_takes_names_and_overrides(console):
    assert verify(["vo_rope", "scheme.base=500000"], console)
    assert console.file.getvalue().endswith("1 scheme: every certificate holds\n")


def test_an_unknown_scheme_is_refused_before_anything_is_measured(console):
    with pytest.raises(ConfigError, match="did you mean 'vo_rope'"):
        verify(["qk_rope", "vo_rop"], console)
    assert console.file.getvalue() == ""


class Liar(Scheme):
    is_relative = False


class Short(Scheme):
    """A table of fixed length."""

    def prepare(self, pos, length):
        import torch

        return torch.zeros(512)[pos]


def test_verify_fails_with_the_reason(console, monkeypatch):
    monkeypatch.setitem(SCHEMES, "nope", Liar)
    assert not verify(["qk_rope", "nope"], console)
    said = " ".join(console.file.getvalue().split())
    assert "FAIL nope: shift is 0, must be above 0.001 (promised absolute, measured relative)" in said
    assert said.endswith("1 of 2 schemes failed: nope")


def test_a_scheme_that_crashes_fails_and_the_others_are_still_measured(console, monkeypatch):
    monkeypatch.setitem(SCHEMES, "nope", Short)
    assert not verify(["nope", "qk_rope"], console)
    said = console.file.getvalue()
    assert "FAIL nope: IndexError" in said and "qk_rope" in said and said.endswith("1 of 2 schemes failed: nope\n")


def test_schemes_are_listed_with_their_promises(console):
    list_schemes(console)
    said = console.file.getvalue()
    for name in choices("scheme"):
        assert f"\n{name}" in said
    assert f"kinds: {', '.join(SCHEMES)}" in " ".join(said.split())
    places = [
        said.index(f"\n{row}") for row in ("no position", "nope", "rotations", "qk_rope", "biases", "alibi", "added")
    ]
    assert places == sorted(places)


def test_a_scheme_made_of_named_rows_is_listed_and_certified(console, tmp_path):
    (tmp_path / "scheme").mkdir()
    rows = "# By turns.\nname: turns\nkind: interleaved\nlayers: [qk_rope, pair]\n"
    (tmp_path / "scheme" / "turns.yaml").write_text(rows)
    (tmp_path / "scheme" / "pair.yaml").write_text("name: pair\nkind: combined\nof: [qk_rope, vo_rope]\n")
    list_schemes(console, tmp_path)
    assert re.search(r"\nturns +interleaved +relative +By turns\.", console.file.getvalue())
    assert verify(["turns", f"--config-dir={tmp_path}"], console)


class Wide(Scheme):
    """Refuses small heads, and a base."""

    def __init__(self, shape, base=1.0):
        super().__init__(shape)
        if shape.head_dim < 64 or base > 1:
            raise ConfigError("scheme.base is too large")


def test_a_scheme_that_refuses_is_a_row_like_the_others(console, monkeypatch):
    monkeypatch.setitem(SCHEMES, "nope", Wide)
    list_schemes(console)
    assert re.search(r"\nnope +nope +relative", console.file.getvalue())
    monkeypatch.setattr(Wide.__init__, "__defaults__", (2.0,))
    list_schemes(console)
    said = console.file.getvalue().rpartition("what it is")[2]
    assert re.search(r"\nnope +nope +scheme\.base is too large *\n", said) and "\nvo_rope" in said
