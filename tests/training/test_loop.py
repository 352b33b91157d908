"""Runs: fair between schemes, exact when resumed, refused when they are another's."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from posbench import load_run
from posbench.config import Config, ConfigError
from posbench.data import Batches, prepare
from posbench.interruption import Stopped
from posbench.locking import hold
from posbench.runs import Run
from posbench.training import Died, loop, train
from posbench.training.checkpoint import load_tensors, newest

Make = Callable[..., Config]


def _digest(run: Run) -> dict[str, Any]:
    """What must not depend on interruptions: final weights and moments, losses of every row."""
    checkpoint = newest(run.path / "checkpoints", print)
    assert checkpoint is not None
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest(),
        "moments": hashlib.sha256((checkpoint / "optimizer.safetensors").read_bytes()).hexdigest(),
        "rows": [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows],
        "batches": run.manifest["fingerprints"]["batches"],
        "loss": run.manifest["loss"],
    }


def test_a_run_learns_and_is_read_back(config: Make) -> None:
    run = load_run(train(config("scheme=vo_rope", "train.steps=40", "train.lr=1e-2")).path)
    losses = run.metrics.query("kind == 'validation'")["loss"].tolist()
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)  # nothing is known at the start
    assert losses[-1] < losses[0] - 1
    assert run.manifest["status"] == "finished" and run.manifest["loss"] < losses[0] - 1
    model = run.load_model()
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 257)
    assert run.tokenizer.decode(run.tokenizer.encode("water").ids) == "water"
    assert run.config.scheme.name == "vo_rope"


def test_schemes_under_one_seed_share_weights_and_batches(config: Make) -> None:
    runs = [train(config(f"scheme={name}", "train.steps=3")) for name in ("nope", "sinusoidal", "qkvo_rope")]
    for key in ("initial_weights", "batches", "data", "tokenizer", "config", "code"):
        assert len({run.manifest["fingerprints"][key] for run in runs}) == 1, key
    other = train(config("scheme=nope", "train.steps=3", "seed=1"))
    for key in ("initial_weights", "batches"):
        assert other.manifest["fingerprints"][key] != runs[0].manifest["fingerprints"][key]
    assert len({run.manifest["loss"] for run in runs}) == 3


def test_the_loss_is_the_mean_of_the_stored_windows_and_of_plain_torch(config: Make) -> None:
    import pandas as pd

    made = config("scheme=qk_rope")
    run = train(made)
    rows = pd.read_parquet(run.path / "eval" / "validation" / "32.parquet")
    assert rows["nll"].sum() / rows["targets"].sum() == run.manifest["loss"]
    split = prepare(made).validation
    tokens = torch.from_numpy(np.array(split.tokens[: len(split.tokens) // 32 * 32 + 1], dtype=np.int64))
    tokens = tokens[: (len(tokens) - 1) // 32 * 32 + 1]
    inputs, targets = tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)
    with torch.no_grad():
        logits = run.load_model().double()(inputs)
    scored = targets != prepare(made).bos_id
    nll = torch.nn.functional.cross_entropy(logits[scored], targets[scored])
    assert run.manifest["loss"] == pytest.approx(float(nll), abs=1e-5)


@pytest.mark.parametrize("step", [1, 4, 5, 9])
def test_a_stopped_run_goes_on_to_the_same_bytes(config: Make, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(config("scheme=qkvo_rope", "experiment_name=whole", "train.accumulation=2"))
    original = loop._Training._one_step

    def stop_after(self: Any, n: int) -> torch.Tensor:
        result = original(self, n)
        if n + 1 == step:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return result

    cut = config("scheme=qkvo_rope", "experiment_name=cut", "train.accumulation=2")
    monkeypatch.setattr(loop._Training, "_one_step", stop_after)
    with pytest.raises(Stopped) as stopped:
        train(cut)
    assert stopped.value.exit_status == 143
    monkeypatch.setattr(loop._Training, "_one_step", original)
    assert _digest(train(cut)) == _digest(whole)


def test_a_finished_run_is_left_alone(config: Make) -> None:
    run = train(config())
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    train(config())
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()} == before


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(config: Make) -> None:
    train(config())
    with pytest.raises(ConfigError, match=r"scheme\.base: 10000\.0 -> 500000\.0"):
        train(config("scheme.base=500000.0"))


def test_changed_text_in_the_same_folder_is_refused(config: Make, tmp_path: Path) -> None:
    from tests.conftest import write_documents

    train(config())
    other = write_documents(tmp_path / "other", words=290)
    with pytest.raises(ConfigError, match="fingerprint of data"):
        train(config(f"data.path={other}/*.txt"))


def test_a_second_process_on_a_run_is_refused_with_the_holder(config: Make) -> None:
    import os

    made = config()
    folder = Path(made.runs_dir) / made.experiment_name / made.scheme.name / "seed=0"
    refused: list[str] = []

    def second() -> None:
        try:
            train(made)
        except ConfigError as error:
            refused.append(str(error))

    with hold(folder):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert refused and f"process {os.getpid()}" in refused[0]
    assert not folder.exists()  # nothing left behind by either


def test_a_refused_run_leaves_nothing_behind(config: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheme\.bsae"):
        train(config("+scheme.bsae=1"))
    with pytest.raises(ConfigError, match="context"):
        train(config("train.context_length=100000"))
    assert not (tmp_path / "runs").exists()


def _poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    original = loop._Training._one_step

    def poisoned(self: Any, n: int) -> torch.Tensor:
        weight = self.model.norm.weight
        if n in steps:
            with torch.no_grad():
                kept = weight.clone()
                weight.fill_(math.nan)
            try:
                return original(self, n)
            finally:
                with torch.no_grad():
                    assert torch.isnan(weight).all()  # the update was refused
                    weight.copy_(kept)
        return original(self, n)

    monkeypatch.setattr(loop._Training, "_one_step", poisoned)


def test_a_step_of_nan_is_skipped_named_and_counted(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, {4})
    console = Console(record=True, width=200)
    run = train(config(), console)
    assert run.manifest["status"] == "finished" and run.manifest["skipped_steps"] == 1
    text = console.export_text()
    assert "skipped step 5: loss nan" in text and "learning rate" in text and "batch 4" in text


def test_a_run_of_nan_dies_and_says_why(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, {2, 3, 4, 5})
    with pytest.raises(Died, match=r"train\.lr"):
        train(config("train.max_skipped_steps=2"))
    made = config()
    manifest = load_run(Path(made.runs_dir) / made.experiment_name / made.scheme.name / "seed=0").manifest
    assert manifest["status"] == "died" and "not finite" in manifest["reason"]


def test_batches_are_the_same_whatever_came_before(config: Make) -> None:
    made = config()
    batches = Batches(prepare(made).train, 32, 4, 0)
    alone = batches.batch(7)
    for n in (0, 3, 100, 2):
        batches.batch(n)
    assert np.array_equal(batches.batch(7), alone)


def test_accumulation_changes_no_result_beyond_rounding(config: Make) -> None:
    one = train(config("experiment_name=one"))
    four = train(config("experiment_name=four", "train.accumulation=4"))
    assert one.manifest["loss"] == pytest.approx(four.manifest["loss"], abs=1e-5)
    assert load_tensors(newest(one.path / "checkpoints", print), "model.safetensors").keys()
