"""`posbench report mine --beside REFERENCE`: which runs its tables accept, and how to train such runs."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from posbench import __version__
from posbench.analysis.reference_table import baseline_of
from posbench.composition.compose import compose
from posbench.runs import find_runs
from posbench.runs.fingerprints import config_fingerprint, identity

REFERENCE = Path(__file__).parents[2] / "runs" / "reference"
STEEP = """from posbench.schemes.alibi import Alibi
class Steep(Alibi):
    pass
"""


@pytest.mark.parametrize("name", ["ladder_m-1.02M", "tasks/copy"])
def test_the_recorded_command_computes_what_the_reference_did(name):
    run = baseline_of(REFERENCE / name)
    rate = [f"scheme.lr={run.manifest.identity['train.lr']}"] if "scheme.own_lr" in run.manifest.identity else []
    config = compose([*(run.manifest.command or []), *rate])  # a search found the rate
    assert config_fingerprint(identity(config, run.manifest.device)) == config_fingerprint(run.manifest.identity)


@pytest.mark.slow
def test_a_scheme_of_ones_own_stands_among_the_reference(posbench, runs, short):
    words = [*short, "experiment_name=mine"]
    Path("steep.py").write_text(STEEP, encoding="utf-8")
    advice = posbench("report", "mine", "--beside", "demo")
    command = next(line.split("posbench ")[1] for line in advice.out.splitlines() if "posbench train" in line)
    assert advice.status == 0 and "there is no run or experiment 'mine'" in advice.error
    assert "seed=0,1 experiment_name=mine" in command
    assert "did you mean 'demo'" in posbench("report", "dem", "--beside", "demo").refusal
    printed = [word for word in shlex.split(command)[2:] if not word.startswith("scheme=")]
    assert posbench("train", "-m", *printed, *short, "scheme=steep.py:Steep,nope").status == 0
    result = posbench("report", "mine", "--beside", "demo")
    table = result.out.partition("\n\n")[0]
    assert result.status == 0 and all(scheme in table for scheme in ("steep", "nope", "vo_rope")), result
    assert "left out: runs/mine/nope/seed=0" in result.out and (runs / "mine/report/report.html").is_file()

    assert posbench("train", *words, "scheme=vo_rope", "seed=2", "train.lr=0.1").status == 0
    refusal = posbench("report", "mine", "--beside", "demo").error
    assert "train.lr: " in refusal and "scheme=steep.py:Steep,vo_rope" in refusal


@pytest.mark.parametrize(
    ("tokens", "says"), [(200, "train.tokens: 200 (4 runs), 256 (4 runs)"), (256, "no run is left to put beside demo")]
)
def test_runs_that_the_reference_has_too_are_no_report(posbench, runs, tokens, says):
    shutil.copytree(runs / "demo", runs / "mine")
    for run in find_runs(runs / "mine") if tokens != 256 else ():
        prints = replace(run.manifest.fingerprints, config="another")
        run.update_manifest(identity=run.manifest.identity | {"train.tokens": tokens}, fingerprints=prints)
    result = posbench("report", "mine", "--beside", "demo")
    assert result.status == 2 and says in result.error, result
    assert not (runs / "mine/report").exists()


@pytest.mark.slow
def test_a_reference_whose_runs_went_on_from_others_is_compared_by_its_settings(posbench, runs, short):
    def words(scheme):
        source = f"train.from_run=runs/demo/{scheme}/seed=0"
        return ["train", *(word for word in short if word != "model=tiny"), source]

    for experiment, scheme in (("theirs", "vo_rope"), ("mine", "nope")):
        trained = posbench(*words(scheme), f"experiment_name={experiment}")
        assert trained.status == 0, trained.error
    result = posbench("report", "mine", "--beside", "theirs")
    assert "theirs: its runs went on from other runs, so that its first losses cannot be computed again" in result.out
    assert "does not compute what" not in result.error


def test_a_reference_without_runs_is_refused(posbench, runs):
    (runs / "empty").mkdir()
    for name in ("mine", "demo"):
        assert "--beside runs/empty contains no runs" in posbench("report", name, "--beside", "empty").refusal


def test_a_code_that_computes_otherwise_is_refused(posbench, runs):
    file = runs / "demo/nope/seed=0/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    next(row for row in rows if row["kind"] == "train")["loss"] += 2e-5
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (
        f"Use the release that trained it: posbench {__version__}"
        in posbench("report", "mine", "--beside", "demo").error
    )
