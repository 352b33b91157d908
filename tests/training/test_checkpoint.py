"""Checkpoints: found whole or passed over, never fewer than two, of this format, without pickle."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from posbench.runs import checkpoint
from posbench.runs.checkpoint import METRICS, MODEL, OPTIMIZER, STATE, SUMS, newest, put_weights, read_state
from tests.refusals import refuses


def write(folder, step, keep=2):
    tensors = {"weight": torch.full((3, 2), float(step))}
    return checkpoint.save(folder, step, tensors, tensors, b'{"step": 1}\n', {"loss_sum": 0.1}, keep)


def steps(folder):
    return sorted(int(path.name.removeprefix("step=")) for path in folder.iterdir())


def test_it_comes_back_as_it_was_given_and_holds_no_pickle(tmp_path):
    folder = write(tmp_path, 4)
    assert newest(tmp_path, print) == folder and read_state(folder)["loss_sum"] == 0.1
    assert checkpoint.load_tensors(folder, MODEL)["weight"].tolist() == [[4.0, 4.0]] * 3
    assert sorted(path.name for path in folder.iterdir()) == sorted([METRICS, MODEL, OPTIMIZER, STATE, SUMS])
    for path in folder.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK"))  # what a pickle or torch.save begins with


@pytest.mark.parametrize("is_cut", [False, True], ids=["a bit", "the end"])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, METRICS, STATE, SUMS])
def test_an_altered_one_is_named_and_passed_over(tmp_path, name, is_cut):
    write(tmp_path, 4)
    file = write(tmp_path, 8) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[:-1] if is_cut else content)
    notices = []
    newest_folder = newest(tmp_path, notices.append)
    assert newest_folder is not None and newest_folder.name == "step=00000004"
    assert len(notices) == 1 and "step=00000008" in notices[0] and "skipped" in notices[0]


@pytest.mark.parametrize("name", [MODEL, STATE, SUMS])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EIO, "Input/output error"), "cannot be read: Input/output error"),  # of a read: it names no file
        (PermissionError(errno.EACCES, "Permission denied", "x"), "cannot be read: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "is missing"),
    ],
)
def test_one_that_cannot_be_read_is_passed_over_with_the_reason(tmp_path, monkeypatch, name, error, says):
    write(tmp_path, 4)
    file = write(tmp_path, 8) / name
    open_path, notices = Path.open, []

    def opened(path, *arguments, **options):
        if path == file:
            raise error
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    newest_folder = newest(tmp_path, notices.append)
    assert newest_folder is not None and newest_folder.name == "step=00000004"
    assert notices == [f"checkpoint step=00000008 is damaged ({name} {says}): skipped"]


def test_the_newest_two_are_kept_and_none_is_read_again(tmp_path, monkeypatch):
    summed = []
    sum_of = checkpoint.sum_of
    monkeypatch.setattr(checkpoint, "sum_of", lambda path, sync=False: summed.append(path) or sum_of(path, sync))
    for step in (2, 4, 6):
        write(tmp_path, step, keep=1)
    assert steps(tmp_path) == [4, 6] and len(summed) == 3 * 5 and all(".tmp" in str(path) for path in summed)


def test_those_of_later_steps_go_once_an_earlier_one_is_written_again(tmp_path):
    for step in (4, 8, 12):
        write(tmp_path, step, keep=3)
    (tmp_path / "step=00000012" / STATE).unlink()
    write(tmp_path, 10, keep=3)
    assert steps(tmp_path) == [4, 8, 10]


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_checksums_are_those_of_sha256sum(tmp_path):
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=write(tmp_path, 4), check=True, capture_output=True)


def test_weights_of_another_model_are_refused_by_name():
    model = torch.nn.Linear(3, 2)
    refuses(r"bias differs", put_weights, model, {"weight": torch.ones(2, 3)})
    refuses(r"weight differs", put_weights, model, {"weight": torch.ones(2, 4), "bias": torch.ones(2)})
