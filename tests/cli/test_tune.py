"""`posbench tune`: one grid of learning rates for all schemes, on text that is never scored."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from posbench import compose, load_run
from posbench.analysis.search import RateSearch

LR = 1.6e-3
RATES = [4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3]


def losses():
    """Return the runs of the search as its report lists them."""
    return pd.read_csv("out/rates.csv")


@pytest.mark.slow
def test_a_search_trains_five_rates_and_then_the_best_two_and_resumes(posbench, short):
    words = [*short, "hydra/launcher=basic", "data.validation_fraction=0.2", "train.steps=12", f"train.lr={LR}"]
    words += ["scheme=vo_rope", "experiment.planned_seeds=3"]
    assert posbench("train", "-m", *words, "scheme.lr=6.4e-3", "seed=0").status == 0, "runs of the experiment count"
    before = posbench("tune", *words, "--left")
    assert "Left to train: 11 of 12 runs" in before.out and "seed 1 at 0.0064: vo_rope" in before.out
    assert "seed 0 at 0.0064" not in before.out and not Path("runs/demo-tune").exists()
    result = posbench("tune", *words)
    assert result.status == 0 and "Traceback" not in result.error and "The search is finished" in result.out, result
    assert "contains no runs" not in posbench("eval", "demo-tune").error
    assert posbench("report", "demo", "--output", "out").status == 0
    runs = losses()
    for scheme, tried in runs.groupby("scheme"):
        assert sorted(set(tried["train.lr"])) == pytest.approx(RATES) and len(tried) == 12
        means = tried[tried["seed"] < 2].groupby("train.lr")["loss"].mean()
        kept = set(means.nsmallest(2).index)
        assert set(tried[tried["is_kept"]]["train.lr"]) == kept == set(tried[tried["seed"] == 2]["train.lr"])
        assert load_run(f"runs/demo-tune/lr={means.idxmin()}/{scheme}/seed=2").manifest.loss in set(tried["loss"])
    text = Path("out/report.md").read_text()
    assert text.count("(3)**") == 2 and "not finished" not in text, "both kept rates are bold"
    times_before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*")}
    again = posbench("tune", *words)
    assert again.out == result.out.replace(result.out.partition("scheme ")[0], "")
    assert {path: path.stat().st_mtime_ns for path in times_before} == times_before
    assert posbench("pack", "demo-tune", "runs/demo-tune.zip").status == 0
    shutil.rmtree("runs/demo-tune")
    packed = posbench("tune", *words)
    assert packed.out == again.out and not Path("runs/demo-tune").exists()


def test_rates_do_not_depend_on_the_order_of_schemes_or_on_their_own_rates(posbench, short):
    """The experiment's own rate is the middle one, whatever `train.lr_of` says of the schemes."""
    words = [word for word in short if not word.startswith("train.lr=")]
    rates = "train.lr_of={nope:1e-3,vo_rope:2e-3}"
    tables = {posbench("tune", *words, rates, f"scheme={s}", "--left").out for s in ("nope,vo_rope", "vo_rope,nope")}
    middle = compose([*words, "scheme=alibi"]).train.lr
    for table in tables:
        lines = [line for line in table.splitlines() if line.startswith("  seed 0 at")]
        tried = [float(line.split()[3].rstrip(":")) for line in lines]
        assert tried == pytest.approx([middle / 4, middle / 2, middle, 2 * middle, 4 * middle])


def test_a_rate_that_the_user_typed_comes_before_one_in_a_file(posbench, short):
    Path("own/scheme").mkdir(parents=True)
    Path("own/scheme/mine.yaml").write_text("name: mine\nkind: nope\nlr: 7e-3\n")
    words = [word for word in short if not word.startswith("train.lr=")] + ["--config-dir=own", "scheme=mine"]
    assert compose(words).train.lr == 7e-3
    assert compose([*words, "train.lr=1e-3"]).train.lr == 1e-3
    assert compose([*words, "train.lr=1e-3", "scheme.lr=2e-3"]).train.lr == 2e-3


