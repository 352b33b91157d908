"""Numbers that go wrong are caught before the update, named, counted, and end a run that has too many of them."""

import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from posbench.composition.compose import compose
from posbench.config import ConfigError
from posbench.runs import Run, run_folder, state_of
from posbench.system.device import choose_device, exhaustion_explained
from posbench.training import Died, loop, train
from tests.refusals import refuses
from tests.training.conftest import after_step, files


def poisoned(steps):
    """Return an observer that makes the loss of these steps (0-based) NaN and checks that no update follows."""
    initial = {}

    def observe(phase, n, step):
        weight = step.model.norm.weight
        if n not in steps or phase not in ("batch", "optimizer"):
            return
        with torch.no_grad():
            if phase == "batch":
                initial.update({name: p.clone() for name, p in step.model.named_parameters()})
                initial.update({name: value.clone() for name, value in step.optimizer.state().items()})
                weight.fill_(math.nan)
            else:
                assert torch.isnan(weight).all()  # the update was refused
                weight.copy_(initial["norm.weight"])
                now = {**dict(step.model.named_parameters()), **step.optimizer.state()}
                assert all(torch.equal(value, now[name]) for name, value in initial.items())

    return observe


def test_a_step_of_nan_is_skipped_named_and_counted(config):
    console = Console(record=True, width=300)
    run = train(config(), console, poisoned({4}))
    assert run.manifest.status == "finished" and run.manifest.skipped_steps == 1
    text = console.export_text()
    assert "skipped step 5: loss nan, gradient norm nan, learning rate" in text and "batch 4" in text
    rows = [row for row in run.logged if row["kind"] == "train"]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_a_run_of_nan_dies_says_why_and_is_refused_until_asked(config):
    with pytest.raises(Died, match=r"3 steps were not finite, .* the last was step 11: .*last 3 .*lower train\.lr"):
        train(config("train.max_skipped_steps=2"), observe=poisoned({8, 9, 10}))
    run = Run(run_folder(config()))
    assert state_of(run) == "died" and "not finite" in run.manifest.reason and run.manifest.skipped_steps == 3
    files_before = files(run.path)
    with pytest.raises(Died, match=r"it died earlier: 3 steps .*train\.max_skipped_steps=3 or more resumes"):
        train(config("train.max_skipped_steps=2"))
    assert files(run.path) == files_before
    resumed = train(config("train.max_skipped_steps=3"), observe=poisoned({8, 9, 10}))
    assert resumed.manifest.skipped_steps == 3


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("step", "phase", "moment"), [(5, "optimizer", "at step 6"), (11, "checkpoint", "at step 12")])
def test_a_validation_that_is_not_finite_ends_the_run(config, value, step, phase, moment):
    def spoil(happened, n, trained):
        if (happened, n) == (phase, step):
            with torch.no_grad():
                trained.model.norm.weight[0] = value

    with pytest.raises(Died, match=f"the validation loss {moment} is NaN or infinite. Lower train.lr"):
        train(config(), observe=spoil)
    assert state_of(Run(run_folder(config()))) == "died"


BROKEN = """import math
from posbench.schemes import Scheme


class Broken(Scheme):
    def bias(self, q, k, gates, at):
        return at.look_up((at.distances(q) * math.nan).expand(self.shape.num_heads, -1))
"""


def test_nan_before_any_update_is_not_blamed_on_the_learning_rate(config, tmp_path, monkeypatch):
    """A scheme that is NaN at step 0, and one whose first steps are all skipped."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN, encoding="utf-8")
    cause = r"No step has changed the weights, so train\.lr is not the cause: check the scheme"
    with pytest.raises(
        Died, match=rf"loss at step 0 is NaN or infinite\. {cause} \(posbench verify broken\.py:Broken\)"
    ):
        train(config("scheme=broken.py:Broken"))
    with pytest.raises(
        Died, match=rf"2 steps were not finite.*the last was step 2: .*{cause} \(posbench verify qk_rope\)"
    ):
        train(config("scheme=qk_rope", "train.max_skipped_steps=1"), observe=poisoned(set(range(12))))


def test_steps_that_were_not_skipped_in_a_row_are_the_learning_rates_fault(config):
    with pytest.raises(Died, match=r"2 steps were not finite.*the last was step 9: .*\. Lower train\.lr$"):
        train(config("train.max_skipped_steps=1"), observe=poisoned({4, 8}))


def test_an_error_of_the_users_that_says_out_of_memory_is_the_users():
    device = choose_device(compose(["model=tiny", "train.device=cpu"]).train)
    for own in (RuntimeError("my table is out of memory slots"), ValueError("bad_alloc")):
        with pytest.raises(type(own), match=re.escape(str(own))), exhaustion_explained(device, "a smaller batch"):
            raise own
    for ours in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        with pytest.raises(ConfigError, match="out of memory on cpu"), exhaustion_explained(device, "a smaller batch"):
            raise ours


@pytest.mark.slow
def test_out_of_memory_names_the_peak_the_batch_the_length_and_what_to_lower(config):
    with pytest.raises(ConfigError, match=r"out of memory on cpu.* peak before was \d\.\d\d GB") as refused:
        train(config(), observe=after_step(1, lambda: torch.empty(10**15)))
    for words in ("batch_size=4", "context_length=32", "accumulation=1", "Raise train.accumulation", "lower train."):
        assert words in str(refused.value)
    run = Run(run_folder(config()))
    assert state_of(run) == "stopped" and "out of memory" in run.manifest.reason
    assert run.config.train.batch_size == 4
    assert train(config("train.accumulation=2")).config.train.accumulation == 2


def test_a_model_that_does_not_fit_is_named_before_anything_is_written(config, monkeypatch):
    monkeypatch.setattr(loop, "build_model", lambda *_: torch.empty(10**15))
    refuses("when 4000000000000000 bytes more were asked for", train, config())
    assert not run_folder(config()).exists()


def test_another_error_stays_what_it_is(config):
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        train(config(), observe=after_step(1, lambda: torch.ones(2) @ torch.ones(3)))
