"""How scores become weights: kinds of attention by name, and the kernels that softmax attention runs on (`kernels`).

A position scheme says what happens to embeddings, q, k, v, o and scores; a kind applies its hooks. A kind of one's own
is a class that extends `Kind`, named under the entry-point group `posbench.attention`.
"""

from __future__ import annotations

from posbench.attention.kind import Kind, KVCache
from posbench.attention.linear import Decay, Linear
from posbench.attention.softmax import Softmax
from posbench.catalogue.classes import Classes, check_options, class_named, with_packages
from posbench.config import SchemeConfig
from posbench.schemes import Shape

__all__ = ["KINDS", "Decay", "KVCache", "Kind", "Linear", "Softmax", "build_kind"]

KINDS: Classes[Kind] = with_packages({"softmax": Softmax, "linear": Linear, "decay": Decay}, "posbench.attention")


def build_kind(config: SchemeConfig, shape: Shape) -> Kind:
    """The kind of attention that a row asks for under `scheme.attention`: softmax where it does not say.

    Raises: ConfigError for an unknown kind, an unknown or missing option, or a value the kind refuses.
    """
    options = {name: value for name, value in config.attention.items() if name != "kind"}
    name = config.attention.get("kind", "softmax")
    kind = class_named(name, KINDS, "scheme.attention.kind", Kind)  # type: ignore[type-abstract]
    check_options("scheme.attention", name, kind, options)
    return kind(shape, **options)
