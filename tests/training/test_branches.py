"""Shorter runs that branch off a longer one: the same bytes as without the longer one, for the price of the decay."""

import json
import re
import shutil
from pathlib import Path

import pytest

from posbench.composition.compose import compose
from posbench.config import branch_name
from posbench.runs import Run, run_folder
from posbench.training import train
from tests.conftest import small_run
from tests.refusals import refuses
from tests.training.conftest import after_step, crash

# Steps of 128 tokens: a trunk of 20 steps, and branches of 7 and 12, whose decays begin after 5 and 9 steps.
FAMILY = ["train.schedule=wsd", "train.steps=null", "train.warmup_ratio=0.1", "train.lr=1e-2"]
FAMILY += ["train.log_every=4", "train.validate_every=null"]
TRUNK = [*FAMILY, "train.tokens=2560", "train.branch_tokens=[896,1536]", "train.keep_checkpoints=2"]


def branch(name, tokens):
    words = ["train.trunk_tokens=2560", f"train.tokens={tokens}", f"experiment_name={branch_name(name, tokens)}"]
    return [*FAMILY, *words]


@pytest.fixture(scope="session")
def _trunk(documents, cache, tmp_path_factory):
    return train(compose([*small_run(documents, cache, tmp_path_factory.mktemp("trunk")), *TRUNK])).path


@pytest.fixture
def trunk(_trunk, config):
    """Return the finished trunk."""
    return Run(Path(shutil.copytree(_trunk, run_folder(config(*TRUNK)))))


@pytest.fixture(scope="session")
def alone(documents, cache, tmp_path_factory):
    """Return runs as long as the branches, each from its own start."""
    words = small_run(documents, cache, tmp_path_factory.mktemp("alone"))
    return {tokens: train(compose([*words, *branch("alone", tokens)])) for tokens in (896, 1536)}


def outcome(run):
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
    config, trunk, alone, tokens
):
    steps = []
    branched = train(config(*branch("demo", tokens)), observe=lambda phase, n, step: steps.append(n))
    assert branched.manifest.branched_at == min(steps) == {896: 5, 1536: 9}[tokens]
    manifest = alone[tokens].manifest
    assert manifest.branched_at is None and manifest.num_steps == tokens // 128
    assert outcome(branched) == outcome(alone[tokens])


@pytest.mark.slow
def test_a_trunk_is_not_changed_by_its_branches(config, trunk):
    plain = train(config(*FAMILY, "train.tokens=2560", "experiment_name=plain"))
    assert outcome(trunk) == outcome(plain)
    checkpoints = sorted(path.name for path in (trunk.path / "checkpoints").iterdir())
    assert checkpoints == [f"step={n:08d}" for n in (5, 9, 16, 20)], "the newest two, and where the branches begin"
    times_before = {path: path.stat().st_mtime_ns for path in trunk.path.rglob("*")}
    train(config(*branch("demo", 896)))
    assert {path: path.stat().st_mtime_ns for path in trunk.path.rglob("*")} == times_before


def test_a_branch_that_was_cut_off_resumes_and_keeps_where_it_began(config, trunk, alone):
    words = [*branch("demo", 1536), "train.checkpoint_every=1"]
    with pytest.raises(RuntimeError):
        train(config(*words), observe=after_step(11, crash))
    shutil.rmtree(trunk.path)  # the trunk is no longer needed: a checkpoint of the branch is there
    resumed = train(config(*words))
    assert resumed.manifest.branched_at == 9 and outcome(resumed) == outcome(alone[1536])


@pytest.mark.slow
def test_where_the_trunk_is_another_run_a_branch_says_so_and_begins_at_its_first_step(config, trunk, capsys):
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
def test_a_family_that_cannot_be_one_is_refused_at_the_door(config, overrides, says):
    refuses(says, config, *TRUNK, *overrides)
