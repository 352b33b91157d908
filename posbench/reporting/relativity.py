"""Is a scheme relative? Measured, so that the loss table does not rest on what a scheme promises."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from posbench.config import Config, ConfigError, SchemeConfig


def measure_relativity(scheme: SchemeConfig) -> str:
    """`relative` where the logits of a small float64 decoder stay when all positions are shifted, `absolute` where they
    move, `unclear` in between, `not measured` where the scheme cannot be built into that decoder.
    """
    import torch

    from posbench import verify
    from posbench.model import build_model

    try:
        model = build_model(replace(_small_decoder(), scheme=scheme), verify.VOCAB)
        verify.randomise(model)
        with torch.no_grad():
            drift = verify.shift_drift(model.double().eval(), verify.random_tokens())
    except (ConfigError, ValueError, RuntimeError):
        return "not measured"
    return verify.relativity(drift)


@cache
def _small_decoder() -> Config:
    """The decoder in which `posbench verify` examines schemes."""
    from posbench.composition import compose
    from posbench.verify import MODEL

    return compose(list(MODEL))
