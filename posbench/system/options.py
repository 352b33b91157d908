"""Declare a command's options as fields of a dataclass, which Typer and the Python API both read; and common options.

A field is `Annotated[TYPE, typer.Option(...)]`, or, for another type on the command line, `Annotated[TYPE,
Annotated[COMMAND_LINE_TYPE, typer.Option(...)]]`; the dataclass then accepts both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

T = TypeVar("T")
optional = partial(typer.Option, show_default=False)  # an option whose help says what its default means

AtStep = Annotated[
    int | None,
    optional(help="Use the checkpoint of this step. Default: the last one.", min=1),
]
SchemeFiles = Annotated[
    list[Path] | None,
    optional(
        "--scheme-file",
        metavar="FILE",
        help="The Python file of a run's scheme or task, needed if the file is outside the working directory and the "
        "run is not in its runs folder. May be repeated.",
    ),
]
SchemeChanged = Annotated[
    bool,
    typer.Option(
        "--scheme-changed",
        help="Continue although the file of the run's scheme or task has changed; results are marked.",
    ),
]
ConfigDir = Annotated[
    Path | None,
    optional(
        "--config-dir",
        exists=True,
        file_okay=False,
        metavar="FOLDER",
        help="A folder with choices of your own, such as FOLDER/scheme/mine.yaml.",
    ),
]


def takes(cls: Any, on_command_line: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that replaces a function's parameter `options` by keywords, one per field of dataclass `cls`.

    Arguments: on_command_line, whether Typer reads the function's signature.
    """
    hints, keywords = get_type_hints(cls, include_extras=True), []
    for field in fields(cls):
        hint, default = hints[field.name], field.default
        option = hint.__metadata__[0]  # Typer's option, or the type on the command line with its own annotation
        if not on_command_line:
            hint = hint.__origin__  # the type without its annotation
        elif not isinstance(option, OptionInfo):
            # None on the command line means the dataclass's default, which may have another type.
            hint, default = option, None
        keywords.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        parameters = [p for p in signature(function, eval_str=True).parameters.values() if p.name != "options"]
        positional = [p for p in parameters if p.kind is not Parameter.KEYWORD_ONLY]
        whole = Signature([*positional, *keywords, *parameters[len(positional) :]])

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            arguments = whole.bind(*args, **kwargs).arguments
            # None means that the option was not given: the dataclass's default holds.
            values = {field: arguments.pop(field, None) for field in hints}
            given = {field: value for field, value in values.items() if value is not None}
            return function(**arguments, options=cls(**given))

        call.__signature__ = whole  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in whole.parameters.values()}
        return call

    return decorate
