"""What may stand in one table, and every figure of it recomputed from the stored windows by hand."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from fabricate import change_fingerprints, comparison, rescore, run_of
from scipy import stats

import posbench
from posbench.config import ConfigError
from posbench.evaluation.protocols.order import reach
from posbench.reporting.comparison import Comparison, build, check_agreement, choose
from posbench.reporting.statistics import document_error
from posbench.reporting.table import read
from posbench.runs import DIED

T = 256
SEEDS = range(4)


def stored(folder: Path, scheme: str, protocol: str, length: int) -> list[pd.DataFrame]:
    """The windows of each seed."""
    return [pd.read_parquet(folder / scheme / f"seed={s}" / "eval" / protocol / f"{length}.parquet") for s in SEEDS]


def losses(windows: list[pd.DataFrame]) -> np.ndarray:
    return np.array([rows["nll"].sum() / rows["targets"].sum() for rows in windows])


def by_document(windows: list[pd.DataFrame]) -> pd.DataFrame:
    """Mean over seeds of each document's loss, and its targets."""
    return pd.concat(windows).groupby("document")[["nll", "targets"]].sum() / len(windows)


def cell(found: Comparison, scheme: str, **where: Any) -> dict[str, Any]:
    rows = found.at(**{"metric": "loss", **where})
    [row] = rows[rows["scheme"] == scheme].to_dict("records")
    return row


def test_losses_gaps_and_changes_are_those_of_the_windows(experiment: Path, found: Comparison) -> None:
    for protocol, length in (("validation", T), ("fixed", 512), ("nonoverlapping", 1024), ("fixed", 128)):
        for scheme in ("alibi", "nope"):
            row = cell(found, scheme, protocol=protocol, length=length)
            here, base = (stored(experiment, name, protocol, length) for name in (scheme, "qk_rope"))
            assert row["value"] == pytest.approx(losses(here).mean()) and row["seeds"] == 4
            assert row["perplexity"] == pytest.approx(math.exp(losses(here).mean()))
            ends = stats.ttest_rel(losses(here), losses(base)).confidence_interval()
            gap = (losses(here) - losses(base)).mean()
            assert (row["gap"], row["gap_low"], row["gap_high"]) == pytest.approx((gap, *ends))
            of, of_base = by_document(here), by_document(base)
            half = document_error((of["nll"] - of_base["nll"]).to_numpy()[None], of["targets"].to_numpy())[0]
            assert row["gap_documents"] == pytest.approx(half)
            assert row["documents"] == len(of) and row["targets"] == here[0]["targets"].sum()
            if length != T:
                before = stored(experiment, scheme, protocol, T)
                ends = stats.ttest_rel(losses(here), losses(before)).confidence_interval()
                change = (losses(here) - losses(before)).mean()
                assert (row["change"], row["change_low"], row["change_high"]) == pytest.approx((change, *ends))
    assert math.isnan(cell(found, "qk_rope", protocol="fixed", length=512)["gap"])


def test_the_change_between_other_targets_has_no_interval_over_documents(own: Path) -> None:
    for scheme in ("qk_rope", "qkvo_rope", "nope", "alibi"):
        for seed in SEEDS:
            rescore(run_of(own, scheme, seed), "nonoverlapping", 512, lambda rows: rows[rows["document"] != 3])
    row = cell(comparison(own), "nope", protocol="nonoverlapping", length=512)
    here, before = (stored(own, "nope", "nonoverlapping", length) for length in (512, T))
    assert row["change"] == pytest.approx((losses(here) - losses(before)).mean())
    assert math.isnan(row["change_documents"])


