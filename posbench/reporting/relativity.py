"""Is a scheme relative? Measured, so that the loss table does not rest on what a scheme promises."""

from __future__ import annotations

from posbench.config import ConfigError, SchemeConfig


def measure_relativity(scheme: SchemeConfig) -> str:
    """`relative` where the logits of a small float64 decoder stay when all positions are shifted, `absolute` where
    they move, `unclear` in between, `not measured` where the scheme cannot be built into that decoder.
    """
    import torch

    from posbench import verify
    from posbench.composition import compose
    from posbench.model import build_model

    config = compose(list(verify.MODEL))
    config.scheme = scheme
    try:
        model = build_model(config, verify.VOCAB)
        verify.randomise(model)
        with torch.no_grad():
            drift = verify.shift_drift(model.double().eval(), verify.random_tokens())
    except (ConfigError, ValueError, RuntimeError):
        return "not measured"
    return "relative" if drift <= verify.EXACT else "absolute" if drift > verify.APART else "unclear"
