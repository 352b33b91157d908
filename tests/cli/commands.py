"""The commands as a user gives them, in this process, in a folder of their own; and trained runs to give them to."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from posbench import cli


@dataclass(frozen=True)
class Said:
    """What came of a command."""

    status: int
    out: str
    error: str

    @property
    def refusal(self) -> str:
        """The one message of a command that was refused, held to what every refusal must be."""
        assert self.status == 2, (self.status, self.out, self.error)
        assert self.error.count("posbench: ") == 1 and "Traceback" not in self.error + self.out
        assert "executing job" not in self.error and len(self.error.strip().splitlines()) == 1, self.error
        return self.error.strip()


Give = Callable[..., Said]


@pytest.fixture
def posbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Give a command in `tmp_path/here`."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(logging, "raiseExceptions", False)  # `--info` leaves a handler to this test's closed stdout
    monkeypatch.chdir(here)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "200")

    def give(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["posbench", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, error)

    return give


@pytest.fixture
def short(words: list[str]) -> list[str]:
    """The words of a run of two steps, without its runs folder: that is `runs`, here."""
    return [word for word in words if not word.startswith(("runs_dir=", "train.steps="))] + [
        "train.steps=2",
        "hydra/launcher=basic",  # sweeps in this process, whose output is read
    ]


@pytest.fixture(scope="session")
def trained(documents: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with `demo/{nope,vo_rope}/seed={0,1}`, to be copied by whoever changes it."""
    from posbench import compose
    from posbench.training import train
    from tests.conftest import small_run

    runs = tmp_path_factory.mktemp("trained") / "runs"
    for scheme in ("nope", "vo_rope"):
        for seed in (0, 1):
            train(compose([*small_run(documents, cache, runs), f"scheme={scheme}", f"seed={seed}", "train.steps=2"]))
    return runs


@pytest.fixture
def runs(trained: Path, posbench: Give) -> Path:
    """A copy of them, as `runs` in the folder where commands are given."""
    return Path(shutil.copytree(trained, Path.cwd() / "runs"))


def left(folder: Path) -> dict[str, bytes]:
    """Every path below `folder` with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }
