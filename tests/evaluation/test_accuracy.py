"""Accuracy: counts a problem, from which every figure is recomputed; and `exact` is the score of generation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posbench import compose, results
from posbench.config import EvaluationConfig
from posbench.data import Problems
from posbench.evaluation.evaluate import evaluate_run
from posbench.evaluation.protocols import ACCURACY, VALIDATION
from posbench.evaluation.request import Request
from posbench.training import train
from tests.greedy import greedy
from tests.refusals import refuses

SMALL = ["data=copy", "data.letters=8", "data.lengths=[2,4]", "data.longest=8", "evaluation.problems=64"]
SMALL += [
    "model.d_model=32",
    "model.num_heads=2",
    "train.batch_size=32",
    "train.steps=60",
    "train.validation_tokens=400",
]
SMALL += ["tracking=none", "train.device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that has learnt a part of its task."""
    return train(compose([*SMALL, f"runs_dir={tmp_path_factory.mktemp('tasks')}", "scheme=alibi", "train.lr=1e-2"]))


@pytest.fixture(scope="module")
def problems(run):
    return Problems(run.config.data)


class Says:
    """A fake model that answers with a function of the true answers."""

    def __init__(self, answers_for):
        self.answers_for, self.embedding = answers_for, SimpleNamespace(weight=torch.zeros(1))

    def answered(self, tokens, targets, positions=None):
        true = targets[targets >= 0]
        return torch.ones(len(true)), self.answers_for(true)


def test_who_is_right_has_1_and_who_guesses_has_chance(problems):
    settings, split = EvaluationConfig(problems=500, batch_tokens=100), problems.splits["test"]

    def scored(answers_for):
        return ACCURACY.score(Says(answers_for), problems, split, 8, settings, 8, lambda tokens: None)[1]

    right, wrong = scored(lambda true: true), scored(lambda true: (true + 1) % 8)
    assert (right["accuracy"], right["exact"], wrong["accuracy"], wrong["exact"]) == (1, 1, 0, 0)
    guessed = scored(lambda true: torch.randint(8, true.shape, generator=torch.Generator().manual_seed(0)))
    assert abs(guessed["accuracy"] - guessed["chance"]) < 0.03 and guessed["exact"] < 0.01
    assert guessed["targets_total"] == 500 * 8 and guessed["nll_mean"] == 1


def test_exact_is_the_score_of_greedy_generation(run, problems):
    """Each problem is generated token by token from its beginning."""
    [result] = evaluate_run(run, problems, Request((3,), ("accuracy",)))
    model, batch = run.load_model(), problems.splits["test"].at_length(3, 64)
    generated = []
    for tokens in torch.from_numpy(batch.tokens):
        completion = greedy(model, tokens[None, :4], 7)
        generated.append(completion == tokens[4:].tolist())
    rows = result.windows
    assert generated == (rows["right"] == rows["answers"]).tolist()
    assert 0.1 < result.header["exact"] == np.mean(generated) < 0.98, "some are right and some are not"


def test_every_figure_follows_from_the_counts(run, problems):
    stored = evaluate_run(run, problems, Request())
    assert [result.length for result in stored] == [4, 5, 8]
    tidy = results(run.path.parents[1], tidy=True)
    for result in stored:
        rows = result.windows
        assert len(rows) == 64 and (rows["answers"] == result.length).all() and list(rows["problem"]) == list(range(64))
        figures = {
            "accuracy": rows["right"].sum() / rows["answers"].sum(),
            "exact": (rows["right"] == result.length).mean(),
        }
        metrics = tidy[(tidy["protocol"] == "accuracy") & (tidy["length"] == result.length)]
        for name, figure in figures.items():
            of_metric = metrics[metrics["metric"] == name]
            assert result.header[name] == pytest.approx(figure, abs=1e-15)
            assert of_metric["value"].sum() / of_metric["count"].sum() == pytest.approx(figure, abs=1e-15)
        loss = metrics[metrics["metric"] == "loss"]
        assert loss["value"].sum() / loss["count"].sum() == pytest.approx(result.header["nll_mean"])
    assert set(tidy["data.task"]) == {"copy"} and set(tidy["data.lengths"]) == {"[2, 4]"}


def test_the_loss_of_a_run_is_that_of_its_validation_problems(run, problems):
    batch = problems.splits["validation"].at_trained_lengths(400 // 8)
    losses, targets = run.load_model().nll(*map(torch.from_numpy, (batch.inputs, batch.tokens[:, 1:]))), batch.answers
    mean = float(losses[torch.from_numpy(targets >= 0)].double().mean().detach())
    assert run.manifest.loss == pytest.approx(mean, abs=1e-6) and run.manifest.bits_per_byte is None
    last = run.logged[-1]
    assert last["loss"] == run.manifest.loss and 0.2 < last["accuracy"] < 1 and "bits_per_byte" not in last
    summary = results(run.path.parents[1]).iloc[0]
    assert summary["loss"] == pytest.approx(run.manifest.loss) and np.isnan(summary["bits_per_byte"])
    assert summary["accuracy"] == pytest.approx(last["accuracy"]) and 0 < summary["exact"] < summary["accuracy"]


def test_protocols_of_text_refuse_tasks_and_accuracy_refuses_text(run, problems):
    refuses(
        "protocol order scores text, and data=copy is a task: take another, such as acc",
        evaluate_run,
        run,
        problems,
        Request((8,), ("order",)),
    )
    refuses("protocol fixed scores text", train, compose([*SMALL, "evaluation.protocols=[fixed]"]))
    VALIDATION.check(run.config)
