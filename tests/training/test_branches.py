"""Shorter runs that branch off a longer one: the same bytes as without the longer one, for the price of the decay."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench.composition.compose import compose
from posbench.config import Config, ConfigError, branch_name
from posbench.runs import Run, run_folder
from posbench.runs.checkpoint import weights_digest
from posbench.training import train
from posbench.training.schedule import learning_rate
from tests.conftest import small_run
from tests.training.conftest import after_step

Make = Callable[..., Config]
# Steps of 128 tokens: a trunk of 20 steps, and branches of 7 and 12, whose decays begin after 5 and 9 steps.
FAMILY = ["train.schedule=wsd", "train.steps=null", "train.warmup_ratio=0.1", "train.lr=1e-2"]
FAMILY += ["train.log_every=4", "train.validate_every=null"]
TRUNK = [*FAMILY, "train.tokens=2560", "train.branch_tokens=[896,1536]", "train.keep_checkpoints=2"]


def branch(name: str, tokens: int) -> list[str]:
    words = ["train.trunk_tokens=2560", f"train.tokens={tokens}", f"experiment_name={branch_name(name, tokens)}"]
    return [*FAMILY, *words]


@pytest.fixture(scope="session")
def _trunk(documents: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(compose([*small_run(documents, cache, tmp_path_factory.mktemp("trunk")), *TRUNK])).path


@pytest.fixture
def trunk(_trunk: Path, config: Make) -> Run:
    """Return the finished trunk."""
    return Run(Path(shutil.copytree(_trunk, run_folder(config(*TRUNK)))))


@pytest.fixture(scope="session")
def alone(documents: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Return runs as long as the branches, each from its own start."""
    words = small_run(documents, cache, tmp_path_factory.mktemp("alone"))
    return {tokens: train(compose([*words, *branch("alone", tokens)])) for tokens in (896, 1536)}


def outcome(run: Run) -> dict[str, Any]:
    """Return all that must not depend on the step at which the run began."""
    step = run.manifest.num_steps
    last = run.path / "checkpoints" / f"step={step:08d}"
    state = json.loads((last / "state.json").read_text())
    rows = [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in run.logged]
    stored = (run.path / "eval" / "validation" / "32.parquet").read_bytes()
    fields = {key: state[key] for key in ("batches", "skipped_steps", "loss_sum", "grad_norm_max")}
    fields["sums"] = re.findall(r".*safetensors", (last / "SHA256SUMS").read_text())  # the other files hold times
    return {"rows": rows, "stored": stored, "state": fields, "prints": run.manifest.fingerprints}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [896, 1536])
def test_a_branch_of_a_trunk_is_equal_byte_for_byte_to_a_run_that_decayed_there_from_its_own_start(
    config: Make, trunk: Run, alone: dict[int, Run], tokens: int
) -> None:
    steps: list[int] = []
    branched = train(config(*branch("demo", tokens)), observe=lambda phase, n, step: steps.append(n))
    assert branched.manifest.branched_at == min(steps) == {896: 5, 1536: 9}[tokens]
    manifest = alone[tokens].manifest
    assert manifest.branched_at is None and manifest.num_steps == tokens // 128
    assert outcome(branched) == outcome(alone[tokens])


@pytest.mark.slow
def test_a_trunk_is_not_changed_by_its_branches(config: Make, trunk: Run) -> None:
    plain = train(config(*FAMILY, "train.tokens=2560", "experiment_name=plain"))
    assert outcome(trunk) == outcome(plain)
    checkpoints = sorted(path.name for path in (trunk.path / "checkpoints").iterdir())
    assert checkpoints == [f"step={n:08d}" for n in (5, 9, 16, 20)], "the newest two, and where the branches begin"
    times_before = {path: path.stat().st_mtime_ns for path in trunk.path.rglob("*")}
    train(config(*branch("demo", 896)))
    assert {path: path.stat().st_mtime_ns for path in trunk.path.rglob("*")} == times_before


