"""Factors of an experiment, from a user's YAML to a verdict."""

from pathlib import Path

import pytest
import yaml

EXPERIMENT = """# @package _global_
# Two factors in four setups
defaults:
  - override /model: tiny
  - override /tokenizer: bytes
experiment:
  name: mine
  setups:
    optimizer: [[train.optimizer=adamw], [train.optimizer=muon]]
    head_shape: [[model.num_heads=4], [model.num_heads=2]]
train: {steps: 2, batch_size: 2, context_length: 32, lr: 1e-3}
hydra: {sweeper: {params: {seed: "0,1,2,3,4", scheme: "nope,qk_rope"}}}
"""
MINE = ("--config-dir=conf", "experiment=mine")


@pytest.fixture
def experiment(posbench):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(EXPERIMENT, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("experiment")
def test_setups_are_trained_reported_and_judged(posbench):
    assert posbench("train", "-m", *MINE).status == 0
    settings = yaml.safe_load(Path("runs/mine/nope/seed=3/config.yaml").read_text(encoding="utf-8"))
    assert (settings["train"]["optimizer"], settings["model"]["num_heads"]) == ("muon", 2)
    again = yaml.safe_load(Path("runs/mine/nope/seed=4/config.yaml").read_text(encoding="utf-8"))
    assert (again["train"]["optimizer"], again["model"]["num_heads"]) == ("adamw", 4), "setup 0 once more"
    assert "10 of them already finished" in posbench("train", "-m", *MINE).error
    report = posbench("report", "mine", "--output", "report")
    assert report.status == 0 and "of these 4 setups, median gap" in " ".join(report.out.split())
    page = Path("report/report.md").read_text(encoding="utf-8")
    assert "## Effects of factors on the gap" in page and "Nothing here is at best rates." in page
    judged = posbench("judge", "mine", "--setups")
    assert judged.status in (0, 10, 12) and "against qk_rope at these setups" in judged.out.replace("than", "against")
    assert "--setups" in posbench("judge", "mine").refusal


@pytest.mark.usefixtures("experiment")
def test_a_factor_that_changes_nothing_is_refused_before_the_first_run(posbench):
    text = EXPERIMENT.replace("[model.num_heads=4], [model.num_heads=2]", "[train.log_every=1], [train.log_every=2]")
    Path("conf/experiment/mine.yaml").write_text(text, encoding="utf-8")
    assert "head_shape of experiment.setups changes nothing of nope" in posbench("train", "-m", *MINE).refusal
    assert not list(Path("runs").glob("mine/*"))
