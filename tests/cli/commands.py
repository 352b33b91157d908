"""The commands as a user gives them, in this process, in a folder of their own; and trained runs to give them to."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from posbench import cli


@dataclass(frozen=True)
class CommandResult:
    """The exit status and output of a command."""

    status: int
    out: str
    error: str

    @property
    def refusal(self):
        """Return the message of a refused command, and check that it has the form of every refusal."""
        assert self.status == 2, (self.status, self.out, self.error)
        assert self.error.count("posbench: ") == 1 and "Traceback" not in self.error + self.out
        assert "executing job" not in self.error and len(self.error.strip().splitlines()) == 1, self.error
        return self.error.strip()


@pytest.fixture
def posbench(tmp_path, monkeypatch, capsys):
    """Return a function that gives a command in `tmp_path/here`."""
    work_dir = tmp_path / "here"
    work_dir.mkdir()
    monkeypatch.chdir(work_dir)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "200")

    def give(*words):
        monkeypatch.setattr(sys, "argv", ["posbench", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        return CommandResult(int(ended.value.code or 0), out, error)

    return give


@pytest.fixture
def short(words):
    """Return the overrides of a run of two steps, without its runs folder, which is `runs`."""
    return [word for word in words if not word.startswith(("runs_dir=", "train.steps="))] + [
        "train.steps=2",
        "hydra/launcher=basic",  # sweeps in this process, whose output is read
    ]


@pytest.fixture(scope="session")
def trained(documents, cache, tmp_path_factory):
    """Return a runs folder with `demo/{nope,vo_rope}/seed={0,1}`, which tests copy before they change it."""
    from posbench import compose
    from posbench.training import train
    from tests.conftest import small_run

    runs = tmp_path_factory.mktemp("trained") / "runs"
    for scheme in ("nope", "vo_rope"):
        for seed in (0, 1):
            train(compose([*small_run(documents, cache, runs), f"scheme={scheme}", f"seed={seed}", "train.steps=2"]))
    return runs


@pytest.fixture
def runs(trained, posbench):
    """Copy the trained runs to `runs` in the working directory of the commands."""
    return Path(shutil.copytree(trained, Path.cwd() / "runs"))


def snapshot(folder):
    """Return every path below `folder` with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }
