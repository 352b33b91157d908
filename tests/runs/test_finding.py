"""A runs folder that several people share: what may not be read, or is torn, is named and stands in nobody's way."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from posbench import results
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.question import Question
from posbench.listing import list_runs
from posbench.runs import find_runs, load_run
from posbench.runs.finding import pack_experiment
from posbench.runs.named import experiment_named, runs_named
from tests.cli.commands import trained  # noqa: F401

_OVER_MODES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of <linux/capability.h>


@pytest.fixture
def powerless() -> Iterator[None]:
    """File modes hold for this thread, even where it is root's."""
    if os.geteuid() != 0:
        yield
        return
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] &= ~_OVER_MODES
    assert libc.capset(header, sets) == 0
    yield
    sets[0] = before
    assert libc.capset(header, sets) == 0


@pytest.fixture
def shared(trained: Path, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    runs = Path(shutil.copytree(trained, tmp_path / "runs"))
    yield runs
    for place in [runs, *runs.rglob("*")]:
        place.chmod(0o755)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=300)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("place", ["of_others", "demo/of_others"])
def test_a_folder_that_may_not_be_read_is_named_and_skipped(
    shared: Path, place: str, powerless: None, console: Console, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (shared / place).mkdir()
    (shared / place).chmod(0)
    assert len(results(shared)) == len(runs_named([], shared)) == 4
    assert capsys.readouterr().err == f"skipped {shared / place}, which cannot be read: Permission denied\n", "once"
    assert experiment_named(None, shared) == shared / "demo"
    pack_experiment(shared / "demo", tmp_path / "pack.zip", print)
    assert len(find_runs(tmp_path / "pack.zip")) == 4


@pytest.mark.parametrize("part", ["", "run.json", "eval"])
def test_a_run_that_may_not_be_read_is_left_out_with_the_reason(
    shared: Path, part: str, powerless: None, console: Console, tmp_path: Path
) -> None:
    run = shared / "demo/nope/seed=1"
    (run / part).chmod(0)
    frame = results(shared).set_index(["scheme", "seed"])
    assert frame.loc[("nope", 1), "status"] == "unreadable"
    assert "Permission denied" in frame.loc[("nope", 1), "reason"]
    assert "and train it again" not in frame.loc[("nope", 1), "reason"], "it is somebody's"
    notices: list[str] = []
    pack_experiment(shared / "demo", tmp_path / "pack.zip", notices.append)
    assert "demo/nope/seed=1 is unreadable: skipped" in notices[0] or part == "eval"
    if part in ("", "run.json"):
        answers = evaluate_runs(runs_named([], shared), Question(lengths=(64,)), console, named=False)
        assert len(answers) == 3 and "demo/nope/seed=1 is unreadable: skipped" in said(console)


def test_links_are_followed_and_every_run_is_found_once(shared: Path, tmp_path: Path) -> None:
    (shared / "demo/nope").rename(tmp_path / "nope")
    (shared / "demo/nope").symlink_to(tmp_path / "nope")  # kept on another disk
    (shared / "demo/alias").symlink_to(shared / "demo/vo_rope")
    (shared / "demo/vo_rope/circle").symlink_to(shared)
    names = [str(run.path.relative_to(shared)) for run in find_runs(shared)]
    assert names == [f"demo/{scheme}/seed={seed}" for scheme in ("nope", "vo_rope") for seed in (0, 1)]


@pytest.mark.parametrize("part", ["eval", "checkpoints"])
def test_a_part_of_a_run_that_may_not_be_read_costs_others_no_line_of_the_list(
    shared: Path, part: str, powerless: None
) -> None:
    place = shared / "demo/nope/seed=1" / part
    place.mkdir(exist_ok=True)
    (place / "file").touch()
    place.chmod(0o600 if part == "checkpoints" else 0)  # names without files, and nothing at all
    states = {row.path: row.state for row in list_runs(find_runs(shared))}
    assert list(states.values()).count("finished") == (3 if part == "eval" else 4)


def test_what_one_reader_does_to_a_configuration_no_other_sees(shared: Path) -> None:
    """Equal files are parsed once."""
    place = shared / "demo/nope/seed=1"
    load_run(place).config.train.lr = 7.0
    assert load_run(place).config.train.lr != 7.0