def test_seeds_of_a_search_are_honoured_or_refused(posbench, short):
    left = posbench("tune", *short, "scheme=nope", "seed=0,1,2", "--left")
    assert "Left to train: 12 of 12 runs" in left.out and "to 3 seeds" in left.out
    refusal = posbench("tune", *short, "scheme=nope", "seed=0,2,5", "--left").refusal
    assert refusal.startswith("posbench: seed=0,2,5: a search has the seeds 0, 1, 2, ...")


@pytest.mark.slow
def test_a_search_with_its_own_number_of_seeds_is_finished_for_reports_too(posbench, short):
    """The runs of the experiment itself plan five seeds."""
    assert posbench("train", "-m", *short, "scheme=nope,vo_rope", "seed=0").status == 0
    done = posbench("tune", *short, "scheme=nope,vo_rope", "seed=0,1,2")
    assert "The search is finished" in done.out
    report = posbench("report", "demo")
    assert report.status == 0 and "not finished" not in report.out
    assert posbench("judge", "demo", "--scheme", "vo_rope", "--baseline", "nope").status in (0, 10, 11, 12, 14)
    for folder in Path("runs/demo-tune").glob("*/vo_rope/seed=1"):
        shutil.rmtree(folder)
    judged = json.loads(posbench("judge", "demo", "--scheme", "vo_rope", "--baseline", "nope", "--json").out)
    assert all(command[-1] == "seed=0,1,2" for command in judged["next_commands"]) and judged["next_commands"]


def search(planned=5, **rates):
    """Return a search with these losses by scheme, rate and seed."""
    rows = [
        {"scheme": scheme, "train.lr": rate, "seed": seed, "loss": loss}
        for scheme, tried in rates.items()
        for rate, of_seeds in tried.items()
        for seed, loss in enumerate(of_seeds)
    ]
    return RateSearch(pd.DataFrame(rows), planned)


FIRST = {1.0: [2.0, 2.2], 2.0: [1.8, 1.8], 4.0: [1.7, 1.8], 8.0: [math.inf, 1.0], 16.0: [1.5, 2.4]}


def test_the_two_rates_with_the_lowest_mean_over_the_first_seeds_go_on():
    assert search(a=FIRST).kept("a") == [4.0, 2.0], "not the rate at which a run diverged, nor that of the lowest loss"
    assert search(a=FIRST).missing("a") == [(rate, seed) for seed in (2, 3, 4) for rate in (4.0, 2.0)]
    later = FIRST | {2.0: [1.8, 1.8, 1.1, 1.1, 1.1], 4.0: [1.7, 1.8, 1.9, 1.9, 1.9], 16.0: [1.5, 2.4, 0.0]}
    done = search(a=later)
    assert done.kept("a") == [2.0, 4.0] and done.is_complete(["a"]) and done.left("a") == 0, "the better one first"
    assert done.second(["a"])["a"].tolist() == later[4.0] and done.best("a") == 2.0
    assert not search(8, a=later).is_complete(["a"]) and not done.is_complete(["a", "b"])


def test_a_search_whose_first_seeds_are_missing_keeps_nothing_yet():
    begun = search(a={rate: of_seeds[: 1 + (rate < 4)] for rate, of_seeds in FIRST.items()})
    assert begun.kept("a") == [] and begun.missing("a", [1, 2, 4, 8, 16]) == [(rate, 1) for rate in (4.0, 8.0, 16.0)]
    assert begun.left("a") == 16 - 7 and begun.left("b") == 16


@pytest.mark.slow
def test_what_cannot_be_tuned_is_refused(posbench, short):
    several = posbench("tune", *short, "model.num_layers=1,2", "scheme=nope").refusal
    assert "model.num_layers cannot be swept too" in several
    alike = posbench("tune", "data=copy,reverse", "scheme=nope", "experiment_name=alike").refusal
    assert "data (under one experiment_name) cannot" in alike
    assert (
        "train.lr_of=0.1 is not a mapping: give {scheme: rate}" in posbench("train", *short, "train.lr_of=0.1").refusal
    )
    assert "is out of range" in posbench("tune", *short, "train.lr=-1", "scheme=nope").refusal
