"""A sweep runs every job, tells of those that failed at its end, and leaves nothing where none could run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import Give, left


def statuses(folder: Path) -> dict[str, str]:
    import json

    return {file.parent.parent.name: json.loads(file.read_text())["status"] for file in folder.rglob("run.json")}


def test_one_failing_job_does_not_keep_the_others_from_running(posbench: Give, short: list[str]) -> None:
    said = posbench("train", "-m", *short, "scheme=nope,vo_rope", "seed=-1,0")
    assert said.status == 1 and "Traceback" not in said.error
    told = [line for line in said.error.splitlines() if line.startswith("posbench: ")]
    assert len(told) == 2 and told == said.error.strip().splitlines()[-2:]
    for line, scheme in zip(told, ("nope", "vo_rope"), strict=True):
        assert line.startswith(f"posbench: demo/{scheme}/seed=-1: seed=-1 is out of range")
    at_once = "4 runs: 2 schemes x 2 seeds\nrun 1 of 4: demo/nope/seed=-1\ndemo/nope/seed=-1: seed=-1 is out of range"
    assert said.error.startswith(at_once)
    assert said.out.splitlines()[-1] == "4 runs: 2 trained, 2 failed"
    assert statuses(Path("runs")) == {"nope": "finished", "vo_rope": "finished"}


@pytest.mark.slow
def test_a_crash_in_one_job_is_told_at_the_end(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench import training
    from posbench.config import Config
    from posbench.runs import Run, run_folder

    trained: list[str] = []

    def train(config: Config, *rest: object) -> Run:
        if config.scheme.name == "nope":
            raise ZeroDivisionError("oh")
        trained.append(config.scheme.name)
        return Run(run_folder(config))

    monkeypatch.setattr(training, "train", train)
    said = posbench("train", *short, "-m", "scheme=nope,vo_rope,alibi", "seed=0")
    told = ["3 runs: 3 schemes x 1 seed", "demo/nope/seed=0: oh", "posbench: demo/nope/seed=0: ZeroDivisionError: oh"]
    lines = said.error.splitlines()
    assert (said.status, [line for line in lines if not line.startswith("run ")]) == (1, told)
    assert lines[1] == "run 1 of 3: demo/nope/seed=0" and lines[3].startswith("run 2 of 3: demo/vo_rope/seed=0")
    assert said.out.splitlines()[-1] == "3 runs: 2 trained, 1 failed"
    assert trained == ["vo_rope", "alibi"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, says",
    [
        (["scheme=nope,vo_rpe"], r"scheme=vo_rpe does not exist; did you mean 'vo_rope'\?"),
        (["scheme=glob(xyz*)"], r"scheme=glob\(xyz\*\) matches nothing"),
        (["scheme=nope,vo_rope", "seed=0,1", "train.steps=0"], r"train\.steps=0 is out of range"),
        (["scheme=nope", "seed=0,x"], r"seed=x is refused: 'x' is not a whole number"),
        (["scheme=nope", "seed=1,2", "runs_dir=elsewhere", "model.d_model=66"], r"does not divide"),
        (["experiment=demo,demo"], r"each experiment has its own sweep"),
        (["scheme=nope", "train.steps=range(1,x)"], r"is not an override|range"),
        (["scheme=nope", "seed=range(1,30000000)"], r"a sweep of 29,999,999 jobs \(29,999,999 of seed\) is more than"),
        (["scheme=nope", "seed=shuffle(range(0,1e300))"], r"is more than 10,000: sweep over fewer values"),
        (["experiment=demo", "seed=range(0,1000)"], r"a sweep of 11,000 jobs \(11 of scheme, 1,000 of seed\)"),
    ],
)
def test_a_sweep_of_which_nothing_can_run_is_one_refusal(
    posbench: Give, short: list[str], given: list[str], says: str
) -> None:
    said = posbench("train", "-m", *short, *given)
    refusals = [line for line in said.error.splitlines() if line.startswith("posbench: ")]
    assert said.status == 2 and len(refusals) == 1 and "Traceback" not in said.error
    assert re.search(says, refusals[0]), said.error
    assert left(Path.cwd()) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, says",
    [
        (
            ["train.lr=1e-3,2e-3", "scheme=nope,vo_rope"],
            r"the folder demo/nope/seed=0: train\.lr=0\.001 and train\.lr=0\.002; give them different names, such as "
            r"'experiment_name=demo_lr_\$\{train\.lr\}' \(with the quotes\)$",
        ),
        (
            ["model=tiny,demo", "scheme=nope"],
            r"model=tiny and model=demo; give each its own command, with experiment_name=",
        ),
        (["train.lr=1e-3,2e-3", "scheme=nope", "hydra.sweeper.max_batch_size=1"], r"share the folder demo/nope/seed=0"),
    ],
)
def test_two_jobs_of_one_folder_are_refused_before_either_is_trained(
    posbench: Give, short: list[str], given: list[str], says: str
) -> None:
    refusal = posbench("train", "-m", *(word for word in short if word != "model=tiny"), "seed=0", *given).refusal
    assert re.search(says, refusal), refusal
    assert left(Path.cwd()) == {}


@pytest.mark.slow
def test_the_form_that_the_refusal_names_works_and_equal_jobs_are_one(posbench: Give, short: list[str]) -> None:
    words = ["train", "-m", *short, "scheme=nope", "seed=0,0"]
    said = posbench(*words, "train.lr=1e-3,2e-3", "experiment_name=demo_lr_${train.lr}")
    assert said.status == 0 and said.error.startswith("2 runs: 2 experiments x 1 scheme x 1 seed\n"), said.error
    assert {str(file.parent) for file in Path("runs").rglob("run.json")} == {
        f"runs/demo_lr_{lr}/nope/seed=0" for lr in ("0.001", "0.002")
    }


@pytest.mark.slow
def test_a_runs_folder_that_was_there_stays(posbench: Give, short: list[str]) -> None:
    Path("runs").mkdir()
    Path("runs/multirun.yaml").write_text("mine")
    assert posbench("train", "-m", *short, "scheme=nope", "seed=0,1", "train.steps=0").status == 2
    assert left(Path.cwd()) == {"runs": b"", "runs/multirun.yaml": b"mine"}


def test_ctrl_c_ends_the_whole_sweep(posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from posbench import training

    begun: list[object] = []

    def train(config: object, *rest: object) -> None:
        begun.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", train)
    said = posbench("train", *short, "-m", "scheme=nope,vo_rope", "seed=0")
    assert said.status == 130 and len(begun) == 1 and "Traceback" not in said.error
    assert said.error.splitlines()[-1] == "interrupted before the first step: nothing was written"


def test_ctrl_c_still_tells_what_failed_before(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench import training
    from posbench.config import Config

    def train(config: Config, *rest: object) -> None:
        raise ZeroDivisionError("oh") if config.scheme.name == "nope" else KeyboardInterrupt

    monkeypatch.setattr(training, "train", train)
    said = posbench("train", *short, "-m", "scheme=nope,vo_rope,alibi", "seed=0")
    assert said.status == 130
    assert said.error.splitlines()[-2:] == [
        "posbench: demo/nope/seed=0: ZeroDivisionError: oh",
        "interrupted between two runs: give the same command again to resume",
    ]


@pytest.mark.slow
def test_one_sweep_trains_trunks_and_then_their_branches(posbench: Give, short: list[str]) -> None:
    words = [word for word in short if not word.startswith("train.")] + ["train.device=cpu", "train.dtype=float32"]
    words += ["train.compile=false", "train.context_length=32", "train.batch_size=4", "train.validation_tokens=64"]
    words += ["train.schedule=wsd", "train.tokens=2560", "train.branch_tokens=[640,1280]"]
    words += ["seed=0"]
    said = posbench("train", "-m", *words, "scheme=nope,vo_rope")
    assert said.status == 0 and said.error.startswith("6 runs: 3 experiments x 2 schemes x 1 seed\n"), said.error
    lines = [line for line in said.error.splitlines() if "begins at step" in line]
    assert lines == [
        f"demo-{tokens}/{scheme}/seed=0: begins at step {step} of demo/{scheme}/seed=0"
        for scheme in ("nope", "vo_rope")
        for tokens, step in (("640", 4), ("1.28k", 8))
    ]
    assert said.error.index("demo/vo_rope/seed=0: loss") < said.error.index("begins at step")
    again = posbench("train", "-m", *words, "scheme=nope,vo_rope")
    assert again.status == 0 and again.error.count("is finished") == 6
    assert posbench("eval", "demo-640", "--length", "32", "--protocol", "nonoverlapping").status == 0
    for words in (["demo"], ["demo-640"], ["demo", "demo-640", "demo-1.28k", "--by", "tokens"]):
        said = posbench("report", *words, "--baseline", "nope")
        assert said.status == 0, said
    assert "640" in said.out and Path("runs/demo/report/trend.svg").is_file()
