"""Losses of finished runs at lengths within and beyond the training length: protocols, scoring, stored results."""

from posbench.evaluation.evaluate import Question, evaluate_run, parse_length, score_split

__all__ = ["Question", "evaluate_run", "parse_length", "score_split"]
