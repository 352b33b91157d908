"""The rows of conf/scheme as parameters of a test: one of each kind among the fast tests, the others in `test-all`."""

from __future__ import annotations

from typing import Any

import pytest

from posbench.composition import choices

# Of each kind of scheme, of each kind of attention, and of what attention may share.
ONE_OF_EACH_KIND = (
    "alibi",
    "cope",
    "dape",
    "decay_vo_rope",
    "fire",
    "fox",
    "hope",
    "kerple",
    "learned",
    "linear_qk_rope",
    "nope",
    "p_rope_25",
    "path",
    "pope",
    "qk_rope_learned",
    "qk_rope_learned_base",
    "qkvo_rope",
    "rope_nope_interleaved",
    "rotary_pct_25",
    "selective_rope",
    "shared_kv_qkvo_rope",
    "shaw",
    "sink_qk_rope",
    "sinusoidal",
    "ssmax",
    "t5",
    "transformer_xl",
    "window_rope_nope",
    "xpos",
)


def rows() -> list[Any]:
    """Every row, as parameters."""
    marks = {name: () if name in ONE_OF_EACH_KIND else pytest.mark.slow for name in choices("scheme")}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]
