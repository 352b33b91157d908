"""Classes by the name that a configuration gives them: our own, and those of installed packages (entry points)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from posbench.config import ConfigError, nearest

T = TypeVar("T")


class Registry(dict[str, type[T]]):
    """Name -> class. A class of another package stands as its entry point until it is first asked for by `[name]`.

    Arguments: what, a phrase for messages; group, the entry-point group; base, the class that each must extend; ours,
    the classes of this package; check, called with each class of another package, raises ConfigError for a wrong form.
    """

    def __init__(
        self,
        what: str,
        group: str,
        base: type[T],
        ours: Mapping[str, type[T]],
        check: Callable[[type[T]], object] = lambda cls: None,
    ) -> None:
        super().__init__(ours)
        self.what, self.group, self.base, self.check = what, group, base, check
        for point in entry_points(group=group):
            if point.name in self:
                raise ConfigError(
                    f"{point.value} registers the {what} {point.name!r}, but that name is taken: "
                    "rename it in its package's entry points, or uninstall that package"
                )
            self[point.name] = cast(type[T], point)

    def __getitem__(self, name: str) -> type[T]:
        """Raises: ConfigError naming the package of a class that cannot be imported or does not extend `base`."""
        cls: Any = super().__getitem__(name)
        if not isinstance(cls, EntryPoint):
            return cast(type[T], cls)
        point = cls
        try:
            cls = point.load()
        except Exception as error:  # another package's code: whatever it raises, say whose it is
            raise ConfigError(
                f"the {self.what} {name!r} comes from {point.value} of another package, which fails to import "
                f"({type(error).__name__}: {error}): fix or uninstall that package"
            ) from error
        if not (inspect.isclass(cls) and issubclass(cls, self.base)):
            raise ConfigError(
                f"the entry point {self.group}:{name} is {cls!r}, not a subclass of "
                f"{self.base.__module__.rpartition('.')[0]}.{self.base.__name__}"
            )
        self.check(cls)
        self[name] = cls
        return cls

    def named(self, key: str, name: str) -> type[T]:
        """The class of that name. Arguments: key, the setting that asks for it, such as `scheme.kind`.

        Raises: ConfigError with the nearest name.
        """
        if name not in self:
            raise ConfigError(
                f"{key}={name!r} is not known{nearest(name, self)} (known: {', '.join(self)}; to add your own, "
                f"install a package that names it under the entry-point group {self.group}, or name the class of a "
                "scheme in a file: my_scheme.py:Faded)"
            )
        return self[name]


def option_names(cls: Callable[..., Any]) -> list[str]:
    """The options of a class: the parameters of its constructor after the first, which is the shape of the decoder."""
    return [option.name for option in _options(cls)]


def check_options(key: str, kind: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Hold the options of a configuration to those of a class.

    Arguments: key, what they stand under, such as `scheme`. Raises: ConfigError for an unknown or a missing one.
    """
    names = option_names(cls)
    for name in options:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise ConfigError(f"{key}.{name} is not an option of {kind!r}{nearest(name, names)} (options: {listed})")
    for option in _options(cls):
        if option.default is option.empty and option.name not in options:
            raise ConfigError(f"{key}.{option.name} is missing: {kind!r} needs it")


def _options(cls: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return [option for option in parameters if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
