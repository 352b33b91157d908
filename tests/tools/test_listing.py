"""`posbench ls`: what has become of every run."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from posbench.runs import DIED, FINISHED, INTERRUPTED, RUNNING, Run, find_runs
from posbench.runs.finding import REFERENCE, pack_experiment
from posbench.system.console import json_text
from posbench.tools.listing import as_data, exit_status, show, summarise, without_packed
from posbench.training import train
from tests.json_schema import faults


def test_packed_runs_are_listed_where_there_are_no_others(config, tmp_path):
    whole = [train(config("scheme=vo_rope", "train.steps=6"))]
    pack_experiment(whole[0].path.parents[1], tmp_path / "packed.zip", print)
    packed = find_runs(tmp_path / "packed.zip")
    assert packed and without_packed([*whole, *packed]) == whole and without_packed(packed) == packed


# Every kind of run: what its manifest says, the last of its logged steps, and (state, share, tokens) as listed.
# The fixture's run is of 6 steps of 128 tokens, logged at steps 0, 3 and 6.
KINDS = {
    "finished": ({}, 6, (FINISHED, 1.0, 768)),
    "cut_off": ({"status": "stopped", "loss": None, "reason": "SIGTERM"}, 3, ("stopped", 0.5, 384)),
    "killed": ({"status": RUNNING, "loss": None}, 3, (INTERRUPTED, 0.5, 384)),
    "killed_at_once": ({"status": RUNNING, "loss": None}, None, (INTERRUPTED, 0.0, 0)),
    "dead": ({"status": DIED, "loss": None, "reason": "the loss is NaN"}, 3, (DIED, 0.5, 384)),
    "branch": ({"branched_at": 3}, 6, (FINISHED, 1.0, 768)),
    "continued": ({"tokens": 1000 * 128, "continued": {"tokens": 994 * 128}}, 6, (FINISHED, 1.0, 128_000)),
    "without_a_loss": ({"loss": None}, 6, (FINISHED, 1.0, 768)),
    # As posbench.evaluation.subjects writes it: no step was taken here, and its training tokens are not known.
    "subject": ({"num_steps": 0, "tokens": 0, "loss": None, "subject": {"path": "gone"}}, None, (FINISHED, 1.0, None)),
}


def test_every_kind_of_run_is_listed(config, tmp_path, monkeypatch):
    source = train(config("scheme=vo_rope", "train.steps=6"))
    for kind, (changes, last_step, _) in KINDS.items():
        run = Run(shutil.copytree(source.path, tmp_path / "kinds" / kind / "seed=0"))
        run.update_manifest(**{"scheme": kind, **changes})
        lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run.path / "metrics.jsonl").write_text("".join(x for x in lines if json.loads(x)["step"] <= (last_step or -1)))
        if last_step is None:
            (run.path / "metrics.jsonl").unlink()
    rows = list(map(summarise, find_runs(tmp_path / "kinds")))
    data = {row["scheme"]: (row["state"], row["share"], row["tokens"]) for row in as_data(rows)}
    assert data == {kind: listed for kind, (*_, listed) in KINDS.items()}
    statuses = {row["scheme"]: exit_status([summary]) for row, summary in zip(as_data(rows), rows, strict=True)}
    assert (statuses["finished"], statuses["dead"], statuses["cut_off"], exit_status(rows)) == (0, 1, 3, 1)
    console = Console(width=100, record=True, file=io.StringIO())
    show(rows, console)
    text = console.export_text()
    assert "9 runs: 5 finished, 3 cut off, 1 failed" in text
    assert len([line for line in text.splitlines() if line.startswith(tuple(KINDS))]) == len(KINDS)
    monkeypatch.chdir(tmp_path / "kinds")
    Path("dead/seed=0").rename("dead/copy")
    [listed] = as_data(list(map(summarise, find_runs(Path("dead")))))
    assert (listed["experiment"], listed["scheme"], listed["seed"]) == ("kinds", "dead", None)


@pytest.mark.slow
def test_every_run_of_the_packs_is_listed():
    """The packs of this repository hold branches, tasks, continued runs, subjects and runs of a search."""
    runs = find_runs(REFERENCE)
    rows = list(map(summarise, runs))
    kinds = [run.manifest for run in runs]
    assert any(m.subject for m in kinds) and any(m.continued for m in kinds) and any(m.branched_at for m in kinds)
    assert exit_status(rows) == 0 and {row.share for row in rows} == {1.0}
    assert not faults(json.loads(json_text({"runs": as_data(rows)})), "ls")
