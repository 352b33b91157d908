"""Canon layers: short convolutions over the last few tokens, with a residual (Allen-Zhu 2025, arXiv 2512.17351)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape, require_integer
from posbench.schemes.earlier import Earlier, convolution_weight, convolved
from posbench.system.torch_internals import as_dtype

SITES = ("hidden", "q", "k", "v", "o")


class Canon(Scheme):
    """Canon layers: add `sum_{n=0..width-1} w_n x_{t-n}` to x_t, with a number w_n for each channel and layer.

    At site `hidden`, x is the hidden states after the layer's norm (Canon A); at q, k and v the result of the
    projection (Canon B). Canon C and D, in the feed-forward network, are not defined here. There is no activation.

    Options: `sites`, any of hidden, q, k, v, o; `width`, 4 in the authors' code.
    Raises: ConfigError for an unknown or repeated site, or a width below 1.
    """

    per_layer = True
    keeps_norms = False
    decayed = frozenset(f"{site}_weight" for site in SITES)

    def __init__(self, shape: Shape, sites: Sequence[str] = ("hidden", "q", "k", "v"), width: int = 4) -> None:
        super().__init__(shape)
        if not isinstance(sites, Sequence) or len(set(sites)) != len(sites) or not {*sites} <= {*SITES}:
            raise ConfigError(
                f"scheme.sites={sites!r} must be a list of any of {list(SITES)}, each once: scheme.sites=[hidden,q,k,v]"
            )
        self.sites = frozenset(sites)
        # The kernel covers the current token too.
        self.looks_back = require_integer("width", width, 1, "4 is the authors'") - 1
        # One number per channel and token of the kernel: [C, width], or [heads, 1, D, width]. They are drawn one after
        # the other, in the order of SITES, because a set has none.
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "o": shape.num_heads}
        for site in (site for site in SITES if site in self.sites):
            sizes = (shape.d_model,) if site == "hidden" else (heads[site], 1, shape.head_dim)
            self.register_parameter(f"{site}_weight", convolution_weight(*sizes, width))

    @property
    def acts_on(self) -> frozenset[str]:
        return self.sites

    def hidden(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return self._convolved("hidden", x, earlier)

    def q(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return self._convolved("q", x, earlier)

    def k(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return self._convolved("k", x, earlier)

    def v(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return self._convolved("v", x, earlier)

    def o(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return self._convolved("o", x, earlier)

    def _convolved(self, site: str, x: Tensor, earlier: Earlier) -> Tensor:
        if site not in self.sites:
            return x
        weight = getattr(self, f"{site}_weight")  # [C, width] or [heads, 1, D, width]
        return as_dtype(convolved(earlier, weight, residual=1.0), x.dtype)

    def flops_per_token(self, length: int) -> float:
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())
