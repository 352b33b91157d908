"""Checkpoints that are written beside the steps, as on a GPU, are those that the loop would write itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench.config import Config, ConfigError
from posbench.runs import checkpoint
from posbench.training import run as training_run
from posbench.training import train
from posbench.training.writer import Writer

Make = Callable[..., Config]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run writes in a thread, which takes its time."""
    save = checkpoint.save

    def slow(*given: Any) -> Path:
        time.sleep(0.1)
        return save(*given)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(training_run, "Writer", lambda beside: Writer(beside=True))


def contents(run: Path) -> dict[str, bytes]:
    return {f"{f.parent.name}/{f.name}": f.read_bytes() for f in sorted((run / "checkpoints").glob("*/*.safetensors"))}


def test_steps_that_follow_do_not_reach_into_a_checkpoint(config: Make, request: pytest.FixtureRequest) -> None:
    usual = contents(train(config("experiment_name=usual")).path)
    request.getfixturevalue("beside")
    run = train(config("experiment_name=beside"))
    assert len(usual) == 4 and contents(run.path) == usual  # weights and moments of two steps
    assert run.is_finished and run.manifest.weights == checkpoint.weights_digest(run.path / "checkpoints", 12)


def test_what_goes_wrong_in_the_thread_ends_the_run_with_its_reason(
    config: Make, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Path:
        raise ConfigError("could not write the checkpoint of step 4: No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(ConfigError, match="No space left"):
        train(config())
