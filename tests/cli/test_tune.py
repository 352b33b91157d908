"""`posbench tune`: a grid of learning rates on text that is never scored, wider where the best stands at an edge."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from rich.console import Console

from posbench import compose, load_run, results
from posbench.data import Corpus, prepare
from posbench.tune import best_rate, tune, wider_rate
from tests.cli.commands import Give


def table() -> dict[str, dict[float, float]]:
    rates: dict[str, dict[float, float]] = {}
    with Path("runs/demo-tune/rates.csv").open() as file:
        for row in csv.DictReader(file):
            rates.setdefault(row["scheme"], {})[float(row["lr"])] = float(row["loss"] or "inf")
    return rates


@pytest.mark.slow
def test_each_scheme_is_tuned_until_its_best_rate_is_not_at_an_edge(posbench: Give, short: list[str]) -> None:
    words = [
        *short,
        "hydra/launcher=basic",
        "train.steps=12",
        "train.lr=1e-4",
        "scheme=nope,vo_rope",
        "data.validation_fraction=0.2",
    ]
    said = posbench("tune", *words, "--fraction", "0.3")
    assert said.status == 0 and "Traceback" not in said.error, said
    found = table()
    assert list(found) == ["nope", "vo_rope"]
    for scheme, rates in found.items():  # so low a rate that each doubling is better: up to the limit
        assert sorted(rates) == pytest.approx([5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3])
        assert best_rate(rates) == pytest.approx(1.6e-3)
        run = load_run(f"runs/demo-tune/lr=0.0016/{scheme}/seed=1000")
        assert run.manifest.loss == rates[max(rates)]
    assert "0.0016 (edge)" in said.out and "wrote runs/demo-tune/rates.csv" in said.out
    command = next(line.split() for line in said.out.splitlines() if line.startswith("  posbench train -m"))
    assert command[-3:] == [
        "experiment_name=demo-own",
        "scheme=nope,vo_rope",
        "'train.lr_of={nope:0.0016,vo_rope:0.0016}'",
    ]
    assert "contains no runs" in posbench("report").refusal and "contains no runs" in posbench("eval").refusal
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*") if path.suffix != ".csv"}
    again = posbench("tune", *words, "--fraction", "0.3")
    assert again.out == said.out and again.error.count("is finished") == 12
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_pilots_neither_read_nor_score_what_is_scored(short: list[str]) -> None:
    scored = prepare(compose(short), quiet=True)
    pilot = prepare(compose([*short, "data.tuning_fraction=0.3"]), quiet=True)

    def documents(split: str, corpus: Corpus) -> set[bytes]:
        of = corpus.splits[split]
        return {of.document(n).tobytes() for n in range(of.num_documents)}

    assert documents("train", pilot) | documents("validation", pilot) == documents("train", scored)
    assert documents("train", pilot) and documents("validation", pilot) and not documents("test", pilot)
    assert not documents("train", pilot) & documents("validation", pilot)


@pytest.mark.slow
def test_a_scheme_of_its_own_rate_joins_with_those_of_the_shared_one(posbench: Give, short: list[str]) -> None:
    words = [*short, "hydra/launcher=basic", "scheme=nope,vo_rope", "seed=0"]
    assert posbench("train", "-m", *words, "train.lr_of={nope:2e-3}").status == 0
    own, shared = (load_run(f"runs/demo/{scheme}/seed=0") for scheme in ("nope", "vo_rope"))
    rates = [{row["lr"] for row in run.logged if row["kind"] == "train"} for run in (own, shared)]
    alone = compose([*short, "scheme=nope", "train.lr=2e-3"])
    assert own.config.row_train.lr == 2e-3 == alone.train.lr and shared.config.row_train.lr == shared.config.train.lr
    assert rates[0] != rates[1]
    assert own.manifest.identity["scheme.lr"] == 2e-3 and "scheme.lr" not in shared.manifest.identity
    assert results("runs/demo")["fingerprint.config"].nunique() == 1


@pytest.mark.slow
def test_what_cannot_be_tuned_is_refused(posbench: Give, short: list[str]) -> None:
    several = posbench("tune", *short, "model.num_layers=1,2", "scheme=nope").refusal
    assert "model.num_layers cannot be swept too" in several
    assert (
        "train.lr_of=0.1 is not a mapping: give {scheme: rate}" in posbench("train", *short, "train.lr_of=0.1").refusal
    )
    assert "is out of range" in posbench("tune", *short, "train.lr=-1", "scheme=nope").refusal


def test_the_next_rate() -> None:
    assert wider_rate({0.5: 3.0, 1.0: 2.0, 2.0: 2.5}, 1.0) is None
    assert wider_rate({0.5: 1.0, 1.0: 2.0, 2.0: 2.5}, 1.0) == 0.25
    assert wider_rate({0.5: 3.0, 1.0: 2.0, 2.0: 1.5}, 1.0) == 4.0
    down = {2.0**-n: float(-n) for n in range(-1, 4)}
    assert wider_rate(down, 1.0) == 1 / 16 and wider_rate(down | {1 / 16: -9.0}, 1.0) is None, "three beyond the first"
    assert wider_rate(dict.fromkeys((0.5, 1.0, 2.0), math.inf), 1.0) == 0.25, "all died: lower"


def test_what_is_known_when_a_search_is_cut_off_is_in_the_file(
    short: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweeps: list[list[float]] = []

    def train(tuning: object, schemes: object, rates: list[float], job: object, say: object) -> None:
        if sweeps:
            raise KeyboardInterrupt
        sweeps.append(rates)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posbench.tune._train", train)
    monkeypatch.setattr("posbench.tune._loss", lambda run: -float(run.path.parts[-3].removeprefix("lr=")))
    with pytest.raises(KeyboardInterrupt):
        tune([*short, "scheme=nope", "train.lr=1e-3"], lambda config: None, print, Console())
    assert table() == {"nope": {5e-4: -5e-4, 1e-3: -1e-3, 2e-3: -2e-3}}
