"""Keep freed memory in the process, so that a training step does not ask the kernel for the same pages again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3), glibc


def keep_freed_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and never to give it back. Returns whether it took it.

    A step allocates and frees the same activations every time; by default glibc maps and unmaps each of them, and the
    kernel clears every page anew. See docs/performance.md for what it gains. Elsewhere than on glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
