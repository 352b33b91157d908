"""A protocol, a task and an optimizer of one's own, each a class in one file with options, in one sweep."""

from pathlib import Path

import pandas as pd
import pytest
from joblib.externals.loky import get_reusable_executor

from posbench.evaluation.protocols import PROTOCOLS

TASK = """
import numpy as np

from posbench.data.tasks import Task, alphabet


class Reverse(Task):
    def __init__(self, letters: int = 8, doubled: bool = False):
        self.size, self.doubled = letters, doubled
        self.tokens = [*alphabet(letters), "|"]

    def problems(self, length, number, rng):
        words = rng.integers(self.size, size=(number, length))
        answers = np.repeat(words[:, ::-1], 1 + self.doubled, axis=1)
        tokens = np.hstack([words, np.full((number, 1), self.size), answers])
        return tokens, np.arange(tokens.shape[1]) > length

    def chance(self, length):
        return 1 / self.size
"""
PROTOCOL = """
import numpy as np

from posbench.evaluation.protocols.accuracy import Accuracy, score_problems


class Last(Accuracy):
    def __init__(self, answers: int = 1, problems: int = 8):
        self.answers, self.problems = answers, problems

    def score(self, model, corpus, split, length, settings, anchor, advance):
        batch = split.at_length(length, self.problems)
        is_answer = batch.answers >= 0
        place = np.cumsum(is_answer[:, ::-1], axis=1)[:, ::-1]  # counted from the last answer, which is 1
        batch = batch._replace(answers=np.where(is_answer & (place <= self.answers), batch.answers, -1))
        rows = score_problems(model, batch, settings.batch_tokens, advance)
        counted = int(rows["answers"].sum())
        return rows, {"targets_total": counted, "nll_mean": 0.0, "accuracy": int(rows["right"].sum()) / counted}


Last.name = "last"
"""
OPTIMIZER = """
import torch

from posbench.training.optimizers import Optimizer


class Lion(Optimizer):
    def __init__(self, *given, beta: float = 0.9, memory: float = 0.99):
        super().__init__(*given)
        self.beta, self.memory = beta, memory
        for name, weight in self.weights.items():
            self.moments[name]["average"] = torch.zeros_like(weight)

    def update(self, divisor, healthy):
        for name, weight in self.weights.items():
            gradient, average = weight.grad / divisor, self.moments[name]["average"]
            step = self.rates[name] * gradient.lerp(average, self.beta).sign()
            weight.sub_(torch.where(healthy, step, 0.0))
            average.copy_(torch.where(healthy, gradient.lerp(average, self.memory), average))
"""
SWEEP = (
    *("train", "-m", "model=tiny", "train.steps=3", "train.lr=3e-4", "scheme=nope,qk_rope", "experiment_name=own"),
    *("data=mine/task.py:Reverse", "data.letters=4", "data.doubled=true", "data.lengths=[4,8]"),
    *("train.optimizer=mine/optimizer.py:Lion", "train.optimizer_options.beta=0.95"),
    *(
        "train.optimizer_options.memory=0.98",
        "evaluation.protocols=[mine/protocol.py:Last:answers=2:problems=6,accuracy]",
    ),
)


@pytest.fixture
def files(posbench):
    get_reusable_executor().shutdown()  # its workers keep the folder that they were started in
    # The commands run in a folder of their own.
    Path("mine").mkdir()
    for name, text in (("task", TASK), ("protocol", PROTOCOL), ("optimizer", OPTIMIZER)):
        Path("mine", f"{name}.py").write_text(text)
    known = dict(PROTOCOLS)
    yield
    # Other tests list the protocols of posbench.
    PROTOCOLS.clear()
    PROTOCOLS.update(known)


@pytest.mark.usefixtures("files")
def test_classes_of_ones_own_with_options_are_trained_scored_and_reported(posbench):
    assert posbench(*SWEEP).status == 0
    result = posbench("eval", "own", "--length", "8", "--jobs", "2")
    assert result.status == 0 and "last-answers=2-problems=6" in result.out
    stored = pd.read_parquet("runs/own/nope/seed=0/eval/last-answers=2-problems=6/8.parquet")
    assert (stored["answers"] == 2).all() and len(stored) == 6
    assert posbench("report", "own", "--output", "report").status == 0
    page = Path("report/report.md").read_text(encoding="utf-8")
    assert "## last-answers=2-problems=6: accuracy" in page and "'beta': 0.95" in page


@pytest.mark.usefixtures("files")
def test_an_option_that_a_protocol_lacks_is_refused(posbench):
    assert (
        "protocol.answer is not an option"
        in posbench("eval", "x", "--protocol", "mine/protocol.py:Last:answer=2").refusal
    )
