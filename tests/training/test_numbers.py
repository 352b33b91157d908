"""Numbers that go wrong are caught before the update, named, counted, and end a run that has too many of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from posbench.config import Config, ConfigError
from posbench.runs import Run, read_metrics, run_folder, state_of
from posbench.training import Died, loop, train
from tests.training.conftest import files

Make = Callable[..., Config]
AtStep = Callable[..., None]


def _poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    original = loop._Training._one_step

    def poisoned(self: Any, n: int) -> torch.Tensor:
        weight = self.model.norm.weight
        if n in steps:
            with torch.no_grad():
                kept = weight.clone()
                weight.fill_(math.nan)
            others = {name: p.detach().clone() for name, p in self.model.named_parameters() if p is not weight}
            moments = {key: value.clone() for key, value in self.optimizer.state().items()}
            try:
                return original(self, n)
            finally:
                with torch.no_grad():
                    assert torch.isnan(weight).all()  # the update was refused
                    weight.copy_(kept)
                parameters = dict(self.model.named_parameters())
                assert all(torch.equal(value, parameters[name]) for name, value in others.items())
                assert all(torch.equal(value, moments[key]) for key, value in self.optimizer.state().items() if moments)
        return original(self, n)

    monkeypatch.setattr(loop._Training, "_one_step", poisoned)


def test_a_step_of_nan_is_skipped_named_and_counted(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, {4})
    console = Console(record=True, width=300)
    run = train(config(), console)
    assert run.manifest["status"] == "finished" and run.manifest["skipped_steps"] == 1
    text = console.export_text()
    assert "skipped step 5: loss nan, gradient norm nan, learning rate" in text and "batch 4" in text
    rows = [row for row in read_metrics(run.path / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_a_run_of_nan_dies_says_why_and_is_refused_until_asked(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, {8, 9, 10})
    with pytest.raises(Died, match=r"3 steps were not finite, .* the last was step 11: .*train\.lr"):
        train(config("train.max_skipped_steps=2"))
    run = Run(run_folder(config()))
    assert state_of(run) == "died" and "not finite" in run.manifest["reason"] and run.manifest["skipped_steps"] == 3
    before = files(run.path)
    with pytest.raises(Died, match=r"it died before: 3 steps .*train\.max_skipped_steps=3 or more goes on"):
        train(config("train.max_skipped_steps=2"))
    assert files(run.path) == before
    assert train(config("train.max_skipped_steps=3")).manifest["skipped_steps"] == 3


@pytest.mark.parametrize("call", [1, 3])
def test_a_validation_that_is_not_finite_ends_the_run(config: Make, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    original, calls = loop.score_split, []

    def score(*arguments: Any) -> Any:
        rows, summary = original(*arguments)
        calls.append(1)
        if len(calls) == call:
            rows["nll"], summary["nll_mean"] = math.inf, math.inf
        return rows, summary

    monkeypatch.setattr(loop, "score_split", score)
    with pytest.raises(Died, match=r"the validation loss .* is inf"):
        train(config())
    assert state_of(Run(run_folder(config()))) == "died"


def _cuda_runs_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free")


@pytest.mark.parametrize(
    "ask", [lambda: torch.empty(10**15), lambda: np.empty(10**17), _cuda_runs_out], ids=["cpu", "numpy", "cuda"]
)
def test_out_of_memory_names_the_peak_the_batch_the_length_and_what_to_lower(
    config: Make, at_step: AtStep, ask: Callable[[], object]
) -> None:
    at_step(1, ask)
    with pytest.raises(ConfigError, match=r"out of memory on cpu.* peak before was \d\.\d\d GB") as refused:
        train(config())
    for words in ("batch_size=4", "context_length=32", "accumulation=1", "Raise train.accumulation", "lower train."):
        assert words in str(refused.value)
    run = Run(run_folder(config()))
    assert state_of(run) == "stopped" and "out of memory" in run.manifest["reason"]
    assert run.config.train.batch_size == 4
    at_step(1, lambda: None)
    assert train(config("train.accumulation=2")).config.train.accumulation == 2


def test_a_model_that_does_not_fit_is_named_before_anything_is_written(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "build_model", lambda *_: torch.empty(10**15))
    with pytest.raises(ConfigError, match="when 4000000000000000 bytes more were asked for"):
        train(config())
    assert not run_folder(config()).exists()


def test_another_error_stays_what_it_is(config: Make, at_step: AtStep) -> None:
    at_step(1, lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        train(config())
