"""Which tokens are scored with how much left context: a protocol is a list of windows over a split.

fixed           the same targets at every length, inside one document: only the left context grows (the default)
nonoverlapping  the stream cut into windows of the length, every target scored (Press et al. 2022 compare this way);
                longer windows gain already because fewer targets stand near a window's start
sliding         windows of the length moved by a stride, only the last `stride` targets of each scored
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.data import Split


@dataclass(frozen=True)
class Window:
    """Tokens `start .. start + length - 1` are read; the last `scored` of the targets after each are scored."""

    start: int
    length: int
    scored: int


def nonoverlapping(split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
    """Windows back to back from the start of the stream, at most `max_tokens` targets, crossing documents.

    The tail that fills no window is left out, unless it is all there is.
    """
    there_is = split.num_tokens - 1
    if there_is < length:
        raise ConfigError(_too_long(split, length, "in all", there_is))
    count = min(settings.max_tokens, there_is) // length
    if count == 0:
        raise ConfigError(
            f"evaluation.max_tokens={settings.max_tokens} is less than one window of length {length}: raise it, or ask "
            "for a shorter length"
        )
    return [Window(n * length, length, length) for n in range(count)]


def sliding(split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
    """Windows moved by `targets` tokens, each scoring its last `targets`, at most `max_tokens` read."""
    stride = min(settings.targets, length)
    last = min(split.num_tokens - 1 - length, length * (settings.max_tokens // stride))
    if last < 0:
        raise ConfigError(_too_long(split, length, "in all", split.num_tokens - 1))
    count = min(last // stride + 1, max(1, settings.max_tokens // length))
    return [Window(n * stride, length, stride) for n in range(count)]


def fixed(split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
    """`windows` groups of `targets` tokens with `anchor` tokens of their own document before their last one.

    The groups depend on `anchor` (the longest length of the comparison) and never on `length`, and are spread evenly
    over all the places there are. Groups do not overlap and no window crosses a document.
    """
    targets = settings.targets
    if targets > length:
        raise ConfigError(
            f"evaluation.targets={targets} does not fit into length {length}: lower it, or ask for longer lengths"
        )
    assert length <= anchor
    ends = [
        np.arange(begin + anchor, end, targets)  # the index of the last target of a group
        for begin, end in zip(split.starts[:-1], split.starts[1:], strict=True)
    ]
    places = np.concatenate(ends)
    if not len(places):
        raise ConfigError(_too_long(split, anchor, "in its longest document", int(np.diff(split.starts).max()) - 1))
    chosen = places[np.linspace(0, len(places) - 1, min(settings.windows, len(places))).round().astype(np.int64)]
    return [Window(int(last) - length, length, targets) for last in np.unique(chosen)]


JUST_PAST = (1, 10, 50, 100)  # tokens past the training length, where absolute schemes turn


def default_lengths(context_length: int, split: Split, protocol: str) -> list[int]:
    """Half the training length, then it times 1, 2, 4 ... 32, as far as the text reaches (tokens).

    `fixed` also looks just past the training length.
    """
    lengths = [context_length * 2**n // 2 for n in range(7)]
    if protocol == "fixed":
        lengths += [context_length + past for past in JUST_PAST]
    reach = int(np.diff(split.starts).max()) - 1 if protocol == "fixed" else split.num_tokens - 1
    return sorted(length for length in lengths if length <= reach)


def _too_long(split: Split, length: int, where: str, there_is: int) -> str:
    return (
        f"length {length} is longer than the text: the {split.name} split has {there_is} tokens {where} "
        f"({split.num_documents} documents); ask for a shorter length or give longer text"
    )
