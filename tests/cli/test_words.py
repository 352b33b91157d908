"""Words that cannot be meant are refused at once with cause, value and remedy; nothing is left on disk."""

import re
from pathlib import Path

import pytest
import typer

from posbench.cli import app
from tests.cli.commands import snapshot
from tests.schemes import trials


def test_a_list_of_no_runs_is_no_error(posbench):
    result = posbench("ls")
    assert (
        result.status == 0 and "runs contains no runs: train one first (posbench train scheme=vo_rope)" in result.error
    )
    result = posbench("ls", "--runs-dir", "nosuch")
    assert result.status == 0 and "there is no folder nosuch: correct --runs-dir, or train a run there" in result.error


@pytest.mark.parametrize(
    "words, says",
    [
        (["eval"], r"runs contains no runs: train one first"),
        (["eval", "--runs-dir", "a"], r"no folder a: correct --runs-dir, or train .* scheme=vo_rope runs_dir=a\)"),
        (["report", "--runs-dir", "a"], r"no folder a: train first with .* experiment=demo runs_dir=a$"),
        (["report", "b", "--runs-dir", "a"], r"'b' in the working directory or in a/ \(there is no folder a: train"),
        (["eval", "nosuch"], r"there is no run or experiment 'nosuch' in the working directory or in runs/"),
        (["report"], r"runs/ contains no runs: train first with posbench train -m experiment=demo"),
        (
            ["report", "dmo"],
            r"in runs/; did you mean 'demo_cpu'\? \(runs/ contains no runs: train first",
        ),
        (["report", "--seeds", "0,a"], r"--seeds a is not a seed: give whole numbers"),
        (
            ["bench", "--model", "tiny"],
            r"there is no option '--model': settings have no dashes, write model=\.\.\. \(--help",
        ),
        (["train", "--quiet"], r"there is no option '--quiet' \(--help"),
        (["train", "--multrun"], r"there is no option '--multrun'; did you mean '--multirun'\?"),
        (["train", "-m", "--jobs", "2", "--cfg", "job"], r"--cfg shows the settings of one run: leave out -m"),
        (["train", "hydra.run.dir=out"], r"hydra\.run\.dir=out is not supported: set runs_dir=FOLDER"),
        (["train", "-m", "hydra.sweep.dir=out"], r"hydra\.sweep\.dir=out is not supported"),
        (
            ["train", "-m", "seed=0,1", "evaluation.protocols=[accuracy]"],
            r"protocol accuracy scores problems of tasks, and data=sotu is text: take another, such as fixed",
        ),
        (
            ["verify", "nope", "nosuch"],
            r"there is no scheme 'nosuch' \(posbench schemes lists them; for your own, give a class, my_",
        ),
    ],
)
def test_every_command_says_what_is_missing(posbench, words, says):
    result = posbench(*words)
    assert re.search(says, result.refusal) and not result.out, result.refusal
    assert snapshot(Path.cwd()) == {}


@pytest.mark.slow
def test_a_folder_of_ones_own_choices_is_taken_by_every_command_that_composes(posbench, cache, words):
    folder = "it's ours, too"
    (Path(folder) / "scheme").mkdir(parents=True)
    (Path(folder) / "scheme" / "mine.yaml").write_text("# Of my own.\nname: mine\nkind: rotary\nsites: [q]\n")
    config_dir = ["--config-dir", folder]
    small = ["scheme=mine", *words]
    assert "1 scheme (mine)" in posbench("plan", *small, *config_dir).out
    assert posbench("prepare", *small, *config_dir).status == 0
    result = posbench("bench", "--schemes", "mine", *words, "--rounds", "1", "--steps", "1", *config_dir)
    assert result.status == 0 and "\nmine " in result.out
    assert re.search(r"\nmine +absolute", posbench("schemes", *config_dir).out)
    assert "\nmine " in posbench("verify", "mine", *config_dir).out
    assert "there is no scheme 'mine'" in posbench("plan", *small).refusal
    for command in ("plan", "prepare", "bench", "schemes", "verify"):
        assert posbench(command, "--config-dir", "nosuch").status == 2


def test_a_traceback_comes_when_it_is_asked_for(posbench, short, monkeypatch):
    from posbench.config import ConfigError

    monkeypatch.setenv("POSBENCH_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        posbench("train", *short, "train.steps=0")


def test_a_fault_of_our_own_is_one_line_too(posbench, monkeypatch):
    from posbench import verify

    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(verify, "list_schemes", broken)
    result = posbench("schemes")
    assert result.status == 1
    assert result.error == "posbench: ZeroDivisionError: oh\n(set POSBENCH_TRACEBACK=1 to see the traceback)\n"


def test_an_own_scheme_that_mixes_number_formats_is_told_how_to_convert(posbench):
    result = posbench("verify", "nope", f"{trials.__file__}:OfOneFormat", "model.num_layers=1")
    assert result.status == 2 and "\nnope " in result.out
    assert re.search(
        r"trials\.py, line \d+: RuntimeError: .* \(inputs may be bfloat16 or float64: .*x\.to", result.error
    )


@pytest.mark.parametrize("command", ["train", "report"])
def test_ctrl_c_prints_no_traceback(posbench, runs, short, command, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for target in (
        "posbench.training.train",
        "posbench.reporting.report.report",
    ):
        monkeypatch.setattr(target, interrupted)
    result = posbench(command, *(short if command == "train" else []))
    message = "interrupted: run the same command again to resume\n" if command == "train" else ""
    assert (result.status, result.error) == (130, message)


@pytest.mark.parametrize("typed, offered", [("report de", ["demo"]), ("eval x", []), ("verify alib", ["alibi"])])
def test_a_shell_completes_experiments_and_schemes(runs, typed, offered):
    command, word = typed.split()
    (argument,) = (p for p in typer.main.get_command(app).commands[command].params if p.param_type_name == "argument")
    assert [item.value for item in argument.shell_complete(None, word)] == offered
