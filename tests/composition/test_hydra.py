"""Hydra is used through its public doors: nothing of it is replaced, and what surrounds us is as it was."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import hydra._internal.config_loader_impl
import hydra._internal.hydra
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.sweeper import Sweeper
from typer.testing import CliRunner

import posbench
from posbench import cli, compose
from posbench.composition import complete
from posbench.sweep import run_application, sweep_of
from posbench.composition.choices import GROUPS

LOADER = hydra._internal.config_loader_impl.ConfigLoaderImpl
LEGAL = Sweeper.validate_batch_is_legal


def assert_untouched(*_: object) -> None:
    assert hydra._internal.hydra.ConfigLoaderImpl is LOADER
    assert Sweeper.validate_batch_is_legal is LEGAL
    if GlobalHydra.instance().is_initialized():
        assert type(GlobalHydra.instance().config_loader()) is LOADER


@pytest.mark.parametrize(
    "words", [["seed=1"], ["-m", "scheme=nope", "seed=0,1", "hydra/launcher=basic"]], ids=["run", "sweep"]
)
def test_no_class_of_hydra_is_replaced_while_a_job_runs(words: list[str]) -> None:
    said: list[str] = []
    jobs: list[object] = []

    def job(config: object) -> None:
        jobs.append(config)
        assert_untouched()

    def say(text: str) -> None:
        said.append(text)
        assert_untouched()

    outcomes = run_application("posbench train", words, job, say)
    begun = ["2 runs: 1 scheme x 2 seeds", "run 1 of 2: demo/nope/seed=0", "run 2 of 2: demo/nope/seed=1"]
    assert (len(jobs), [line.partition(", about")[0] for line in said]) == ((2, begun) if "-m" in words else (1, []))
    assert [str(outcome) for outcome in outcomes if outcome.error] == []


def test_the_package_imports_nothing_private_of_hydra() -> None:
    for root in (Path(posbench.__file__).parent, Path(posbench.__file__).parents[1] / "hydra_plugins"):
        for file in root.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
                modules = [*names, getattr(node, "module", None) or ""]
                assert not [name for name in modules if name.startswith("hydra._internal")], file


@pytest.mark.parametrize(
    "ask", [lambda: compose(["seed=3"]), lambda: sweep_of(["seed=0,1"]), lambda: complete("scheme=v")]
)
def test_an_application_of_hydra_that_calls_us_goes_on_afterwards(tmp_path: Path, ask: Callable[[], object]) -> None:
    (tmp_path / "mine.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        ask()
        assert hydra_compose("mine").answer == 42


def test_completion_knows_choices_and_fields() -> None:
    assert complete("scheme=v") == ["scheme=v_rope", "scheme=vo_rope"]
    assert complete("train.lr_") == ["train.lr_end_ratio=", "train.lr_of="]


def test_completion_knows_experiments_runs_and_published_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"experiment=ladder_s", "experiment=ladder_m"} <= set(complete("experiment=lad"))
    for name in ("demo/nope/seed=0", "demo/vo_rope/seed=1", "other/nope/seed=0", ".hydra"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def completed(*words: str) -> set[str]:
        env = {"_POSBENCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(["posbench", *words])}
        shown = CliRunner().invoke(cli.app, [], prog_name="posbench", env=env).output
        return set(re.findall(r'"([^"]+)"', shown))

    assert completed("report", "d") == {"demo"}
    assert completed("eval", "demo/") == {"demo/nope", "demo/vo_rope"}
    assert completed("report", "--against", "kexue") == {"kexue-10862", "kexue-10907"}


def test_the_help_of_train_names_every_group() -> None:
    shown = CliRunner().invoke(cli.app, ["train", "--help"]).output
    assert all(f"{group}=" in shown for group in GROUPS)


def test_what_a_glob_stands_for_is_planned() -> None:
    assert sweep_of(["seed=0,1"]) == {"seed": ["0", "1"]}, "the sweep of the default experiment is not added"
    assert sweep_of(["hydra.sweeper.params.seed='0,1'"]) == {"seed": ["0", "1"]}
    assert len(sweep_of(["experiment=demo", "seed=0,1"])["scheme"]) == 11
    assert sweep_of(["scheme=glob(qkv*)"])["scheme"] == ["qkv_rope", "qkvo_rope"]
