"""`posbench tune`: one grid of learning rates for all schemes, on text that is never scored."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from posbench import compose, load_run, results
from posbench.data import Corpus, prepare
from posbench.reporting.statistics import best_rate
from posbench.tools.tune import tune, wider_rates
from tests.cli.commands import Give


def table(file: str = "runs/demo/rates.csv") -> dict[str, dict[float, float]]:
    """Return the loss of each learning rate, by scheme."""
    pilots = pd.read_csv(file)
    return {
        str(s): dict(zip(rates["train.lr"], rates["loss"], strict=True))
        for s, rates in pilots.groupby("scheme", sort=False)
    }


@pytest.mark.slow
def test_all_schemes_are_tried_at_the_same_rates_and_reports_of_packs_say_so(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.tools.tune.MOST_WIDER", 1)
    short = [*short, "hydra/launcher=basic", "data.validation_fraction=0.2"]
    words = [*short, "train.steps=12", "train.lr=1.6e-3", "scheme=nope,vo_rope"]
    result = posbench("tune", *words, "--fraction", "0.3")
    assert result.status == 0 and "Traceback" not in result.error, result
    losses = table()
    assert list(losses) == ["nope", "vo_rope"]
    for scheme, rates in losses.items():  # so low a rate that each doubling is better: up to the limit
        assert sorted(rates) == pytest.approx([8e-4, 1.6e-3, 3.2e-3, 6.4e-3])
        assert load_run(f"runs/demo-tune/lr=0.0064/{scheme}/seed=1000").manifest.loss == rates[6.4e-3]
    assert "0.0064 (edge)" in result.out and "wrote runs/demo/rates.csv" in result.out
    command = next(line for line in result.out.splitlines() if line.startswith("  posbench train -m"))
    assert command.endswith("scheme=nope,vo_rope 'train.lr_of={nope:0.0064,vo_rope:0.0064}'")
    assert "contains no runs" in posbench("report").refusal and "contains no runs" in posbench("eval").refusal
    times_before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*") if path.suffix != ".csv"}
    again = posbench("tune", *words, "--fraction", "0.3")
    assert again.out == result.out and again.error.count("is finished") == 8
    assert {path: path.stat().st_mtime_ns for path in times_before} == times_before
    assert posbench("pack", "demo-tune/lr=0.0064", "runs/demo-tune/lr=0.0064.zip").status == 0
    shutil.rmtree("runs/demo-tune/lr=0.0064")
    packed = posbench("tune", *words, "--fraction", "0.3")
    assert packed.error.count("is finished") == 8 and not Path("runs/demo-tune/lr=0.0064").exists()
    assert packed.out == result.out

    assert posbench("train", "-m", *words, "train.lr_of={nope:0.0064,vo_rope:0.0032}", "seed=0,1").status == 0
    assert posbench("pack", "demo", "elsewhere/demo.zip").status == 0
    assert posbench("report", "elsewhere/demo.zip", "--output", "out").status == 0
    loss, half = (f"{losses['vo_rope'][rate]:.4f}" for rate in (6.4e-3, 3.2e-3))
    report = Path("out/report.md").read_text()
    assert f"vo_rope | 0.0064 (edge) | {loss} | {half} | – | 0.0032" in report and "(rates.svg)" in report
    assert "Pilots found better rates for some schemes" in report
    assert table("out/rates.csv") == losses


def test_pilots_neither_read_nor_score_what_is_scored(short: list[str]) -> None:
    scored = prepare(compose(short))
    pilot = prepare(compose([*short, "data.tuning_fraction=0.3"]))

    def documents(split: str, corpus: Corpus) -> set[bytes]:
        held_out = corpus.splits[split]
        return {held_out.document(n).tobytes() for n in range(held_out.num_documents)}

    assert documents("train", pilot) | documents("validation", pilot) == documents("train", scored)
    assert documents("train", pilot) and documents("validation", pilot) and not documents("test", pilot)
    assert not documents("train", pilot) & documents("validation", pilot)


@pytest.mark.slow
def test_a_scheme_of_its_own_rate_joins_with_those_of_the_shared_one(posbench: Give, short: list[str]) -> None:
    words = [*short, "hydra/launcher=basic", "scheme=nope,vo_rope", "seed=0"]
    assert posbench("train", "-m", *words, "train.lr_of={nope:2e-3}").status == 0
    nope_run, rope_run = (load_run(f"runs/demo/{scheme}/seed=0") for scheme in ("nope", "vo_rope"))
    rates = [{row["lr"] for row in run.logged if row["kind"] == "train"} for run in (nope_run, rope_run)]
    alone = compose([*short, "scheme=nope", "train.lr=2e-3"])
    assert (
        nope_run.config.row_train.lr == 2e-3 == alone.train.lr
        and rope_run.config.row_train.lr == rope_run.config.train.lr
    )
    assert rates[0] != rates[1]
    assert nope_run.manifest.identity["scheme.lr"] == 2e-3 and "scheme.lr" not in rope_run.manifest.identity
    assert results("runs/demo")["fingerprint.config"].nunique() == 1
    assert posbench("train", *short, "scheme=alibi", "seed=0", "train.lr=3e-3").status == 0  # in words, beside these
    assert posbench("report", "runs/demo").status == 0
    assert posbench("train", *short, "scheme=k_rope", "seed=0", "train.lr=3e-3", "train.weight_decay=0.2").status == 0
    assert "train.weight_decay: 0.1 (3 runs), 0.2 (k_rope seed 0)" in posbench("report", "runs/demo").error


@pytest.mark.slow
def test_what_cannot_be_tuned_is_refused(posbench: Give, short: list[str]) -> None:
    several = posbench("tune", *short, "model.num_layers=1,2", "scheme=nope").refusal
    assert "model.num_layers cannot be swept too" in several
    alike = posbench("tune", "data=copy,reverse", "scheme=nope", "experiment_name=alike").refusal
    assert "data (under one experiment_name) cannot" in alike
    assert (
        "train.lr_of=0.1 is not a mapping: give {scheme: rate}" in posbench("train", *short, "train.lr_of=0.1").refusal
    )
    assert "is out of range" in posbench("tune", *short, "train.lr=-1", "scheme=nope").refusal


def test_where_the_best_rate_of_one_scheme_is_at_an_edge_all_are_tried_beyond_it() -> None:
    inside = {0.5: 3.0, 1.0: 2.0, 2.0: 2.3}
    assert wider_rates({"a": inside, "b": inside}, 1.0) == {}
    assert wider_rates({"a": inside, "b": {0.5: 1.8, 1.0: 2.0, 2.0: 2.5}}, 1.0) == {0.25: ["b"]}, "a is hopeless there"
    assert wider_rates({"a": inside, "b": {0.5: 3.0, 1.0: 2.0, 2.0: 1.5}}, 1.0) == {4.0: ["a", "b"]}
    both = {"a": {0.5: 1.9, 1.0: 2.0, 2.0: 2.1}, "b": {0.5: 2.1, 1.0: 2.0, 2.0: 1.9}}
    assert wider_rates(both, 1.0) == {0.25: ["a", "b"], 4.0: ["a", "b"]}
    dead = {0.5: 3.0, 1.0: 2.0, 2.0: math.inf}
    assert wider_rates({"a": dead, "b": {0.5: 3.0, 1.0: 2.0, 2.0: 1.5}}, 1.0) == {4.0: ["b"]}
    wider = {"a": dead, "b": {0.5: 3.0, 1.0: 2.0, 2.0: 1.5, 4.0: 1.4}}
    assert wider_rates(wider, 1.0) == {8.0: ["b"]}, "what was discarded at 4 is not tried at 8"
    down = {2.0**-n: -0.1 * n for n in range(-1, 4)}
    assert list(wider_rates({"a": down}, 1.0)) == [1 / 16] and wider_rates({"a": down | {1 / 16: -9.0}}, 1.0) == {}
    assert wider_rates({"a": dict.fromkeys((0.5, 1.0, 2.0), math.inf)}, 1.0) == {0.25: ["a"]}, "all died: lower"
    losses = {"a": dict.fromkeys((0.5, 1.0, 2.0), math.inf), "b": {0.5: 3.0, 1.0: 2.0, 2.0: 1.5}}
    assert wider_rates(losses, 1.0) == {0.25: ["a"], 4.0: ["b"]}


def test_what_is_known_when_a_search_is_cut_off_is_in_the_file_beside_other_schemes(
    short: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweeps: list[str] = []

    def train(program: str, words: list[str], job: object, say: object) -> None:
        if sweeps:
            raise KeyboardInterrupt
        sweeps.extend(words[-2:])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posbench.tools.tune.run_application", train)
    monkeypatch.setattr(
        "posbench.tools.tune._loss", lambda runs: -100 * float(runs[0].path.parts[-3].removeprefix("lr="))
    )
    existing_rows = "alibi,0.004,2.1234567890123457,finished,2\nnope,0.004,2.0,finished,2\n"
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/rates.csv").write_text(f"scheme,train.lr,loss,status,seeds\n{existing_rows}")
    with pytest.raises(KeyboardInterrupt):
        tune([*short, "scheme=nope", "train.lr=1e-3"], lambda config: None, print, Console())
    assert sweeps == ["scheme=nope", "train.lr=0.0005,0.001,0.002"]
    assert table() == {"alibi": {4e-3: 2.1234567890123457}, "nope": {5e-4: -0.05, 1e-3: -0.1, 2e-3: -0.2}}


def test_of_rates_that_do_as_well_the_middle_one_is_the_best() -> None:
    assert best_rate({1.0: 2.0, 2.0: 1.5, 4.0: 1.52}) == 2.0
    assert best_rate({1.0: 2e-3, 2.0: 1e-5, 4.0: 1e-9, 8.0: 0.5}) == 2.0, "not the last of those that solve a task"
    assert best_rate({8.0: 1e-3, 1.0: 2e-3, 4.0: 0.0, 2.0: 1e-5}) == 2.0, "of two in the middle the lower"
    assert best_rate({1.0: math.inf, 2.0: math.inf}) == 1.0
