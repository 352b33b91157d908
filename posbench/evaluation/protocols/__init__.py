"""The protocols by name. Each is a class that scores, and says how its scores are stored, printed and reported.

validation      the final held-out loss at the training length (training writes it)
fixed           the same targets at every length, only the left context grows
nonoverlapping  windows back to back, every target scored
sliding         windows moved by a stride, the last targets of each scored
position        loss by position within non-overlapping windows, in log-spaced buckets
retrieval       how much a passage's loss drops when it was read before, and by its order, against the gap
ngram           what a model of the last few tokens loses on the same targets (once a seed, no trained model)
accuracy        of a task: by length in items, the share of answers that are right
mechanism       where heads look, which frequencies they use, what the scheme adds to their scores
order           the loss when the order of everything beyond d tokens is destroyed, or its identity, against d

A new protocol is a subclass of `Protocol` in a file here, named in `PROTOCOLS`; where it needs a section of the report
of its own, that goes to `posbench/reporting`.
"""

from __future__ import annotations

from collections.abc import Mapping

from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols.accuracy import Accuracy
from posbench.evaluation.protocols.mechanism import Mechanism
from posbench.evaluation.protocols.ngram import Ngram
from posbench.evaluation.protocols.order import Order
from posbench.evaluation.protocols.protocol import Advance, Protocol, Score
from posbench.evaluation.protocols.retrieval import Retrieval
from posbench.evaluation.protocols.windowed import Fixed, Nonoverlapping, Position, Sliding, Validation

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

# Those that are asked for by name.
VALIDATION, NONOVERLAPPING, NGRAM = Validation(), Nonoverlapping(), Ngram()
ACCURACY, MECHANISM = Accuracy(), Mechanism()
PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        VALIDATION,
        Fixed(),
        NONOVERLAPPING,
        Sliding(),
        Position(),
        Retrieval(),
        Order(),
        MECHANISM,
        NGRAM,
        ACCURACY,
    )
}


def protocol_named(name: str) -> Protocol:
    """The protocol of that name. Raises: ConfigError naming the nearest."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name!r} is not known{nearest(name, PROTOCOLS)} (known: {', '.join(PROTOCOLS)})")
    return PROTOCOLS[name]
