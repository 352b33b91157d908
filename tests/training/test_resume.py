"""A run that was cut off in any way resumes to the same bytes; finished and foreign runs are not touched."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from posbench.composition.compose import compose
from posbench.config import ConfigError
from posbench.data import dataset_of
from posbench.evaluation.evaluate import evaluate_run
from posbench.evaluation.request import Request
from posbench.model.decoder import Decoder
from posbench.runs import Run, checkpoint, run_folder, state_of, tracking
from posbench.schemes import SCHEMES, Scheme
from posbench.system.signals import Stopped
from posbench.training import loop, train
from tests.conftest import small_run
from tests.faults.kills import digest
from tests.refusals import refuses
from tests.training.conftest import after_step, crash, files


def signalled(number=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), number)


def cut_off(config, step=6):
    """Return a run that ended after step `step` (0-based) without a recorded reason, as after a SIGKILL."""
    with pytest.raises(RuntimeError, match="on fire"):
        train(config, observe=after_step(step, crash))
    run = Run(run_folder(config))
    run.update_manifest(status="running", reason=None)
    return run


@pytest.fixture(scope="session")
def _cut(documents, cache, tmp_path_factory):
    return cut_off(compose(small_run(documents, cache, tmp_path_factory.mktemp("cut")))).path


@pytest.fixture
def cut(_cut, config):
    """Return the run that was cut off after 7 steps."""
    return Run(Path(shutil.copytree(_cut, run_folder(config()))))


@pytest.fixture(scope="session")
def whole(documents, cache, tmp_path_factory):
    """Return the digest of the same run without an interruption."""
    return digest(train(compose(small_run(documents, cache, tmp_path_factory.mktemp("whole")))).path)


# Signals


@pytest.mark.parametrize(("step", "number"), [(0, signal.SIGINT), (3, signal.SIGTERM), (4, signal.SIGTERM)])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_to_the_same_bytes(config, whole, step, number):
    with pytest.raises(Stopped, match=f"at step {step + 1} of 12, with a checkpoint") as stopped:
        train(config(), observe=after_step(step, signalled(number)))
    assert stopped.value.exit_status == 128 + number
    run = Run(run_folder(config()))
    assert state_of(run) == "stopped" and "at step" in run.manifest.reason
    assert (run.path / "checkpoints" / f"step={step + 1:08d}").is_dir()
    train(config())
    resumed = digest(run.path)
    assert (resumed["rows"], resumed["loss"]) == (whole["rows"], whole["loss"])
    for name in ("model", "optimizer"):
        last = f"checkpoints/step=00000012/{name}.safetensors"
        assert resumed["sums"][last] == whole["sums"][last]


class Jitter(Scheme):
    """Noise on the stream in training; otherwise none."""

    def embed(self, x, pos):
        return x + 0.3 * torch.randn_like(x) if self.training else x


def test_a_scheme_that_draws_in_training_draws_alike_after_a_resume_and_is_scored_without(config, monkeypatch):
    monkeypatch.setitem(SCHEMES, "jitter", Jitter)
    row = ("scheme=nope", "scheme.name=jitter", "scheme.kind=jitter")
    whole = train(config(*row))
    with pytest.raises(Stopped):
        train(config(*row, "experiment_name=cut"), observe=after_step(4, signalled()))
    assert train(config(*row, "experiment_name=cut")).manifest.weights == whole.manifest.weights
    [scored] = evaluate_run(
        whole, dataset_of(whole.config), Request(protocols=("validation",), lengths=(32,), again=True)
    )
    assert scored.header["nll_mean"] == pytest.approx(whole.manifest.loss, abs=1e-6)


def test_a_run_that_another_process_finished_meanwhile_is_not_taken_over(config, monkeypatch):
    build = loop.build_model

    def meanwhile(*arguments):
        monkeypatch.setattr(loop, "build_model", build)
        train(config("train.lr=1e-3"))
        return build(*arguments)

    monkeypatch.setattr(loop, "build_model", meanwhile)
    refuses("finished by another process meanwhile", train, config("train.lr=1e-4"))
    assert Run(run_folder(config())).manifest.identity["train.lr"] == 1e-3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_text_is_prepared_stops_there_and_leaves_nothing(config, tmp_path, monkeypatch, number):
    monkeypatch.setattr(loop, "dataset_of", lambda *_, **__: signalled(number)())
    with pytest.raises(Stopped, match="same command again") as stopped:
        train(config())
    assert stopped.value.exit_status == 128 + number and not (tmp_path / "runs").exists()


def test_a_signal_while_code_is_compiled_stops_at_once(config, monkeypatch):
    monkeypatch.setattr(Decoder, "compile_blocks", lambda self: None)
    run = Run(run_folder(config("train.compile=true")))
    with pytest.raises(Stopped, match="before its next step"):
        train(config("train.compile=true"), observe=after_step(0, signalled(), "forward"))
    assert not list(run.path.glob("checkpoints/step=*"))
    with pytest.raises(Stopped, match="at step 2 of 12, with a checkpoint"):
        train(config("train.compile=true"), observe=after_step(1, signalled(), "forward"))


def test_a_signal_in_the_last_validation_stops_there_and_the_run_is_finished_by_the_same_command(config, whole):
    with pytest.raises(Stopped, match="after its last step"):
        train(config(), observe=after_step(11, signalled(), "checkpoint"))
    assert digest(train(config()).path) == whole


def test_a_signal_after_the_last_word_ends_a_sweep_and_the_run_stays_finished(config, monkeypatch):
    monkeypatch.setattr(tracking.Tracker, "finish", lambda self, failed=False: signalled()())
    with pytest.raises(Stopped, match="after it was finished"):
        train(config())
    assert state_of(Run(run_folder(config()))) == "finished"


# Resumed


def test_rows_behind_the_checkpoint_and_a_torn_last_line_are_written_once(config, whole):
    run = cut_off(config(), step=10)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12, "lo')
    assert run.metrics["step"].tolist() == [0, 3, 6, 6, 9]
    train(config())
    assert digest(run.path) == whole


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 2, "status": "died", "identity": 7}'])
def test_a_half_written_folder_without_a_checkpoint_is_begun_anew(config, content):
    folder = run_folder(config("train.steps=1"))
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    assert state_of(Run(folder)) == "unreadable"
    assert train(config("train.steps=1")).manifest.status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "empty", "torn"])
def test_a_lost_manifest_is_made_again_from_the_checkpoint(config, cut, whole, damage):
    cut.update_manifest(started="then")
    manifest = cut.path / "run.json"
    manifest_before = json.loads(manifest.read_text())
    cut_off(config(), step=10)  # so that a checkpoint holds the manifest
    manifest.unlink() if damage == "missing" else os.truncate(manifest, 0 if damage == "empty" else 100)
    assert state_of(cut) == "unreadable"
    assert digest(train(config()).path) == whole
    assert cut.manifest.started == manifest_before["started"] == "then"


def test_files_lost_or_left_by_a_killed_writer_are_written_again(config, cut, whole):
    (cut.path / "config.yaml").unlink()
    (cut.path / "tokenizer.json").write_text("{")
    (cut.path / ".run.json.123.tmp").write_text("{")
    (cut.path / "checkpoints" / ".step=00000008.tmp").mkdir()
    (cut.path / "eval" / "validation").mkdir(parents=True)
    (cut.path / "eval" / "validation" / ".32.parquet.123.tmp").write_text("PAR1")
    assert digest(train(config()).path) == whole


def test_what_changed_since_the_run_began_is_said(config, cut):
    from rich.console import Console

    cut.update_manifest(versions={**cut.manifest.versions, "torch": "1.0"})
    console = Console(record=True, width=300)
    train(config(), console)
    assert "versions.torch: 1.0 -> " in console.export_text()


# Refused, or not touched


def test_a_run_of_two_codes_is_the_run_of_neither(config, cut, monkeypatch):
    old = cut.manifest.fingerprints.code
    monkeypatch.setattr(loop.fingerprints, "code_fingerprint", lambda *_: "newcode")
    cut_off(config(), 8)
    assert train(config()).manifest.fingerprints.code == f"{old}+newcode"


def test_a_finished_run_is_left_alone_and_no_model_is_built_to_see_it(config, monkeypatch):
    run = train(config())
    files_before = files(run.path)
    for name in ("build_model", "Batches"):
        monkeypatch.setattr(loop, name, None)
    train(config())
    assert files(run.path) == files_before


def test_a_manifest_of_another_format_is_refused_in_a_sentence(config, cut):
    file = cut.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    refuses("has format 99; this posbench reads format 2: use the version that wrote it", train, config())


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(config, cut):
    files_before = files(cut.path)
    refuses(
        r"\(recorded -> now\): scheme\.base: 10000\.0 -> 500000\.0; train\.beta2: 0\.95 -> 0\.99",
        train,
        config("scheme.base=500000.0", "train.beta2=0.99"),
    )
    assert {**files_before, str(cut.path): 0} == {**files(cut.path), str(cut.path): 0}
    (cut.path / "run.json").unlink()
    refuses(r"scheme\.base", train, config("scheme.base=500000.0"))
    with pytest.raises(ConfigError, match=r"train\.num_steps: 12 -> 13") as refused:
        train(config("train.steps=13"))
    assert "trunk_tokens" not in str(refused.value)  # only branches have it


def test_a_run_that_nobody_trains_is_interrupted(config):
    states = []
    look = after_step(6, lambda: states.append(state_of(Run(run_folder(config())))))
    run = train(config(), observe=look)
    assert states == ["running"] and state_of(run) == "finished"
    run.update_manifest(status="running")
    assert state_of(run) == "interrupted"
    assert not (run.path / ".lock").exists()
    (run.path / ".lock").write_text("{}")  # a dead process's
    assert state_of(run) == "interrupted"


# A full disk


def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(config, whole, monkeypatch):
    import safetensors

    save_file = checkpoint.save_file

    def full(tensors, path):
        save_file(tensors, path)
        if "step=00000008" in str(path):
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    refuses(r"checkpoint of step 8 .*No space left", train, config())
    run = Run(run_folder(config()))
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step=00000004"]
    assert state_of(run) == "stopped" and "No space left" in run.manifest.reason
    monkeypatch.setattr(checkpoint, "save_file", save_file)
    assert digest(train(config()).path) == whole
