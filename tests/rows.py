"""The rows of conf/scheme as parameters of a test: one of each way to act in the fast tests, all in `test-all`."""

from __future__ import annotations

from typing import Any

import pytest

from posbench.catalogue.choices import choices

# Of each way of a scheme to act, of each kind of attention, and of what attention may share.
ONE_OF_EACH = (
    "alibi",
    "canon_qk_rope",
    "decay_vo_rope",
    "fire",
    "fox",
    "gdn",
    "grape_ap",
    "hybrid_rotary_pct_25",
    "kda",
    "key_offset",
    "learned",
    "linear_qk_rope",
    "mla",
    "nope",
    "path",
    "pope",
    "qk_rope_learned",
    "qkvo_rope",
    "rope_nope_interleaved",
    "selective_rope",
    "shared_kv_qkvo_rope",
    "sink_qk_rope",
    "smear_nope",
    "ssmax",
    "t5",
    "transformer_xl",
    "window_rope_nope",
    "xpos",
)


def rows() -> list[Any]:
    """Return all rows as parameters of a test."""
    marks = {name: () if name in ONE_OF_EACH else pytest.mark.slow for name in choices("scheme")}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]
