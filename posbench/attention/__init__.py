"""The kinds of attention by name (`scheme.attention.kind`), and the kernels of softmax attention (`kernels`).

To add a kind, extend `Kind` and name the class under the entry-point group `posbench.attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posbench.attention.gdn import GatedDeltaRule
from posbench.attention.kind import Kind, KVCache
from posbench.attention.latent import Grouped, Latent
from posbench.attention.linear import DecayAttention, LinearAttention
from posbench.attention.softmax import Softmax
from posbench.catalogue.classes import Classes, check_options, class_named, with_packages
from posbench.schemes import Shape

__all__ = ["KINDS", "DecayAttention", "KVCache", "Kind", "LinearAttention", "Softmax", "build_kind"]

KINDS: Classes[Kind] = with_packages(
    {
        "softmax": Softmax,
        "linear": LinearAttention,
        "decay": DecayAttention,
        "gdn": GatedDeltaRule,
        "mla": Latent,
        "gqa": Grouped,
    },
    "posbench.attention",
)


def build_kind(attention: Mapping[str, Any], shape: Shape) -> Kind:
    """Build the kind of attention that a scheme's entry `attention` names, softmax by default.

    Raises: ConfigError for an unknown kind, an unknown or missing option, or a value that the kind refuses.
    """
    options = {name: value for name, value in attention.items() if name != "kind"}
    name = attention.get("kind", "softmax")
    kind = class_named(name, KINDS, "scheme.attention.kind", Kind)  # type: ignore[type-abstract]
    check_options("scheme.attention", name, kind, options)
    return kind(shape, **options)
