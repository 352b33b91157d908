"""What posbench starts imports nothing from the folder in which the command is given, which somebody else may fill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import joblib
import pytest

import posbench as package
from posbench.machine import children
from posbench.tracking.recordings import uploaded
from tests.cli.commands import Give

TOUCH = "from pathlib import Path\nPath(__file__).with_name('canary').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose modules have the names of those that posbench has others start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("wandb", "joblib", "torch", "submitit", "colorsys"):
        Path(f"{name}.py").write_text(TOUCH)
    return tmp_path


def test_the_reader_of_recordings_is_the_installed_one(folder: Path) -> None:
    recording = folder / "run-20260101_000000-abc"
    recording.mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        uploaded([recording])  # wandb's own refusal: there is nothing in it
    assert not Path("canary").exists()


def test_a_command_shields_all_that_it_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """joblib's workers begin with `python -m joblib...`, as torchrun's and submitit's do."""
    assert subprocess.run([sys.executable, "-m", "colorsys"], check=False).returncode == 0
    assert Path("canary").exists(), "without a shield it would run"
    Path("canary").unlink()
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that it is put back
    children.shield_children()
    assert joblib.Parallel(n_jobs=2)(map(joblib.delayed(abs), (-1, -2))) == [1, 2]
    assert not Path("canary").exists()


def test_every_command_begins_with_it(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert posbench("--version").status == 0
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_a_checkout_that_is_not_installed_stays_importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path(package.__file__).parent.parent)
    for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", [home, *(place for place in sys.path if Path(place).resolve() != Path(home))])
    children.shield_children()
    assert os.environ["PYTHONPATH"] == home
    monkeypatch.setattr(sys, "path", ["/usr/bin", home])
    monkeypatch.setenv("PYTHONPATH", "")
    children.shield_children()
    assert os.environ["PYTHONPATH"] == "", "an installed one needs nothing"


def test_pictures_are_drawn_by_our_settings_alone() -> None:
    """A `matplotlibrc` in the working folder sets matplotlib's, and could have text run through LaTeX."""
    import matplotlib

    from posbench.reporting.figures import style

    with matplotlib.rc_context({"text.usetex": True, "lines.linestyle": ":"}), style():
        assert not matplotlib.rcParams["text.usetex"] and matplotlib.rcParams["lines.linestyle"] == "-"
        assert matplotlib.rcParams["svg.hashsalt"] == "posbench"