def test_a_branch_that_was_cut_off_resumes_and_keeps_where_it_began(
    config: Make, trunk: Run, alone: dict[int, Run]
) -> None:
    def crash() -> None:
        raise RuntimeError("the machine is on fire")

    words = [*branch("demo", 1536), "train.checkpoint_every=1"]
    with pytest.raises(RuntimeError):
        train(config(*words), observe=after_step(11, crash))
    shutil.rmtree(trunk.path)  # the trunk is no longer needed: a checkpoint of the branch is there
    resumed = train(config(*words))
    assert resumed.manifest.branched_at == 9 and outcome(resumed) == outcome(alone[1536])


@pytest.mark.slow
def test_where_the_trunk_is_another_run_a_branch_says_so_and_begins_at_its_first_step(
    config: Make, trunk: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, says in (
        ("train.lr=2e-2", r"differs in train.lr: 0.01 -> 0.02"),
        ("seed=1", "has no checkpoint of step 5"),
        ("train.validate_every=7", "differs in train.steps_between_validations"),
        ("experiment_name=short", "its name is not the name of a branch"),
    ):
        run = train(config(*branch("demo", 896), word))
        messages = capsys.readouterr().err
        assert (
            run.manifest.branched_at is None
            and f"trained from its first step ({messages.partition('(')[2]}" in messages
        )
        assert says in messages, messages
        shutil.rmtree(run.path)
    (trunk.path / "checkpoints" / "step=00000005" / "optimizer.safetensors").write_bytes(b"torn")
    assert train(config(*branch("demo", 896))).manifest.branched_at is None
    assert "optimizer.safetensors does not match its checksum" in capsys.readouterr().err


def test_costs_of_a_branch_are_those_of_a_whole_run(config: Make, trunk: Run) -> None:
    short = train(config(*branch("demo", 1536)))
    state = json.loads((trunk.path / "checkpoints" / "step=00000009" / "state.json").read_text())
    assert short.manifest.costs is not None and short.manifest.costs.train_seconds > state["train_seconds"] > 0
    assert weights_digest(short.path / "checkpoints", 12) == short.manifest.weights


def test_runs_of_a_family_have_one_learning_rate_until_a_decay_begins(config: Make) -> None:
    trunk, short = config(*TRUNK).train, config(*branch("demo", 896)).train
    rates = [[learning_rate(n, settings) for n in range(settings.num_steps)] for settings in (trunk, short)]
    assert rates[0][:5] == rates[1][:5] and rates[0][:2] == [5e-3, 1e-2]
    assert rates[1][5:] == pytest.approx([5.5e-3, 1e-3]) and rates[0][5:16] == [1e-2] * 11
    assert rates[0][-1] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["train.schedule=cosine"], r"cosine has no branches.*train\.schedule=wsd"),
        (["train.branch_tokens=[900]"], r"branch_tokens\[0\]=900 is not a whole number of steps.*nearest is 896"),
        (["train.tokens=2500"], r"train\.tokens=2500 is not a whole number of steps.*2560"),
        (["train.branch_tokens=[1536,896]"], r"must be in ascending order"),
        (["train.branch_tokens=[2560]"], r"below the trunk's train\.tokens=2560"),
        (["train.branch_tokens=[256]"], r"decay of a run of 256 tokens would begin before the 2 steps of warm-up"),
        (["train.steps=20"], r"set train\.steps=null"),
    ],
)
def test_a_family_that_cannot_be_one_is_refused_at_the_door(config: Make, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*TRUNK, *overrides)


def test_names_of_branches() -> None:
    assert branch_name("ladder_s", 1_998_848) == "ladder_s-2M" and branch_name("a-b", 512) == "a-b-512"
    assert branch_name("x", 1_250_000_000) == "x-1.25B" and branch_name("x", 200_704) == "x-201k"


def test_no_row_of_a_family_hides_its_largest_gradient(config: Make) -> None:
    run = train(config("train.log_every=1", "experiment_name=each"))
    norms = [row["grad_norm"] for row in run.logged if row["kind"] == "train"]
    rows = [row for row in train(config("train.log_every=4")).logged if row["kind"] == "train"]
    assert [row["grad_norm_max"] for row in rows] == [max(norms[n : n + 4]) for n in (0, 4, 8)]
    assert all(Path(run.path).is_dir() and row["grad_norm"] <= row["grad_norm_max"] for row in rows)
