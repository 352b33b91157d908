"""Find the evaluation protocols by name. Each is a class that scores, and says how to store and print scores.

A new protocol is a subclass of `EvalProtocol` in a file here, or in a file of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from posbench.catalogue.classes import check_options, class_named, classes_in, with_packages
from posbench.catalogue.own_files import as_recorded, load, snake_case, trust_files, with_options
from posbench.config import Config, ConfigError
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Scored
from posbench.runs.results import Result

__all__ = [
    "ACCURACY",
    "MECHANISM",
    "NONOVERLAPPING",
    "PROTOCOLS",
    "VALIDATION",
    "Advance",
    "EvalProtocol",
    "Scored",
    "check_protocols",
    "protocol_named",
    "protocol_of",
    "trust_protocols",
]

_CLASSES = classes_in("posbench.evaluation.protocols", EvalProtocol)  # type: ignore[type-abstract]
_NAMED = [cls for cls in sorted(_CLASSES.values(), key=lambda cls: getattr(cls, "rank", 0)) if hasattr(cls, "name")]
_OURS: dict[str, EvalProtocol] = {cls.name: cls() for cls in _NAMED}
PROTOCOLS = dict(_OURS)  # and those of users and packages that were asked for

# Protocols that other modules ask for by name.
VALIDATION, NONOVERLAPPING = PROTOCOLS["validation"], PROTOCOLS["nonoverlapping"]
ACCURACY, MECHANISM = PROTOCOLS["accuracy"], PROTOCOLS["mechanism"]


def check_protocols(config: Config) -> None:
    """Raise ConfigError if a protocol in `evaluation.protocols` is unknown, or cannot score what `config` trains on."""
    for name in config.evaluation.protocols:
        protocol_named(name).check(config)


def protocol_named(name: str) -> EvalProtocol:
    """Return the protocol of this name: one here, a package's, or a class in a file with its options.

    `my_protocol.py:Edges:width=8` is `Edges(width=8)`, which is then known as `edges-width=8`. Raises: ConfigError with
    the nearest name for an unknown one, and if the file cannot be trusted or does not define it.
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    base: type[EvalProtocol] = EvalProtocol  # type: ignore[type-abstract]
    if of_file := with_options(name):
        cls, options = load(of_file[0], base), of_file[1]
    else:
        classes = {known: type(protocol) for known, protocol in PROTOCOLS.items()}
        cls, options = class_named(name, with_packages(classes, "posbench.protocols"), "protocol", base), {}
    check_options("protocol", name, cls.__init__, options)
    protocol = cls(**options)
    described = "".join(f"-{key}={value}" for key, value in options.items())
    protocol.name = f"{getattr(cls, 'name', snake_case(cls.__name__))}{described}"
    if protocol.name in _OURS:
        raise ConfigError(f"protocol {name!r} has the name of a protocol of posbench, {protocol.name}: rename it")
    if of_file:
        protocol.place = as_recorded(of_file[0]) + name.removeprefix(of_file[0])
    PROTOCOLS[protocol.name] = protocol
    return protocol


def trust_protocols(names: Iterable[str]) -> list[str]:
    """Return the names under which these protocols are known. Call this only for words that the user typed."""
    known = []
    for name in names:
        if of_file := with_options(name):
            trust_files({"kind": of_file[0]})
        known.append(protocol_named(name).name)
    return known


def protocol_of(result: Result) -> EvalProtocol | None:
    """Return the protocol that scored a result, or None if it is not here, or in a file that is not trusted."""
    if result.protocol in PROTOCOLS:
        return PROTOCOLS[result.protocol]
    try:
        return protocol_named(result.header.get("protocol_place", result.protocol))
    except ConfigError:
        return None
