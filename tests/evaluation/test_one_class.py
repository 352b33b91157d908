"""A protocol is one class in one file, and a new one needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pandas as pd
import pytest
from rich.console import Console

import posbench
from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.evaluation.charts import evaluated
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.protocols import PROTOCOLS, Protocol, Score, protocol_named
from posbench.evaluation.question import Question
from posbench.plan import plan
from posbench.runs import Run
from posbench.training import train


def test_a_name_that_is_none_is_answered_with_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'retrieval'\? \(known: validation, fixed, "):
        protocol_named("retreival")


class Halves(Protocol):
    """A protocol of a test: a made-up loss for each half of each document."""

    name = "halves"
    caption = "Loss by half of the document."
    columns: ClassVar[tuple[str, ...]] = ("document", "half", "targets", "nll")
    groups: ClassVar[tuple[str, ...]] = ("half",)
    scores: ClassVar[tuple[Score, ...]] = (Score("loss", lambda sums: sums["nll"] / sums["targets"], "the loss"),)

    def score(self, *_: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
        rows = pd.DataFrame(
            {"document": [0, 0, 1, 1], "half": [0, 1, 0, 1], "targets": 4, "nll": [8.0, 4.0, 12.0, 4.0]}
        )
        return rows, {"nll_mean": 1.75, "targets_total": 16, "windows": 2, "documents": 2}

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 2 * length


def test_a_new_one_is_scored_stored_tracked_planned_and_reported(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROTOCOLS, "halves", Halves())  # type: ignore[arg-type]
    run = train(config("scheme=nope", "train.steps=1", "evaluation.protocols=[halves]"))
    evaluate_runs([run], Question(lengths=(64,)), Console(quiet=True))
    (result,) = [result for result in Run(run.path).results()[0] if result.protocol == "halves"]
    assert evaluated(result).summary["eval/halves/nll@64"] == 1.75
    rows = posbench.results(run.path, tidy=True)
    sums = rows[rows["protocol"] == "halves"].groupby("first")[["value", "count"]].sum()
    assert (sums["value"] / sums["count"]).to_dict() == {0: 2.5, 1: 1.0}
    words = ["scheme=nope", "model=tiny", "evaluation.lengths=[64]", "evaluation.protocols"]
    once, twice = (
        plan([*words[:-1], f"{words[-1]}={names}"]).evaluation_flops for names in ("[halves]", "[halves,fixed]")
    )
    assert 0 < once < twice
