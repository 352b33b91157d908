"""A protocol is one class in one file: nothing else knows its name, and a new one needs nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from rich.console import Console

import posbench
from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.evaluation.charts import evaluated
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.protocols import PROTOCOLS, VALIDATION, Protocol, Score, protocol_named
from posbench.evaluation.question import Question
from posbench.plan import plan
from posbench.reporting.gathering import Found
from posbench.reporting.probes import probe
from posbench.runs import Run
from posbench.training import train

PACKAGE = Path(posbench.__file__).parent
OTHER_POSITIONS = {  # what is no protocol and called "position"
    "reference/biases.py",  # a vector of Transformer-XL's
    "reporting/sections/losses.py",  # the head of a column: whether a scheme is relative
    "reporting/sections/ngrams.py",
}


def literals(file: Path) -> Iterator[str]:
    """The string constants of a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_other_file_knows_a_protocol_by_its_name() -> None:
    """`validation` is the name of a split and of a kind of line in metrics.jsonl too."""
    names = set(PROTOCOLS) - {VALIDATION.name}
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    spoken = {
        (name, literal)
        for name, file in files.items()
        if not name.startswith("evaluation/protocols/")
        for literal in names & set(literals(file))
    }
    assert spoken == {(name, "position") for name in OTHER_POSITIONS}


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
    found: Found = {("nope", 0): [result]}
    assert probe(found, Halves(), None, []).set_index("half")["loss"].to_dict() == {0: 2.5, 1: 1.0}
    words = ["scheme=nope", "model=tiny", "evaluation.lengths=[64]", "evaluation.protocols"]
    once, twice = (
        plan([*words[:-1], f"{words[-1]}={names}"]).evaluation_flops for names in ("[halves]", "[halves,fixed]")
    )
    assert 0 < once < twice
