"""A run that was cut off, however, goes on to the same bytes; one that is another's or finished is left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench import tracking
from posbench.composition import compose
from posbench.config import Config, ConfigError
from posbench.machine.files import write_json
from posbench.machine.signals import Stopped, StopSignals
from posbench.runs import Run, append_metrics, run_folder, state_of
from posbench.training import loop, train
from tests.conftest import small_run, write_documents
from tests.faults.kills import digest
from tests.training.conftest import files

Make = Callable[..., Config]
AtStep = Callable[..., None]


def never() -> None:
    """Nothing happens."""


def signalled(number: int = signal.SIGTERM) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def crash() -> None:
    raise RuntimeError("the machine is on fire")


def cut_off(at_step: AtStep, config: Config, step: int = 6) -> Run:
    """A run that broke off after its step `step` (0-based), with no more said than a SIGKILL says."""
    at_step(step, crash)
    with pytest.raises(RuntimeError, match="on fire"):
        train(config)
    at_step(step, never)
    run = Run(run_folder(config))
    run.update_manifest(status="running", reason=None)
    return run


@pytest.fixture(scope="session")
def whole(documents: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run comes to that nothing happens to."""
    return digest(train(compose(small_run(documents, cache, tmp_path_factory.mktemp("whole")))).path)


# Signals


@pytest.mark.parametrize(("step", "number"), [(0, signal.SIGINT), (3, signal.SIGTERM), (4, signal.SIGTERM)])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_to_the_same_bytes(
    config: Make, whole: dict[str, Any], at_step: AtStep, step: int, number: int
) -> None:
    at_step(step, signalled(number))
    with pytest.raises(Stopped, match=f"at step {step + 1} of 12, with a checkpoint") as stopped:
        train(config())
    assert stopped.value.exit_status == 128 + number
    run = Run(run_folder(config()))
    assert state_of(run) == "stopped" and "at step" in run.manifest["reason"]
    assert (run.path / "checkpoints" / f"step={step + 1:08d}").is_dir()
    at_step(step, never)
    train(config())
    found = digest(run.path)
    assert (found["rows"], found["loss"]) == (whole["rows"], whole["loss"])
    for name in ("model", "optimizer"):
        last = f"checkpoints/step=00000012/{name}.safetensors"
        assert found["sums"][last] == whole["sums"][last]


