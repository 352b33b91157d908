"""Mix the tokens before into embeddings, hidden states or keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape, require_integer
from posbench.schemes.earlier import Earlier, convolution_weight, convolved
from posbench.schemes.frequencies import PartialRotary
from posbench.schemes.rotary import TemperedTurn, Turn
from posbench.system.torch_internals import as_dtype


class Smear(Scheme):
    """Smear: `e_t := e_t + s sigmoid(w . n_t) e_{t-1}`, with n_t the first channels of `e_t / rms(e_t)`.

    Add a part of the previous token's embedding to each embedding (karpathy/nanochat, nanochat/gpt.py).

    e is the token embeddings. nanochat normalises embeddings before it smears them; here only the gate reads them
    normalised. w is initialised like the model's matrices and s to 0, so the scheme starts as NoPE.
    Options: `channels`, how many of d_model the gate reads (24 in nanochat; all if there are fewer).
    Raises: ConfigError unless it is a whole number above 0.
    """

    looks_back = 1
    decayed = frozenset({"w"})

    def __init__(self, shape: Shape, channels: int = 24) -> None:
        super().__init__(shape)
        self.w = self.normal(1, min(require_integer("channels", channels, 1, "24 is nanochat's"), shape.d_model))
        self.s = nn.Parameter(torch.zeros(1))

    def embed(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        wide = x.to(self.w.dtype)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
        gate = (normal[..., : self.w.shape[1]] @ self.w.mT).sigmoid()  # [B, T, 1]
        return as_dtype(wide + self.s * gate * earlier(1), x.dtype)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of the gate and of adding the previous embedding, shared among the layers."""
        # They are spent once, before the first layer, and each layer reports its share.
        return 2.0 * (self.w.numel() + self.shape.d_model) / self.shape.num_layers


class KeyOffset(PartialRotary):
    """Key offset: rotate the first channels of q and k, and take the other channels of k_t from k_{t-1}.

    Take the unrotated part of each key from the previous token (KellerJordan/modded-nanogpt, PR 169).

    A query can then find a token by the one before it, which otherwise needs two layers (induction). The first token of
    a window or document gets zeros there, unlike in modded-nanogpt.

    Options: those of `PartialRotary`; `fraction` is the rotated part (0.5 in modded-nanogpt).
    """

    looks_back = 1
    keeps_norms = False

    def k(self, x: Tensor, pos: Turn | TemperedTurn, earlier: Earlier) -> Tensor:  # type: ignore[override]
        # modded-nanogpt keeps the first token's own channels, and reads across documents.
        return torch.cat((super().k(x, pos)[..., : self.width], earlier(1)[..., self.width :]), dim=-1)


SITES = ("hidden", "q", "k", "v", "o")


def _convolving(site: str) -> Any:
    # Return the hook of Canon at a site.
    def hook(self: Canon, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:
        if site not in self.sites:
            return x
        weight = getattr(self, f"{site}_weight")  # [C, width] or [heads, 1, D, width]
        return as_dtype(convolved(earlier, weight, residual=1.0), x.dtype)

    return hook


class Canon(Scheme):
    """Canon layers: add `sum_{n=0..width-1} w_n x_{t-n}` to x_t, with a number w_n for each channel and layer.

    Short convolutions over the last few tokens, with a residual (Allen-Zhu 2025, arXiv 2512.17351).

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

    hidden, q, k = _convolving("hidden"), _convolving("q"), _convolving("k")
    v, o = _convolving("v"), _convolving("o")

    def flops_per_token(self, length: int) -> float:
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())
