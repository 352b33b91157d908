"""Losses of finished runs at lengths within and beyond the training length: protocols, scoring, stored results."""

from posbench.evaluation.evaluate import evaluate_run, score_split
from posbench.evaluation.question import Question, parse_length
from posbench.evaluation.texts import text_named

__all__ = ["Question", "evaluate_run", "parse_length", "score_split", "text_named"]
