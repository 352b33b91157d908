"""Run our own gradient functions as plain code, so that `torch.func` can transform them (`posbench.training.stack`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Our `autograd.Function`s save memory and passes over tensors, but write into tensors and hide their computation.
_state = {"plain": False}


@contextmanager
def plain_code() -> Iterator[None]:
    """Run plain code in place of our own gradient functions within the context."""
    previous = _state["plain"]
    _state["plain"] = True
    try:
        yield
    finally:
        _state["plain"] = previous


def is_plain() -> bool:
    """Return whether plain code is asked for."""
    return _state["plain"]


class _Ignored:
    """The context of a forward pass whose gradient torch takes by itself."""

    # As many as the longest list of arguments needs, and more.
    needs_input_grad = 16 * (False,)

    def save_for_backward(self, *tensors: Any) -> None:
        """Save nothing."""


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`, or the same computed by its forward pass as plain code."""
    if is_plain():
        return function.forward(_Ignored(), *arguments)
    return function.apply(*arguments)
