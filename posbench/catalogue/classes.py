"""Find classes by the names that configurations use: ours, and those that installed packages register."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from posbench.catalogue.own_files import is_class_path, snake_case
from posbench.config import ConfigError, nearest

T = TypeVar("T")
_PACKAGE = Path(__file__).parents[1]
Classes = dict[str, type[T] | EntryPoint]  # by name; a class of another package is an entry point until it is needed


def classes_in(package: str, base: type[T]) -> dict[str, type[T]]:
    """Return {name in snake case: class} for the classes in a package's files that extend `base`."""
    classes = {}
    for module in pkgutil.iter_modules(import_module(package).__path__):
        for value in vars(import_module(f"{package}.{module.name}")).values():
            # A module also holds the classes it imports: these are found twice, under one name.
            if isinstance(value, type) and issubclass(value, base) and value is not base:
                classes[snake_case(value.__name__)] = value
    return classes


def check_known(key: str, name: str, folder: str, group: str) -> None:
    """Raise ConfigError if `name` is neither a module in a folder of posbench nor an entry point in `group`.

    Nothing is imported. A class in a file is known. Arguments: key, the setting that gives the name.
    """
    files = {file.stem for file in (_PACKAGE / folder).glob("*.py")}
    # The module of the base class is named like the folder, in the singular.
    ours = files - {"__init__", Path(folder).name.removesuffix("s")}
    known = [*ours, *(point.name for point in entry_points(group=group))]
    if name not in known and not is_class_path(name):
        raise ConfigError(_unknown(key, name, known))


def _unknown(key: str, name: str, known: Iterable[str]) -> str:
    what = "scheme" if key == "scheme.kind" else key.rpartition(".")[2]
    listed, example = ", ".join(sorted(known)), f"my_{what}.py:Name"
    hint = nearest(name, known)
    return f"{key}={name!r} is not known{hint} (known: {listed}; your own is a class in a file, {example})"


def with_packages(ours: Mapping[str, type[T]], group: str) -> Classes[T]:
    """Return {name: class} of posbench's own classes and of packages' entry points in `group`."""
    # posbench's classes come last, so a name that both use means posbench's class.
    return {**{point.name: point for point in entry_points(group=group)}, **ours}


def class_named(name: str, classes: Classes[T], key: str, base: type[T]) -> type[T]:
    """Return the class that `name` means, imported if it is another package's.

    Arguments: key, the setting that names it, such as `scheme.kind`; base, the class it must extend.
    Raises: ConfigError with the nearest name, and for a package whose class cannot be imported.
    """
    if name not in classes:
        raise ConfigError(_unknown(key, name, classes))
    # An entry point is loaded only now, so that a package that is not used costs nothing.
    cls = classes[name]
    if isinstance(cls, type):
        return cls
    try:
        loaded = cls.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={name}: {cls.value} cannot be imported ({error}): reinstall its package") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{key}={name}: {cls.value} does not extend {base.__name__}")
    return loaded


def option_names(cls: Callable[..., Any]) -> list[str]:
    """Return the names of a class's options: its constructor's parameters after the first."""
    return [option.name for option in _options(cls)]


def check_options(key: str, kind: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that the class `cls` takes all `options`, and that no option without a default is missing.

    Arguments: key, such as `scheme`, and kind, the class's name, for the message.
    Raises: ConfigError for an unknown or missing option.
    """
    names = option_names(cls)
    for name in options:
        if name not in names:
            listed = ", which has no options"
            if names:
                listed = f"{nearest(name, names)} (options: {', '.join(names)})"
            raise ConfigError(f"{key}.{name} is not an option of {kind!r}{listed}")
    for option in _options(cls):
        if option.default is option.empty and option.name not in options:
            raise ConfigError(f"{key}.{option.name} is missing: {kind!r} needs it")


def _options(cls: Callable[..., Any]) -> list[inspect.Parameter]:
    # The first parameter is the decoder's shape.
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    no_options = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    options = [option for option in parameters if option.kind not in no_options]
    # `**options` stands for the options of the class that this one extends.
    if isinstance(cls, type) and any(option.kind is option.VAR_KEYWORD for option in parameters):
        known = {option.name for option in options}
        owner = next(parent for parent in cls.__mro__ if "__init__" in vars(parent))
        options += [option for option in _options(owner.__mro__[1]) if option.name not in known]
    return options