def test_probes_are_those_of_their_windows(experiment: Path, found: Comparison) -> None:
    windows = [rows[rows["bucket_start"] == 3] for rows in stored(experiment, "alibi", "order", T)]
    lost = [(rows["shuffled_nll"] - rows["nll"]).sum() / rows["targets"].sum() for rows in windows]
    row = cell(found, "alibi", metric="lost_order", first=3)
    low, high = stats.ttest_1samp(lost, 0).confidence_interval()
    assert (row["value"], row["value_low"], row["value_high"]) == pytest.approx((np.mean(lost), low, high))
    windows = stored(experiment, "alibi", "retrieval", 512)
    drops = [(rows["control_nll"] - rows["second_nll"]).sum() / rows["targets"].sum() for rows in windows]
    assert cell(found, "alibi", metric="drop", length=512)["value"] == pytest.approx(np.mean(drops))
    positions = found.at("position", metric="loss")
    assert set(positions["last"] - positions["first"]) > {0, 1}


def test_reach_is_where_order_is_worth_a_hundredth_of_a_nat(experiment: Path, found: Comparison) -> None:
    at_length = found.at(length=T, metric="lost_order")
    rows = at_length[at_length["scheme"] == "alibi"].sort_values("first")
    low = np.minimum(rows["value_low"], rows["value"] - rows["value_documents"]).to_numpy()
    used = int(np.argmin(low >= 0.01))
    assert 0 < used < len(low)
    assert reach(at_length)["alibi"] == str(rows["last"].iloc[used - 1]) and reach(at_length)["nope"] == "0"


def test_schemes_may_have_unlike_seeds_and_gaps_are_of_those_they_share(own: Path) -> None:
    shutil.rmtree(own / "alibi" / "seed=3")
    run_of(own, "nope", 0).update_manifest(status=DIED, reason="the loss is nan")
    found = comparison(own)
    assert found.seeds == [0, 1, 2, 3] and found.losses["alibi"].isna().sum() == 1
    row = cell(found, "alibi", protocol="validation")
    gap = (found.losses["alibi"] - found.losses["qk_rope"]).dropna()
    assert (row["seeds"], row["gap"]) == (3, pytest.approx(gap.mean()))
    assert found.left_out == ["nope seed 0: died: the loss is nan"]


def test_three_seeds_are_enough_to_rank_schemes_and_two_are_not(own: Path) -> None:
    for seed, is_enough in ((3, True), (2, False)):
        for scheme in own.iterdir():
            shutil.rmtree(scheme / f"seed={seed}")
        assert comparison(own).can_rank == is_enough


def test_a_scheme_with_too_few_seeds_is_shown_and_not_ranked(own: Path) -> None:
    for seed in (0, 1):
        shutil.rmtree(own / "nope" / f"seed={seed}")
    found = comparison(own)
    assert found.can_rank and "nope" in found.schemes and "nope" not in found.ranked
    assert math.isnan(cell(found, "nope", protocol="validation")["gap_low"])


def test_a_missing_baseline_is_replaced_by_the_best_scheme(own: Path) -> None:
    shutil.rmtree(own / "qk_rope")
    found = comparison(own)
    assert (found.wanted_baseline, found.baseline) == ("qk_rope", "qkvo_rope")
    assert cell(found, "nope", protocol="validation")["gap"] > 0.05
    with pytest.raises(ConfigError, match="'qk_rope' has no finished run here: choose one of qkvo_rope, alibi, nope"):
        comparison(own, baseline="qk_rope")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"data": "other"}, "the text or its splits: da7a .15 runs., other .alibi seed 1"),
        ({"tokenizer": "other"}, "the tokenizer"),
        ({"batches": "other"}, "the batches of seed 1"),
        ({"initial_weights": {"attention.q": "other", "norms": "new"}}, "the initial weights of seed 1: attention.q"),
    ],
)
def test_runs_that_differ_are_refused_and_what_differs_is_named(own: Path, change: dict[str, Any], says: str) -> None:
    change_fingerprints(run_of(own, "alibi", 1), **change)
    with pytest.raises(ConfigError, match=says):
        comparison(own)
    summary, rows = read([own])
    assert len(build(choose(summary, seeds=[0, 2, 3]), rows).runs) == 12, "--seeds chooses"
    assert len(build(choose(summary, schemes=["nope", "qk_rope"]), rows).runs) == 8, "--schemes chooses"


