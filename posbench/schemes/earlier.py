"""Give hooks the rows before each token: zeros before the window and before the document, cached between pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.config import ConfigError

# n -> the tensor x of a hook, n tokens earlier: row t holds x's row t - n. n is at most the scheme's `looks_back`.
Earlier = Callable[[int], Tensor]


class EarlierRows(NamedTuple):
    """Access to the tokens before the current ones, for one layer's scheme; a row is a token.

    Rows are counted in the order of the window, whatever gaps its positions have.
    """

    positions: Tensor | None = None  # [B, T] or more, ending with the current tokens, if documents are masked
    first: int = 0  # position of the first token of each document
    cached: dict[str, Tensor] | None = None  # last rows of each hook's tensor, by hook; None for a whole window
    path: str = ""  # prefix of the keys of `cached`, of a member of a combined scheme

    def of_member(self, n: int) -> EarlierRows:
        """Return the object for scheme number `n` of several combined, which caches its rows separately."""
        return self._replace(path=f"{self.path}{n}.")

    def earlier(self, hook: str, x: Tensor, looks_back: int) -> Earlier:
        """Return the function of n that gives `x`, [B, T, C] or [B, heads, T, D], n tokens earlier."""
        # The hook may not call it: then nothing is cached.
        key = self.path + hook
        last_rows = self.cached.get(key) if self.cached else None  # read now: the first call replaces it
        return partial(_earlier, self, key, x, last_rows, looks_back)


def _earlier(past: EarlierRows, key: str, x: Tensor, last_rows: Tensor | None, looks_back: int, n: int) -> Tensor:
    """Return the rows n tokens before the rows of `x`, with zeros before the document.

    Arguments: last_rows, the cached `looks_back` rows before x, or None (zeros). They are an argument, because the
    first of several calls replaces them in the cache. Raises: ConfigError for an n outside 0 .. looks_back.
    """
    if not 0 <= n <= looks_back:
        raise ConfigError(
            f"earlier({n}) must be between 0 and looks_back={looks_back}: set looks_back = {n} in the scheme's class"
            if n > looks_back
            else f"earlier({n}) would read later tokens: give a number of tokens back, 0 or more"
        )
    if n == 0:
        return x
    T = x.shape[-2]
    if past.cached is None:
        shifted = F.pad(x, (0, 0, n, 0))[..., :T, :]
    else:
        # The first piece of the input has nothing before it.
        if last_rows is None:
            last_rows = x.new_zeros(*x.shape[:-2], looks_back, x.shape[-1])
        shifted = torch.cat((last_rows[..., looks_back - n :, :], x), dim=-2)[..., :T, :]
        # Cloned, because a view would keep the whole tensor in memory.
        past.cached[key] = torch.cat((last_rows, x[..., -looks_back:, :]), dim=-2)[..., -looks_back:, :].clone()
    if past.positions is None:
        return shifted
    # Rows of the previous document count as zeros too. Positions may begin before x; less the first position of the
    # token's document, each is the number of tokens before it in the document.
    tokens_before = past.positions[:, -T:] - past.first  # [B, T]
    # x is [B, T, C] or [B, heads, T, D]: a dimension for the heads, if there are any, and one for the channels.
    return shifted.masked_fill(tokens_before.reshape(-1, *(1 for _ in x.shape[1:-2]), T, 1) < n, 0)


def convolution_weight(*sizes: int) -> nn.Parameter:
    """Return weights of a convolution over tokens, [..., width], uniform in +-1 / sqrt(width) like `Conv1d`'s."""
    bound = sizes[-1] ** -0.5
    return nn.Parameter(torch.empty(sizes).uniform_(-bound, bound))


def convolved(earlier: Earlier, weight: Tensor, residual: float = 0.0) -> Tensor:
    """Return `residual * x_t + sum_n weight[..., n] x_{t-n}`, in at least the dtype of `weight`.

    Arguments: weight, [..., width], whose first dimensions broadcast to x's.
    """
    y = earlier(0) * (residual + weight[..., 0])
    for n in range(1, weight.shape[-1]):
        y = y + earlier(n) * weight[..., n]
    return y
