"""Position schemes by name. This package knows tensors, not models.

A new one is a short class here (or in a package of your own that names it under the entry-point group
`posbench.schemes`), a YAML file in `conf/scheme/`, and a golden value in the tests: see `docs/adding-a-scheme.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

from posbench.config import ConfigError, SchemeConfig, nearest
from posbench.schemes.alibi import Alibi
from posbench.schemes.base import Scheme, Shape
from posbench.schemes.rotary import Rotary, Turn, rotate, turn
from posbench.schemes.sinusoidal import Sinusoidal

__all__ = ["SCHEMES", "Scheme", "Shape", "Turn", "build_scheme", "rotate", "turn"]


class _Registry(Mapping[str, type[Scheme]]):
    """Name -> class: our own, and those of installed packages (entry point `posbench.schemes`), imported on use."""

    _own: Mapping[str, type[Scheme]] = {"nope": Scheme, "rotary": Rotary, "alibi": Alibi, "sinusoidal": Sinusoidal}

    def __init__(self) -> None:
        self._plugins: dict[str, EntryPoint] = {}
        for point in entry_points(group="posbench.schemes"):
            if point.name in self:
                raise ConfigError(
                    f"{point.value} is to be the position scheme kind {point.name!r}, which is taken: "
                    "rename it in its package's entry points, or uninstall that package"
                )
            self._plugins[point.name] = point

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._plugins

    def __getitem__(self, name: str) -> type[Scheme]:
        if name in self._own:
            return self._own[name]
        point = self._plugins[name]
        try:
            found = point.load()
        except Exception as error:  # another package's code: whatever it raises, say whose it is
            raise ConfigError(
                f"the position scheme kind {name!r} is {point.value} of another package, which fails to import "
                f"({type(error).__name__}: {error}): mend or uninstall that package"
            ) from error
        if not (inspect.isclass(found) and issubclass(found, Scheme)):
            raise ConfigError(
                f"the entry point posbench.schemes:{name} is {found!r}, not a subclass of posbench.schemes.Scheme"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self._plugins))

    def __len__(self) -> int:
        return len(self._own) + len(self._plugins)


SCHEMES: Mapping[str, type[Scheme]] = _Registry()


def build_scheme(config: SchemeConfig, shape: Shape) -> Scheme:
    """The scheme that `config` names, for a decoder of `shape`.

    Raises: ConfigError for an unknown kind, an unknown or missing option, or a value the scheme refuses.
    """
    if config.kind not in SCHEMES:
        raise ConfigError(
            f"scheme.kind={config.kind!r} is not known{nearest(config.kind, SCHEMES)} (known: {', '.join(SCHEMES)})"
        )
    scheme = SCHEMES[config.kind]
    parameters = list(inspect.signature(scheme).parameters.values())[1:]  # the first is the shape
    options = [option for option in parameters if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
    names = [option.name for option in options]
    for key in config.options:
        if key not in names:
            listed = ", ".join(names) or "none"
            raise ConfigError(f"scheme.{key} is no option of {config.kind!r}{nearest(key, names)} (options: {listed})")
    for option in options:
        if option.default is option.empty and option.name not in config.options:
            raise ConfigError(f"scheme.{option.name} is missing: {config.kind!r} needs it")
    return scheme(shape, **config.options)
