"""How scores become weights: kinds of attention by name, and the kernels that softmax attention runs on (`kernels`).

A position scheme says what happens to embeddings, q, k, v, o and scores; a kind applies its hooks. A kind of one's own
is a class that extends `Kind`, named under the entry-point group `posbench.attention`.
"""

from __future__ import annotations

from posbench.attention.kind import Kind, KVCache
from posbench.attention.linear import Decay, Linear
from posbench.attention.softmax import Softmax
from posbench.catalogue.classes import Classes, check_options, class_named, with_packages
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes import Layers, Shape

__all__ = ["KINDS", "Decay", "KVCache", "Kind", "Linear", "Softmax", "build_kind", "check_kind"]

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


def check_kind(kind: Kind, layers: Layers) -> None:
    """Raises: ConfigError where a scheme's bias reads keys and this kind has none, or it has a window and this none."""
    if any(scheme.window for scheme in layers) and not kind.takes_windows:
        raise ConfigError(
            f"scheme.window is for attention of the kind softmax, and this is {type(kind).__name__.lower()}: leave it "
            "out"
        )
    readers = [type(scheme).__name__ for scheme in layers if scheme.reads_keys]
    if readers and not kind.has_keys:
        raise ConfigError(
            f"{readers[0]} reads keys, which attention of the kind {type(kind).__name__.lower()} does not keep: take "
            "scheme.attention={kind: softmax}, or another scheme"
        )
