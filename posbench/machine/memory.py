"""Memory while training: it is not given back when freed, and a message explains when there is too little."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from posbench.config import ConfigError, TrainConfig
from posbench.machine.device import Device

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3), glibc


def keep_freed_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and never to give the heap back. Returns whether it agreed.

    A step allocates and frees the same activations every time; by default glibc maps and unmaps each of them, and the
    kernel clears every page anew. docs/internals/speed.md says what this gains. Without glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def exhaustion_explained(device: Device, advice: str) -> Iterator[None]:
    """Turn a failed allocation on a CPU or a GPU into a message about what to lower. Nothing is lowered by itself.

    Arguments: advice, what was asked for and which setting to lower.
    Raises: ConfigError naming the request, the peak and the advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_exhaustion(error):
            raise
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f" when {request[1]} more were asked for" if request else ""
        peak = f"the peak before was {device.peak_memory_bytes() / 1e9:.2f} GB"
        raise ConfigError(f"out of memory on {device.torch}{more}: {peak}, with {advice}") from error


def training_advice(config: TrainConfig) -> str:
    """For a training run that ran out of memory."""
    return (
        f"train.batch_size={config.batch_size} windows of train.context_length={config.context_length} tokens "
        f"in train.accumulation={config.accumulation} parts. Raise train.accumulation (the same batch in smaller "
        "parts) or lower train.batch_size; while validating, lower evaluation.batch_tokens"
    )


def _is_exhaustion(error: Exception) -> bool:
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in message for words in ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
    )
