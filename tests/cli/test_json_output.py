"""`posbench judge` and `--json`: exit status, one JSON object on standard output, and the page about loops."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import posbench as api
from posbench.composition.compose import compose
from posbench.model.decoder import build_model
from posbench.runs import Run
from posbench.runs.finding import REFERENCE
from tests.analysis.fabricate import World, fabricate
from tests.json_schema import DEFINITIONS, faults

PAGE = Path(__file__).parents[2] / "docs/loops.md"
SCRIPT = (PAGE.parent / "try.py").read_text(encoding="utf-8")


@pytest.fixture
def judged(posbench):
    """Write runs of one scheme for each verdict; k_rope has two seeds, and a run of v_rope can be made to die."""
    effects = {"qk_rope": 0.0, "alibi": -0.1, "nope": 0.1, "qkvo_rope": 0.0, "k_rope": -0.1, "v_rope": -0.1}
    random = np.random.default_rng(7)
    folder = fabricate(Path("runs"), World(effects, lengths=(512,), experiment="loop", random=random))
    for seed in (2, 3, 4):
        shutil.rmtree(folder / "k_rope" / f"seed={seed}")
    return folder


@pytest.mark.usefixtures("judged")
def test_the_exit_status_is_the_verdict(posbench):
    Run(Path("runs/loop/v_rope/seed=1")).update_manifest(status="died", reason="NaN", loss=None)
    statuses = {"alibi": 0, "nope": 10, "qkvo_rope": 11, "k_rope": 12, "v_rope": 13}
    for scheme, status in statuses.items():
        words = ("judge", "loop", "--scheme", scheme, "--family", "5")
        data = posbench(*words, "--json")
        assert data.status == status and not faults(json.loads(data.out), "judge"), data
    line = posbench(*words)
    assert line.status == 13 and line.out.startswith("v_rope: failed ") and "this rate only" in line.error
    every = posbench("judge", "loop", "--json")
    assert every.status == 0 and not faults(json.loads(every.out), "judge_all")
    assert set(json.loads(every.out)["schemes"]) == set(statuses)
    only = api.judge("runs/loop", scheme="alibi")
    assert json.loads(only.as_json()) == json.loads(every.out)["schemes"]["alibi"]


@pytest.mark.slow
@pytest.mark.usefixtures("judged")
def test_failures_do_not_look_like_verdicts(posbench):
    for words in (("loop", "--scheme", "alib"), ("nowhere",), ("loop", "--margin", "0")):
        assert posbench("judge", *words).status == 2
    assert posbench("judge", str(REFERENCE / "tasks/copy")).refusal.endswith(
        "these runs learn tasks: use posbench report"
    )


@pytest.mark.slow
def test_runs_of_ones_own_are_judged_beside_a_reference(posbench, runs, short):
    """Words about the reference go to standard error, and the command trains both schemes in the user's experiment."""
    posbench("train", "-m", *short, "scheme=alibi", "seed=0,1", "experiment_name=mine")
    words = ("judge", "mine", "--beside", "demo", "--scheme", "alibi", "--baseline", "nope", "--family", "1")
    result = posbench(*words, "--json")
    data = json.loads(result.out)
    assert result.status == 12 and not faults(data, "judge") and "recorded in demo" in result.error
    assert data["go_on"]
    for scheme, command in zip(("alibi", "nope"), data["next_commands"], strict=True):
        assert re.search(rf"scheme={scheme} .*experiment_name=mine seed=2,3,4", " ".join(command))
    report = posbench("report", "mine", "--beside", "demo", "--json")
    assert not faults(json.loads(report.out), "report") and "recorded in demo" in report.error


@pytest.mark.slow
@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("experiments", [["loop"], ["loop", "--by", "train.lr"], [str(REFERENCE / "tasks/copy")]])
def test_the_first_screen_of_a_report_is_data(posbench, experiments):
    result = posbench("report", *experiments, "--json", "--output", "report")
    data = json.loads(result.out)
    assert result.status == 0 and not faults(data, "report")
    assert all(Path(file).is_file() for file in data["files"]) and len(data["table"]) >= 4
    for row in data["schemes"]:
        assert row.get("group") == ("0.005" if "--by" in experiments else None) or "task" in row
    if experiments == ["loop"]:
        gaps = {row["scheme"]: row["gap"] for row in data["schemes"]}
        printed = {row["scheme"]: row["gap to qk_rope"] for row in data["table"]}
        assert gaps["qk_rope"] == 0 and float(printed["alibi"].split()[0]) == pytest.approx(gaps["alibi"], abs=6e-4)


@pytest.mark.usefixtures("judged")
def test_the_list_of_runs_is_data_with_the_same_exit_status(posbench):
    Path("runs/loop/nope/seed=1/run.json").write_text("{", encoding="utf-8")
    result = posbench("ls", "loop", "--json")
    data = json.loads(result.out)
    assert result.status == posbench("ls", "loop").status == 1 and not faults(data, "ls")
    assert len(data["runs"]) == 27 and data["runs"][0]["share"] == 1.0
    assert [run["scheme"] for run in data["runs"] if run["state"] == "unreadable"] == ["nope"]


def test_the_page_explains_every_field_and_its_schemes_are_what_it_says(tmp_path, monkeypatch):
    page = (PAGE.parent / "lists" / "judge.md").read_text(encoding="utf-8")
    assert not [name for name in DEFINITIONS["judge"]["properties"] if f"`{name}`" not in page]
    monkeypatch.chdir(tmp_path)
    shutil.copy(PAGE.parent / "candidates.py", "candidates.py")
    tokens = torch.arange(64)[None] % 29
    logits = {}
    for scheme in ("qk_rope", *(f"candidates.py:{name}" for name in ("Forgetting", "Renamed", "Distant"))):
        config = compose([f"scheme={scheme}", "model=tiny", "train.context_length=64"])
        logits[scheme] = build_model(config, 32)(tokens)
    renamed = logits["candidates.py:Renamed"]
    torch.testing.assert_close(renamed, logits["qk_rope"], rtol=0, atol=1e-4)
    assert all((logits[f"candidates.py:{name}"] - renamed).abs().max() > 0.01 for name in ("Forgetting", "Distant"))


# What each call of `judge` says, in order: (exit status, verdict, whether another seed is to be trained), the exit
# statuses of the calls of `train`, and what the page's script ends with.
LOOPS = {
    "better at the second look": ([(12, "open", True), (0, "better", False)], [0, 0], 0),
    "worse": ([(10, "worse", False)], [0], 10),
    "dropped": ([(12, "open", False)], [0], 12),
    "it diverged": ([(13, "failed", False)], [1], 13),
    "it diverged later": ([(12, "open", True), (13, "failed", False)], [0, 1], 13),
    "the disk was full": ([(12, "open", True)], [1], 1),
    "no run at all": ([(2, "", False)], [1], 2),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_script_of_the_page_ends_with_the_verdict(name, monkeypatch):
    """Run it with a stand-in for the commands, which notes what was trained."""
    judgements, training, expected = LOOPS[name]
    trained = []

    def run(words, **options):
        status, text = 0, b""
        if words[1] == "train":
            trained.append(words)
            status = training[len(trained) - 1]
        elif words[1] == "judge":
            assert options == {"stdout": subprocess.PIPE} and words[-3:] == ["--family", "20", "--json"]
            status, verdict, goes_on = judgements[len(trained) - 1]
            more = [["posbench", "train", "-m", "seed=2,3,4"]] if goes_on else []
            text = json.dumps({"verdict": verdict, "next_commands": more}).encode() if status != 2 else b""
        return subprocess.CompletedProcess(words, status, text)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["try.py", "candidates.py:Forgetting", "forgetting"])
    with pytest.raises(SystemExit) as ended:
        exec(compile(SCRIPT, "try.py", "exec"), {})
    assert ended.value.code == expected and len(trained) == len(training)
    assert "scheme=candidates.py:Forgetting" in trained[0] and "seed=0,1" in trained[0]