def test_settings_that_differ_are_named_with_the_remedy(own: Path) -> None:
    run = run_of(own, "alibi", 2)
    run.update_manifest(identity=run.manifest.identity | {"train.lr": 0.5})
    change_fingerprints(run, config="other")
    with pytest.raises(ConfigError, match=r"(?s)train.lr: .*15 runs.*0.5 .alibi seed 2.*--by train.lr") as e:
        comparison(own)
    assert "--schemes" in str(e.value) and "--seeds" in str(e.value)


def test_options_of_a_scheme_must_agree_between_its_seeds_and_the_code_may_differ(own: Path) -> None:
    change_fingerprints(run_of(own, "alibi", 2), code="newer")
    assert comparison(own).runs["fingerprint.code"].nunique() == 2
    run = run_of(own, "qk_rope", 2)
    run.update_manifest(identity=run.manifest.identity | {"scheme.base": 5.0})
    with pytest.raises(ConfigError, match=r"scheme\.base of qk_rope"):
        comparison(own)
    run.update_manifest(identity=run_of(own, "qk_rope", 1).manifest.identity | {"seed": 2, "scheme.lr": 5e-4})
    with pytest.raises(ConfigError, match=r"train\.lr of qk_rope"):
        comparison(own)


def test_two_runs_of_one_scheme_and_seed_are_refused(own: Path) -> None:
    shutil.copytree(own, own.with_name("again"))
    summary, rows = read([own, own.with_name("again")])
    with pytest.raises(ConfigError, match=r"runs of one scheme and seed: .*again/alibi/seed=0"):
        build(summary, rows)


def test_a_place_where_runs_scored_different_windows_is_left_out_and_named(own: Path) -> None:
    rescore(run_of(own, "nope", 1), "fixed", 512, lambda rows: rows.assign(start=rows["start"] + 1))
    found = comparison(own)
    assert found.at("fixed", 512).empty and not found.at("fixed", 256).empty
    [line] = found.holes.pop(("fixed", ""))
    assert line.startswith("fixed at 512 is left out: alibi seed 0 and nope seed 1 scored different windows")
    assert "(`posbench eval demo --protocol fixed --length 512 --again` scores all alike)" in line and not found.holes


def test_losses_of_unlike_validation_windows_are_refused(own: Path) -> None:
    rescore(run_of(own, "nope", 1), "validation", T, lambda rows: rows.iloc[:-1])
    with pytest.raises(ConfigError, match=r"nope seed 1.* were validated on different windows.*validation_tokens"):
        comparison(own)


def test_a_choice_that_is_not_there_is_named(own: Path) -> None:
    summary, _ = read([own])
    with pytest.raises(ConfigError, match=r"'alibo' has no runs here.*alibi"):
        choose(summary, schemes=["alibo"])
    with pytest.raises(ConfigError, match="seeds with runs: 0, 1, 2, 3"):
        choose(summary, seeds=[9])
    for run in own.glob("*/seed=*"):
        shutil.rmtree(run / "eval")
        manifest = run_of(own, run.parent.name, int(run.name[-1])).manifest
        run_of(own, run.parent.name, int(run.name[-1])).write_manifest(replace(manifest, status="stopped"))
    with pytest.raises(ConfigError, match="no run is finished here"):
        comparison(own)


def test_runs_without_stored_windows_have_the_losses_of_their_manifests(own: Path) -> None:
    for place in own.glob("*/seed=*/eval"):
        shutil.rmtree(place)
    found = comparison(own)
    assert found.cells.empty and found.validation().empty
    assert found.losses.loc[0, "nope"] == run_of(own, "nope", 0).manifest.loss
    config = yaml.safe_load((own / "nope/seed=0/config.yaml").read_text())
    assert found.config["train"] == config["train"]


def test_what_the_shared_rate_was_is_no_difference_between_runs_with_their_own(own: Path) -> None:
    runs = posbench.results(own)
    runs.loc[runs["scheme"] == "nope", "fingerprint.config"] = "of another shared rate"
    with pytest.raises(ConfigError, match="the configuration: "):
        check_agreement(runs)
    check_agreement(runs.assign(own_rate=True))
