"""Find the evaluation protocols by name. Each is a class that scores, and says how to store, print and report scores.

A new protocol is a subclass of `EvalProtocol` in a file here.
"""

from __future__ import annotations

from posbench.catalogue.classes import classes_in
from posbench.config import Config, ConfigError, nearest
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Scored

__all__ = [
    "ACCURACY",
    "MECHANISM",
    "NGRAM",
    "NONOVERLAPPING",
    "PROTOCOLS",
    "VALIDATION",
    "Advance",
    "EvalProtocol",
    "Scored",
    "check_protocols",
    "protocol_named",
]

_CLASSES = classes_in("posbench.evaluation.protocols", EvalProtocol)  # type: ignore[type-abstract]
_NAMED = [cls for cls in sorted(_CLASSES.values(), key=lambda cls: getattr(cls, "rank", 0)) if hasattr(cls, "name")]
PROTOCOLS: dict[str, EvalProtocol] = {cls.name: cls() for cls in _NAMED}

# Protocols that other modules ask for by name.
VALIDATION, NONOVERLAPPING = PROTOCOLS["validation"], PROTOCOLS["nonoverlapping"]
ACCURACY, MECHANISM = PROTOCOLS["accuracy"], PROTOCOLS["mechanism"]
NGRAM = "ngram"  # of results that no protocol scores: losses of n-gram models (`posbench.evaluation.ngram`)


def check_protocols(config: Config) -> None:
    """Raise ConfigError if a protocol in `evaluation.protocols` is unknown, or cannot score what `config` trains on."""
    for name in config.evaluation.protocols:
        protocol_named(name).check(config)


def protocol_named(name: str) -> EvalProtocol:
    """Return the evaluation protocol of this name. Raises: ConfigError with the nearest name for an unknown one."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name!r} is not known{nearest(name, PROTOCOLS)} (known: {', '.join(PROTOCOLS)})")
    return PROTOCOLS[name]
