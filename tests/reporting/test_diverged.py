"""A run that diverged is named and counted, and stands in a table or is said not to."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from fabricate import World, fabricate, run_of
from rich.console import Console
from shown import on_terminal

from posbench.reporting import compare, results
from posbench.reporting.findings import Findings, find
from posbench.runs import DIED, Run, load_run


def begin_at(run: Run, loss: float) -> None:
    """Give a run another validation loss before its first step."""
    rows = run.logged
    first = next(row for row in rows if row["kind"] == "validation")
    first["loss"] = loss
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_run_that_ends_above_its_start_is_named_and_stays_in_the_means(own: Path, losses: Findings) -> None:
    assert "iverged" not in on_terminal(losses, 200)
    begin_at(run_of(own, "alibi", 1), 2.0)
    text = on_terminal(find(own), 200)
    lead = text.split("Loss on held-out text")[0]
    assert re.search(
        r"Diverged: alibi, 1 of 4 runs \(seed 1: its final loss of 3\.0\d\d is above the 2\.000 that it began with\)\. "
        r"A diverged run that finished is kept in the means and tests\.",
        " ".join(lead.split()),
    )
    assert re.search(r"^alibi .* 4 \(1 of 4 diverged\) ", text, re.MULTILINE)
    assert re.search(r"^nope .* c +4 +± ", text, re.MULTILINE)
    frame = results(own).set_index(["scheme", "seed"])
    assert frame["diverged"].notna().sum() == 1 and frame.loc[("alibi", 1), "initial_loss"] == 2.0
    console = Console(file=io.StringIO(), width=200)
    compare([own / "alibi" / f"seed={seed}" for seed in (0, 1)], console)
    assert "seed=1 diverged: its final loss of 3.0" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_died_takes_its_seed_from_every_test_and_that_is_said(own: Path) -> None:
    run_of(own, "nope", 1).update_manifest(status=DIED, reason="the validation loss at step 7 is nan. Lower train.lr")
    text = " ".join(on_terminal(find(own), 200).split())
    assert "Diverged: nope, 1 of 4 runs (seed 1: died: the validation loss at step 7 is nan. Lower train.lr)." in text
    assert (
        "A run that died has no loss. Every mean, gap and test therefore leaves out seed 1 and uses seeds 0, 2, 3 alone"
        in text
    )
    assert (
        "3 (1 of 4 diverged)" in text and "is kept in the means" not in text and "Paired t-tests over 3 seeds" in text
    )


@pytest.mark.parametrize(("died", "left"), [((1, 2, 3), r"3\.\d{3} \(seed 0\)"), ((0, 1, 2, 3), "died")])
def test_a_scheme_is_shown_with_what_is_left_of_it(own: Path, died: tuple[int, ...], left: str) -> None:
    for seed in died:
        run_of(own, "nope", seed).update_manifest(status=DIED, reason="loss nan")
    text = on_terminal(find(own), 200)
    assert re.search(rf"^nope +– +{left} .* 0 \({len(died)} of 4 diverged\) ", text, re.MULTILINE)
    assert "Without any test or gap: nope, at the end of the loss table." in " ".join(text.split())
    assert "Paired t-tests over 4 seeds" in text and "leaves out seed" not in text


def test_a_run_whose_first_loss_is_not_known_is_not_called_diverged(own: Path) -> None:
    run = run_of(own, "alibi", 0)
    (run.path / "metrics.jsonl").unlink()
    assert load_run(run.path).initial_loss is None
    (run_of(own, "alibi", 1).path / "metrics.jsonl").write_text("no row\n")
    assert results(own)["diverged"].isna().all()


def test_one_seed_that_diverged_leaves_a_report(tmp_path: Path) -> None:
    world = World({"qk_rope": 0.0, "nope": 0.1}, seeds=(0,), lengths=(), probes=False)
    folder = fabricate(tmp_path, world)
    begin_at(run_of(folder, "nope", 0), 1.0)
    assert "nope, 1 of 1 runs" in on_terminal(find(folder), 200)
