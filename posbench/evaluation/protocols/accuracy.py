"""Score the answers of a task: the share that is right given the true tokens before them, by length in items.

So `exact`, the share of problems with no wrong answer, is also the score of greedy decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from posbench.data import Batch, ProblemSplit
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Metric, Scored

if TYPE_CHECKING:
    from posbench.config import EvaluationConfig
    from posbench.model.decoder import ScoredModel

BEYOND = (1, 1.25, 2, 4)  # lengths to score, as multiples of the longest trained length


class Accuracy(EvalProtocol):
    """Evaluation protocol for tasks: accuracy on `evaluation.problems` problems of the test split per length.

    The problems are the same for every scheme and seed.
    """

    name = "accuracy"
    rank = 8
    of_text: ClassVar[bool] = False
    of_tasks: ClassVar[bool] = True
    decided_by: ClassVar[tuple[str, ...]] = ("problems",)
    text_column: ClassVar[str] = "problem"
    count_column: ClassVar[str] = "answers"
    unit: ClassVar[str] = "items"
    figure_names: ClassVar[tuple[str, ...]] = ("accuracy", "exact", "nll")
    headline: ClassVar[str] = "accuracy"
    headline_key: ClassVar[str] = "accuracy"

    def score(
        self,
        model: ScoredModel,
        corpus: Any,
        split: ProblemSplit,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> Scored:
        rows = score_problems(model, split.at_length(length, settings.problems), settings.batch_tokens, advance)
        task, answers = split.problems.task, int(rows["answers"].sum())
        longest_trained = split.problems.config.lengths[1]
        return rows.astype({"nll": np.float32}), {
            "problems": len(rows),
            "targets_total": answers,
            "nll_mean": float(rows["nll"].sum()) / answers,
            "accuracy": int(rows["right"].sum()) / answers,
            "exact": float((rows["right"] == rows["answers"]).mean()),
            "chance": task.chance(longest_trained),  # accuracy of guessing
            "learnt": task.learnt,  # accuracy at the longest trained length that counts as having learnt the task
        }

    def metrics(self, columns: Any) -> Sequence[Metric]:
        right, answers = columns["right"], columns["answers"]
        return [
            ("accuracy", right, answers),
            ("exact", right == answers, np.ones(len(right))),
            ("loss", columns["nll"], answers),
        ]

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.problems * length

    def shortest(self, settings: EvaluationConfig) -> int:
        return 1

    def default_lengths(self, context_length: int, split: ProblemSplit | None = None) -> list[int]:
        """Return the longest trained length times 1, 1.25, 2 and 4, in items, up to the longest allowed in tests."""
        lengths = [int(context_length * times) for times in BEYOND]
        return [length for length in lengths if split is None or length <= (split.problems.config.longest or 0)]


def score_problems(model: ScoredModel, batch: Batch, batch_tokens: int, advance: Advance) -> pd.DataFrame:
    """Return a table, a row per problem: problem (its number), right and answers (counts), nll (sum, nats)."""
    losses, predicted = answered(model, batch, batch_tokens, advance)
    is_answer = batch.answers >= 0  # -1: the token is no answer
    return pd.DataFrame(
        {
            "problem": np.arange(len(is_answer)),
            "right": ((predicted == batch.answers) & is_answer).sum(axis=1),
            "answers": is_answer.sum(axis=1),
            "nll": losses.sum(axis=1),
        }
    )


def answered(
    model: ScoredModel, batch: Batch, batch_tokens: int, advance: Advance = lambda tokens: None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Predict each answer given the true tokens before it.

    Arguments: batch_tokens, the most tokens of a forward pass; advance, called with the number of tokens after each.
    Returns: losses [B, T], nats, 0 for tokens that are no answers; the most likely tokens [B, T], -1 there.
    """
    import torch

    decoder = cast(Any, model)  # tasks are for models that were trained here, which are posbench's decoders
    device, (rows, width) = decoder.embedding.weight.device, batch.answers.shape
    losses, predicted = np.zeros((rows, width)), np.full((rows, width), -1)
    rows_per_pass = max(1, batch_tokens // width)
    for begin in range(0, rows, rows_per_pass):
        part = slice(begin, begin + rows_per_pass)
        # A batch may lack a field, such as positions, which is then None.
        tensors = [None if array is None else torch.from_numpy(array[part]).to(device) for array in batch]
        sent = Batch(*tensors)
        with torch.no_grad():
            answer_losses, tokens = decoder.answered(sent.inputs, sent.targets, sent.positions)
        is_answer = batch.answers[part] >= 0
        # Count NaN as infinite, since pandas leaves NaN out of its sums.
        losses[part][is_answer] = answer_losses.double().nan_to_num(nan=math.inf, posinf=math.inf).cpu().numpy()
        predicted[part][is_answer] = tokens.cpu().numpy()
        advance(len(is_answer) * width)
    return losses, predicted