def test_sigterm_ends_the_command_with_143_and_a_checkpoint(words: list[str], tmp_path: Path) -> None:
    words = [*words, "train.steps=100000", "train.checkpoint_every=100000"]
    process = subprocess.Popen([sys.executable, "-m", "posbench", "train", *words], cwd=tmp_path)
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list(tmp_path.glob("runs/*/*/*/metrics.jsonl"))) == 0:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 143
    assert list(tmp_path.glob("runs/*/*/*/checkpoints/step=*/state.json"))


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopSignals("a run") as signals:
        signals.waits = True
        signalled(signal.SIGTERM)()
        assert left == [] and signals.received == signal.SIGTERM
        signalled(signal.SIGINT)()
    assert left == [130]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_text_is_prepared_stops_there_and_leaves_nothing(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(loop, "prepare", lambda *_, **__: signalled(number)())
    with pytest.raises(Stopped, match="same command again") as stopped:
        train(config())
    assert stopped.value.exit_status == 128 + number and not (tmp_path / "runs").exists()


def test_a_signal_in_the_last_validation_stops_there_and_the_run_is_finished_by_the_same_command(
    config: Make, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = loop._Training._finish

    def signal_first(self: Any, *arguments: Any) -> None:
        signalled()()
        finish(self, *arguments)

    monkeypatch.setattr(loop._Training, "_finish", signal_first)
    with pytest.raises(Stopped, match="after its last step"):
        train(config())
    monkeypatch.setattr(loop._Training, "_finish", finish)
    assert digest(train(config()).path) == whole


def test_a_signal_after_the_last_word_ends_a_sweep_and_the_run_stays_finished(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.Tracker, "finish", lambda self, failed=False: signalled()())
    with pytest.raises(Stopped, match="after it was finished"):
        train(config())
    assert state_of(Run(run_folder(config()))) == "finished"


# Going on


@pytest.mark.parametrize("step", [2, 6])
def test_a_crash_is_stopped_in_the_manifest_with_its_reason(config: Make, at_step: AtStep, step: int) -> None:
    at_step(step, crash)
    with pytest.raises(RuntimeError):
        train(config())
    manifest = Run(run_folder(config())).manifest
    assert manifest["status"] == "stopped" and manifest["reason"] == "the machine is on fire" and manifest["ended"]


def test_rows_behind_the_checkpoint_and_a_torn_last_line_are_written_once(
    config: Make, whole: dict[str, Any], at_step: AtStep
) -> None:
    run = cut_off(at_step, config(), step=10)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12, "lo')
    assert run.metrics["step"].tolist() == [0, 3, 6, 6, 9]
    train(config())
    assert digest(run.path) == whole


def test_rows_that_a_crash_lost_come_back_from_the_checkpoint(
    config: Make, whole: dict[str, Any], at_step: AtStep
) -> None:
    run = cut_off(at_step, config(), step=10)
    (run.path / "metrics.jsonl").unlink()
    assert digest(train(config()).path) == whole


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "status": "died", "identity": 7}'])
def test_a_half_written_folder_without_a_checkpoint_is_begun_anew(config: Make, content: str) -> None:
    folder = run_folder(config())
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    assert state_of(Run(folder)) == "unreadable"
    assert train(config()).manifest["status"] == "finished"


@pytest.mark.parametrize("how", ["missing", "empty", "torn"])
def test_a_lost_manifest_is_made_again_from_the_checkpoint(
    config: Make, whole: dict[str, Any], at_step: AtStep, how: str
) -> None:
    run = cut_off(at_step, config())
    run.update_manifest(started="then")
    manifest = run.path / "run.json"
    kept = json.loads(manifest.read_text())
    cut_off(at_step, config(), step=10)  # so that a checkpoint holds the manifest
    manifest.unlink() if how == "missing" else os.truncate(manifest, 0 if how == "empty" else 100)
    assert state_of(run) == "unreadable"
    assert digest(train(config()).path) == whole
    assert run.manifest["started"] == kept["started"] == "then"


def test_files_lost_or_left_by_a_killed_writer_are_mended(config: Make, whole: dict[str, Any], at_step: AtStep) -> None:
    run = cut_off(at_step, config())
    (run.path / "config.yaml").unlink()
    (run.path / "tokenizer.json").write_text("{")
    (run.path / ".run.json.123.tmp").write_text("{")
    (run.path / "checkpoints" / ".step=00000008.tmp").mkdir()
    (run.path / "eval" / "validation").mkdir(parents=True)
    (run.path / "eval" / "validation" / ".32.parquet.123.tmp").write_text("PAR1")
    assert digest(train(config()).path) == whole


@pytest.mark.parametrize("step", [1, 6])
def test_a_run_keeps_its_wandb_run(config: Make, at_step: AtStep, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    ids = []

    def opened(config: Config, run: Run, manifest: dict[str, Any], notice: object) -> tracking.Tracker:
        ids.append(tracking._stored_id(run) or tracking._run_id(config, run, manifest))
        return tracking.Tracker()

    monkeypatch.setattr(loop, "open_tracker", opened)
    monkeypatch.setattr(loop, "_now", iter(map(str, range(100))).__next__)
    cut_off(at_step, config(), step)
    train(config())
    assert len(ids) == 2 and ids[0] == ids[1]


def test_what_changed_since_the_run_began_is_said(config: Make, at_step: AtStep) -> None:
    from rich.console import Console

    run = cut_off(at_step, config())
    run.update_manifest(versions={**run.manifest["versions"], "torch": "1.0"})
    console = Console(record=True, width=300)
    train(config(), console)
    assert "versions.torch: 1.0 -> " in console.export_text()


# Refused, or left alone


def test_a_run_of_two_codes_is_the_run_of_neither(
    config: Make, at_step: AtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = cut_off(at_step, config())
    old = begun.manifest["fingerprints"]["code"]
    monkeypatch.setattr(loop.fingerprints, "code_fingerprint", lambda *_: "newcode")
    cut_off(at_step, config(), 8)
    assert train(config()).manifest["fingerprints"]["code"] == f"{old}+newcode"


def test_a_finished_run_is_left_alone(config: Make) -> None:
    run = train(config())
    before = files(run.path)
    train(config())
    assert files(run.path) == before


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(config: Make, at_step: AtStep) -> None:
    run = cut_off(at_step, config())
    before = files(run.path)
    with pytest.raises(ConfigError, match=r"scheme\.base: 10000\.0 -> 500000\.0; train\.beta2: 0\.95 -> 0\.99"):
        train(config("scheme.base=500000.0", "train.beta2=0.99"))
    assert {**before, str(run.path): 0} == {**files(run.path), str(run.path): 0}
    (run.path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"scheme\.base"):
        train(config("scheme.base=500000.0"))


def test_changed_text_in_the_same_folder_is_refused(config: Make, at_step: AtStep, tmp_path: Path) -> None:
    cut_off(at_step, config())
    other = write_documents(tmp_path / "other", words=290)
    with pytest.raises(ConfigError, match=r"fingerprint of data: \w+ -> \w+"):
        train(config(f"data.path={other}/*.txt"))


def test_a_folder_in_which_nothing_was_kept_may_be_had_by_another_configuration(config: Make, at_step: AtStep) -> None:
    cut_off(at_step, config(), step=1)
    assert train(config("train.accumulation=2")).manifest["status"] == "finished"


@pytest.mark.parametrize(("found", "remedy"), [(99, "upgrade posbench"), (0, "the posbench that wrote it")])
def test_another_format_says_so(config: Make, at_step: AtStep, found: int, remedy: str) -> None:
    run = cut_off(at_step, config())
    run.update_manifest(format=found)
    with pytest.raises(ConfigError, match=f"of format {found}; this posbench reads format 1: .*{remedy}"):
        train(config())


def test_a_run_that_nobody_trains_is_interrupted(config: Make, at_step: AtStep) -> None:
    seen = []
    at_step(6, lambda: seen.append(state_of(Run(run_folder(config())))))
    run = train(config())
    assert seen == ["running"] and state_of(run) == "finished"
    run.update_manifest(status="running")
    assert state_of(run) == "interrupted"
    assert not (run.path / ".lock").exists()
    (run.path / ".lock").write_text("{}")  # a dead process's
    assert state_of(run) == "interrupted"


def test_a_line_of_metrics_that_is_none_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"format": 1})
    append_metrics(tmp_path / "metrics.jsonl", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 holds no row"):
        _ = Run(tmp_path).metrics


# A full disk


def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(
    config: Make, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors
    import safetensors.torch

    save_file = safetensors.torch.save_file

    def full(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if "step=00000008" in str(path):
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ConfigError, match=r"checkpoint of step 8 .*No space left .*1\.6 MB are needed, .* are free"):
        train(config())
    run = Run(run_folder(config()))
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step=00000004"]
    assert state_of(run) == "stopped" and "No space left" in run.manifest["reason"]
    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    assert digest(train(config()).path) == whole


def test_a_full_disk_under_the_metrics_is_said(config: Make, at_step: AtStep) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    at_step(6, full)
    with pytest.raises(ConfigError, match=r"stopped at step 6: No space left on device metrics\.jsonl"):
        train(config())
    assert state_of(Run(run_folder(config()))) == "stopped"
    shutil.rmtree(run_folder(config()))
