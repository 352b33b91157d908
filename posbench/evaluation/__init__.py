"""Losses of finished runs at lengths within and beyond the training length: protocols, scoring, stored results.

Names are imported when first used, so that what asks the protocols alone imports neither Hydra nor the data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posbench.evaluation.evaluate import evaluate_run, score_split
    from posbench.evaluation.question import Question
    from posbench.evaluation.texts import text_named

__all__ = ["Question", "evaluate_run", "score_split", "text_named"]

_HOMES = {
    "Question": "question",
    "evaluate_run": "evaluate",
    "score_split": "evaluate",
    "text_named": "texts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'posbench.evaluation' has no attribute {name!r}")
    return getattr(import_module(f"posbench.evaluation.{_HOMES[name]}"), name)
