"""Runs side by side."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from fabricate import change_fingerprints, run_of
from rich.console import Console

from posbench.config import ConfigError
from posbench.reporting import compare
from posbench.runs import DIED


def said(*paths: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    compare(paths, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_differs_and_only_that(experiment: Path) -> None:
    text = said(experiment / "qk_rope" / "seed=0", experiment / "alibi" / "seed=0")
    assert re.search(r"scheme\.kind +rotary +alibi", text) and "train.lr" not in text
    assert re.search(r"loss, nats/token +\d\.\d{3} +\d\.\d{3}", text)
    assert re.search(r"loss minus the first +0 +\+0\.0\d\d", text)
    assert re.search(r"perplexity at 512, fixed +\d+\.\d\d +\d+\.\d\d", text)
    assert "Costs that are the same in all: tokens/s 20,000; training, s 62;" in text
    costs = said(experiment / "qk_rope" / "seed=0", experiment / "alibi" / "seed=1", width=200)
    assert re.search(r"tokens/s +20,000 +20,100", costs)
    assert "same in all: training, s 62; peak memory, MiB 900; tokens trained on 399,360;" in costs
    assert "device a CPU (float32)." in costs


def test_a_loss_is_compared_within_a_seed_alone(experiment: Path) -> None:
    runs = [experiment / "qk_rope" / f"seed={n}" for n in (0, 1, 2)]
    text = " ".join(said(*runs, experiment / "alibi" / "seed=1", width=200).split())
    losses = {key: float(loss) for key, loss in zip("abcd", re.findall(r"\d\.\d{3}", text)[:4], strict=True)}
    found = re.search(r"loss minus the first, same seed 0 0 0 (\S+)", text)
    assert found and float(found[1]) == pytest.approx(losses["d"] - losses["b"], abs=1.1e-3)
    assert "This is one seed" in text
    text = " ".join(said(*runs[:2], experiment / "alibi" / "seed=3", width=200).split())
    assert "same seed 0 0 –" in text and "posbench report" not in text
    others = [experiment / "alibi" / f"seed={n}" for n in (0, 2)]
    text = " ".join(said(*runs, *others, width=200).split())
    assert "`posbench report` tests these differences" in text and "This is one seed" not in text


def test_initial_weights_are_compared_within_a_seed(own: Path) -> None:
    runs = [own / scheme / f"seed={seed}" for scheme in ("qk_rope", "alibi") for seed in (0, 1)]
    assert "Not a fair" not in said(*runs)
    change_fingerprints(run_of(own, "alibi", 1), initial_weights={"attention.q": "0ther"})
    assert "these runs differ in initial_weights" in said(*runs)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(experiment: Path, width: int) -> None:
    paths = [experiment / scheme / f"seed={seed}" for scheme in ("qk_rope", "alibi", "nope") for seed in (0, 1)]
    assert max(map(len, said(*paths, width=width).splitlines())) <= width


def test_an_unfair_comparison_says_so(own: Path) -> None:
    change_fingerprints(run_of(own, "alibi", 0), data="0ther")
    text = said(own / "qk_rope" / "seed=0", own / "alibi" / "seed=0")
    assert "Not a fair comparison: these runs differ in data" in text
    fair = said(own / "qk_rope" / "seed=0", own / "nope" / "seed=1")
    assert "Not a fair" not in fair and "different seeds" in fair


def test_a_died_run_can_be_looked_at(own: Path) -> None:
    run_of(own, "alibi", 0).update_manifest(status=DIED, reason="loss nan at step 7", costs=None, loss=None)
    text = said(own / "qk_rope" / "seed=0", own / "alibi" / "seed=0")
    assert "died: loss nan at step 7" in text


def test_one_run_is_nothing_to_compare(experiment: Path) -> None:
    with pytest.raises(ConfigError, match="name two or more"):
        said(experiment / "qk_rope" / "seed=0", experiment / "qk_rope" / "seed=0")


def test_a_folder_that_is_no_run_is_named(experiment: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        said(experiment / "qk_rope" / "seed=0", tmp_path)


def test_a_length_that_only_one_run_has_is_a_dash(own: Path, experiment: Path) -> None:
    text = said(experiment / "qk_rope" / "seed=0", own / "alibi" / "seed=0")
    assert re.search(r"perplexity at 512, fixed +\d+\.\d\d +–", text)
