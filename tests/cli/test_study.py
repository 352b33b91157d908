"""`posbench study`: from a scheme's file to the sentence, with one test at the end."""

import json
from pathlib import Path

import pytest

from posbench.runs.finding import find_runs

STEEP = """
from posbench.schemes import Scheme


class Steep(Scheme):
    def bias(self, q, k, gates, at):
        return at.look_up((-0.5 * at.distances(q)).expand(self.shape.num_heads, -1))


class Later(Scheme):
    def bias(self, q, k, gates, at):
        return at.look_up((0.5 * at.distances(q)).expand(self.shape.num_heads, -1)).float()


class Broken(Scheme):
    def q(self, x, pos):
        return x * float("nan")
"""


@pytest.fixture
def study(posbench, short):
    """Return a function that studies a class of `mine.py` by runs of two steps."""
    Path("mine.py").write_text(STEEP, encoding="utf-8")
    words = [word for word in short if not word.startswith("hydra/")]
    return lambda name, *more: posbench("study", f"mine.py:{name}", *words, "--jobs", "1", *more)


def trained():
    """Return {run folder: time of its last change} for all runs."""
    return {run.path: (run.path / "run.json").stat().st_mtime_ns for run in find_runs(Path("runs"))}


@pytest.mark.slow
def test_a_study_ends_with_sentence_verdict_table_and_packs_and_is_repeated_without_training(study, posbench):
    words = ("--against", "nope", "experiment.planned_seeds=3")
    first = study("Steep", *words)
    judged = posbench("judge", "study-steep", "--scheme", "steep", "--json")
    judgement = json.loads(judged.out)
    assert first.status == judged.status and judgement["scope"] == "best rates" and judgement["baseline"] == "nope"
    assert judgement["at_one_rate"]["seeds"] == 2, "the screen stays beside the test"
    assert "which is not the claim" in Path("runs/study-steep/report/report.md").read_text(encoding="utf-8")
    sentence = " ".join(first.out.split())
    assert f"{judgement['gap']:+.3f} nats per token" in sentence
    assert "3 seeds, paired; p = " in sentence and "Holm's correction over 1 pair)" in sentence
    assert "posbench study mine.py:Steep" in first.out.splitlines()[-1]
    # Nothing was tested while it trained.
    assert not any(word in first.error for word in ("better", "worse", "p = "))
    for file in ("study-steep.zip", "study-steep-tune.zip", "study-steep/report/latex/loss.tex"):
        assert Path("runs", file).is_file()
    before = trained()
    again = study("Steep", *words)
    assert again.status == first.status and trained() == before
    # The plan knows the noise of the runs now; the rest is the same.
    assert again.out.partition("posbench: ")[2] == first.out.partition("posbench: ")[2]
    # Five rates with two seeds and the best two with one more; the screen's runs count.
    assert len(before) == 2 * (5 * 2 + 2)


def test_a_scheme_that_fails_verify_is_not_trained(study):
    result = study("Broken")
    assert result.status == 1 and "FAIL broken" in result.out and "mend it" in result.error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "soon"), "--budget soon is not a time: give 30m, 2h or 1d"),
        (("--budget", "30months"), "--budget 30months is not a time"),
        # It times this machine.
        pytest.param(
            ("--budget", "0.001s"), "--budget is too short for a search: give 1m or more", marks=pytest.mark.slow
        ),
        (("--against", "steep_nope"), "there is no scheme 'steep_nope'"),
        (("seed=0,1",), "seed=0,1: a study's schemes are mine.py:Steep and --against, its seeds 0, 1, 2, ..."),
    ],
)
def test_what_a_study_cannot_use_is_refused_in_a_line(study, words, message):
    assert message in study("Steep", *words).refusal
    assert not Path("runs").exists()


def test_a_name_belongs_to_one_study(study):
    Path("runs/study-steep").mkdir(parents=True)
    record = {"place": "mine.py:Steep", "against": ["alibi"], "budget": "", "words": [], "chosen": []}
    Path("runs/study-steep/study.json").write_text(json.dumps(record), encoding="utf-8")
    message = "runs/study-steep has another study (against: ['alibi'] -> ['qk_rope']): give experiment_name=NAME"
    assert message in study("Steep").refusal
