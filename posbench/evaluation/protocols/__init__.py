"""The protocols by name. Each is a class that scores, and says how its scores are stored, printed and reported.

validation      the final held-out loss at the training length (training writes it)
fixed           the same targets at every length, only the left context grows
nonoverlapping  windows back to back, every target scored
position        loss by position within non-overlapping windows, in log-spaced buckets
retrieval       how much a passage's loss drops when it was read before, and by its order, against the gap
ngram           what a model of the last few tokens loses on the same targets (once a seed, no trained model)
accuracy        of a task: by length in items, the share of answers that are right
mechanism       where heads look, which frequencies they use, what the scheme adds to their scores
order           the loss when the order of everything beyond d tokens is destroyed, or its identity, against d

A new protocol is a subclass of `Protocol` in a file here: its windows, its score, its columns, and its sections of the
reports as data, which `posbench.reporting` draws.
"""

from __future__ import annotations

from inspect import isabstract

from posbench.catalogue.classes import classes_in
from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols.protocol import Advance, Protocol, Score

__all__ = [
    "ACCURACY",
    "MECHANISM",
    "NGRAM",
    "NONOVERLAPPING",
    "PROTOCOLS",
    "VALIDATION",
    "Advance",
    "Protocol",
    "Score",
    "protocol_named",
]

_CLASSES = classes_in("posbench.evaluation.protocols", Protocol)  # type: ignore[type-abstract]
PROTOCOLS: dict[str, Protocol] = {
    cls.name: cls() for cls in sorted(_CLASSES.values(), key=lambda cls: cls.rank) if not isabstract(cls)
}

# Protocols that other modules ask for by name.
VALIDATION, NONOVERLAPPING, NGRAM = PROTOCOLS["validation"], PROTOCOLS["nonoverlapping"], PROTOCOLS["ngram"]
ACCURACY, MECHANISM = PROTOCOLS["accuracy"], PROTOCOLS["mechanism"]


def protocol_named(name: str) -> Protocol:
    """The protocol of that name. Raises: ConfigError naming the nearest."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name!r} is not known{nearest(name, PROTOCOLS)} (known: {', '.join(PROTOCOLS)})")
    return PROTOCOLS[name]
