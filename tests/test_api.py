"""Python's way in: what the commands do, as functions with types and errors."""

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import posbench
from posbench.evaluation.request import Request
from posbench.reporting.options import ReportOptions
from posbench.runs.results import perplexity
from tests.conftest import small_run
from tests.refusals import refuses


@pytest.mark.slow
def test_a_run_is_trained_evaluated_and_reported(documents, cache, tmp_path, capsys):
    words = small_run(documents, cache, tmp_path / "runs")
    run = posbench.train(posbench.compose(words), quiet=True)
    assert isinstance(run, posbench.Run) and run.is_finished
    nope_run = posbench.train([*words, "scheme=nope"], quiet=True)
    frame = posbench.evaluate(run, lengths=[64, "96"], protocols=["fixed"], quiet=True)
    assert frame[["scheme", "protocol", "length", "under"]].to_numpy().tolist() == [
        ["qk_rope", "fixed", 64, ""],
        ["qk_rope", "fixed", 96, ""],
    ]
    stored, _ = run.results()
    assert frame["loss"].tolist() == [result.loss for result in stored if result.protocol == "fixed"]
    assert frame["perplexity"].tolist() == [perplexity(loss) for loss in frame["loss"]]
    both = posbench.evaluate([run.path, nope_run], lengths=[64], protocols=["fixed", "order"], quiet=True)
    assert both["scheme"].tolist() == ["qk_rope", "qk_rope", "nope", "nope"]
    assert both["bits_per_byte"].isna().tolist() == [False, True, False, True]  # order counts no bytes
    capsys.readouterr()
    files = posbench.report(run.path.parents[1], output=tmp_path / "report")
    assert tmp_path / "report" / "report.html" in files and "One seed only" in capsys.readouterr().out


def test_what_a_user_can_fix_is_one_kind_of_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuses("nowhere", posbench.evaluate, "nowhere")
    assert issubclass(posbench.Died, Exception) and not issubclass(posbench.Stopped, Exception)


def test_every_name_is_there():
    assert all(getattr(posbench, name) is not None for name in posbench.__all__)


def test_only_public_names_are_listed_and_a_run_shows_its_folder():
    assert dir(posbench) == sorted(posbench.__all__)
    assert repr(posbench.Run(Path("runs/demo/nope/seed=0"))) == "Run('runs/demo/nope/seed=0')"


def test_the_api_has_every_option():
    for function, options in ((posbench.evaluate, Request), (posbench.report, ReportOptions)):
        assert {field.name for field in fields(options)} <= signature(function).parameters.keys()
