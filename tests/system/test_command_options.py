"""Options are written once, as the fields of a dataclass: commands and the Python API read them there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import posbench
from posbench.evaluation.request import Request
from posbench.reporting.options import ReportOptions
from posbench.system.options import takes


@dataclass
class Options:
    size: Annotated[int, typer.Option(help="How large.")] = 3
    names: Annotated[tuple[str, ...], Annotated[str | None, typer.Option("--name", help="With commas.")]] = ("a",)


def shown(place: str, *, options: Options, loud: bool = False) -> str:
    return f"{place} {options.size} {options.names} {loud}"


def test_python_gives_fields_by_their_names() -> None:
    function = takes(Options)(shown)
    assert list(signature(function).parameters) == ["place", "size", "names", "loud"]
    assert function("here", names=("b", "c"), loud=True) == "here 3 ('b', 'c') True"
    with pytest.raises(TypeError, match="'sizes'"):
        function("here", sizes=4)


def test_a_command_gives_words() -> None:
    app = typer.Typer()
    app.command()(lambda: None)

    @app.command()
    @takes(Options, on_command_line=True)
    def show(place: str, *, options: Options, loud: bool = False) -> None:
        typer.echo(shown(place, options=options, loud=loud))

    run = CliRunner().invoke
    assert run(app, ["show", "here"]).output == "here 3 ('a',) False\n"  # a word that is not given: the field's default
    assert run(app, ["show", "here", "--size", "4", "--name", "b,c", "--loud"]).output == "here 4 b,c True\n"


def test_the_api_has_every_option() -> None:
    for function, options in ((posbench.evaluate, Request), (posbench.report, ReportOptions)):
        assert {field.name for field in fields(options)} <= signature(function).parameters.keys()
