"""Only comparable runs share a table, and every figure equals a computation from the stored windows."""

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

import posbench
from posbench.analysis.agreement import check_agreement, choose
from posbench.analysis.comparison import SeedComparison, build
from posbench.analysis.statistics import document_error
from posbench.analysis.table import read
from posbench.config import ConfigError
from posbench.reporting.protocols.order import reach
from posbench.reporting.report import page_about
from posbench.runs import DIED, find_runs
from tests.analysis.fabricate import (
    World,
    change_fingerprints,
    comparison,
    fabricate,
    paragraph,
    rescore,
    run_of,
    write_evaluation,
)
from tests.refusals import refuses

T = 256
SEEDS = range(4)


def stored(folder, scheme, protocol, length):
    """Return the stored windows of each seed."""
    return [pd.read_parquet(folder / scheme / f"seed={s}" / "eval" / protocol / f"{length}.parquet") for s in SEEDS]


def losses(windows):
    return np.array([rows["nll"].sum() / rows["targets"].sum() for rows in windows])


def by_document(windows):
    """Return the mean over seeds of each document's loss, and its targets."""
    return pd.concat(windows).groupby("document")[["nll", "targets"]].sum() / len(windows)


def cell(analysis, scheme, **selection):
    rows = analysis.at(**{"metric": "loss", **selection})
    [row] = rows[rows["scheme"] == scheme].to_dict("records")
    return row


def test_losses_gaps_and_changes_are_those_of_the_windows(experiment, analysis):
    for protocol, length in (("validation", T), ("fixed", 512), ("nonoverlapping", 1024), ("fixed", 128)):
        for scheme in ("alibi", "nope"):
            row = cell(analysis, scheme, protocol=protocol, length=length)
            scheme_windows, base = (stored(experiment, name, protocol, length) for name in (scheme, "qk_rope"))
            assert row["value"] == pytest.approx(losses(scheme_windows).mean()) and row["seeds"] == 4
            assert row["perplexity"] == pytest.approx(math.exp(losses(scheme_windows).mean()))
            ends = stats.ttest_rel(losses(scheme_windows), losses(base)).confidence_interval()
            gap = (losses(scheme_windows) - losses(base)).mean()
            assert (row["gap"], row["gap_low"], row["gap_high"]) == pytest.approx((gap, *ends))
            documents, base_documents = by_document(scheme_windows), by_document(base)
            half = document_error(
                (documents["nll"] - base_documents["nll"]).to_numpy()[None], documents["targets"].to_numpy()
            )[0]
            assert row["gap_documents"] == pytest.approx(half)
            assert row["documents"] == len(documents) and row["targets"] == scheme_windows[0]["targets"].sum()
            if length != T:
                trained_windows = stored(experiment, scheme, protocol, T)
                ends = stats.ttest_rel(losses(scheme_windows), losses(trained_windows)).confidence_interval()
                change = (losses(scheme_windows) - losses(trained_windows)).mean()
                assert (row["change"], row["change_low"], row["change_high"]) == pytest.approx((change, *ends))
    assert math.isnan(cell(analysis, "qk_rope", protocol="fixed", length=512)["gap"])


def test_reach_is_where_order_is_worth_a_hundredth_of_a_nat(experiment, analysis):
    at_length = analysis.at(length=T, metric="lost_order")
    rows = at_length[at_length["scheme"] == "alibi"].sort_values("first")
    low = np.minimum(rows["value_low"], rows["value"] - rows["value_documents"]).to_numpy()
    used = int(np.argmin(low >= 0.01))
    assert 0 < used < len(low)
    assert reach(at_length)["alibi"] == str(rows["last"].iloc[used - 1]) and reach(at_length)["nope"] == "0"


def test_schemes_may_have_unlike_seeds_and_gaps_are_of_those_they_share(experiment_copy):
    shutil.rmtree(experiment_copy / "alibi" / "seed=3")
    run_of(experiment_copy, "nope", 0).update_manifest(status=DIED, reason="the loss is nan")
    analysis = comparison(experiment_copy)
    assert analysis.seeds == [0, 1, 2, 3] and analysis.values["alibi"].isna().sum() == 1
    row = cell(analysis, "alibi", protocol="validation")
    gap = (analysis.values["alibi"] - analysis.values["qk_rope"]).dropna()
    assert (row["seeds"], row["gap"]) == (3, pytest.approx(gap.mean()))
    assert analysis.left_out == ["nope seed 0: died: the loss is nan"]


def test_report_and_judge_agree_about_a_seed_that_died(tmp_path):
    """Alibi is far ahead with the four seeds that it has left, and nope has no run left."""
    effects = {"qk_rope": 0.0, "alibi": -0.2, "nope": 0.3, "vo_rope": 0.1}
    folder = fabricate(tmp_path, World(effects))
    for run in [run_of(folder, "alibi", 3), *find_runs(folder / "nope")]:
        run.update_manifest(status=DIED, reason="NaN", loss=None, bits_per_byte=None)
    c = comparison(folder)
    verdicts = {row["scheme"]: row["verdict"] for row in c.numbers}
    assert verdicts == {"alibi": "failed", "qk_rope": None, "vo_rope": "worse"}
    for scheme in ("alibi", "nope", "vo_rope"):
        assert posbench.judge(folder, scheme=scheme).verdict == verdicts.get(scheme, "failed")
    page = page_about([c])
    assert "alibi failed: seed 3 diverged, so its pairs are open." in page.paragraph
    assert "nope failed: seed 0, 1, 2, 3, 4 diverged, and no run of it finished." in page.paragraph
    assert "alibi beats" not in page.paragraph and "alibi seed 3: died: NaN" in page.left_out
    # A baseline that failed decides nothing either.
    by_failed = posbench.judge(folder, scheme="vo_rope", baseline="alibi")
    assert by_failed.verdict == "open" and "alibi failed with seed 3, so its pairs are open" in by_failed.warnings
    # More seeds would not help.
    run_of(folder, "vo_rope", 4).update_manifest(status=DIED, reason="NaN", loss=None, bits_per_byte=None)
    by_failed = posbench.judge(folder, scheme="qk_rope", baseline="vo_rope", family=20)
    assert (by_failed.verdict, by_failed.go_on, by_failed.reason) == ("open", False, "not tested: see the warnings")


def test_a_scheme_that_shares_no_seed_is_named(tmp_path):
    folder = fabricate(tmp_path, World({"qk_rope": 0.0, "alibi": -0.2}, (0, 1, 2)))
    fabricate(tmp_path, World({"nope": 0.0}, (10, 11, 12)))
    assert "nope shares too few seeds with the others for a test." in paragraph(comparison(folder))


def test_pairs_that_were_fixed_and_not_trained_are_named_and_others_are_not_called_fixed(tmp_path):
    fixed = ("experiment.primary=[qk_rope alibi nope]",)
    seeds = (0, 1, 2)
    overrides = World({}).overrides + fixed
    some = fabricate(tmp_path / "some", World({"qk_rope": 0.0, "alibi": 0.1}, seeds, overrides=overrides))
    c = comparison(some)
    assert c.fixed_but_untested == [["alibi", "nope"], ["nope", "qk_rope"]]
    p = stats.ttest_rel(c.values["alibi"], c.values["qk_rope"]).pvalue
    assert c.pairs["p_claimed"].tolist() == pytest.approx([3 * p]), "corrected for all three"
    assert "not tested here: alibi and nope; nope and qk_rope." in paragraph(c)
    none = fabricate(tmp_path / "none", World({"k_rope": 0.0, "vo_rope": 0.1}, seeds, overrides=overrides))
    other = World({"qk_rope": 0.0, "alibi": 0.1}, seeds, experiment="mine", overrides=overrides)
    for folder in (none, fabricate(tmp_path, other)):
        c = comparison(folder)
        p = stats.ttest_rel(*(c.values[scheme] for scheme in c.schemes)).pvalue
        assert c.fixed == set() and c.pairs["p_claimed"].tolist() == pytest.approx([p])
        assert "fixed" not in str(page_about([c]))


def test_arms_are_measured_against_the_one_that_changed_nothing():
    c = comparison(Path(__file__).parents[2] / "runs/reference/extend-arms.zip")
    assert (c.baseline, c.fixed) == ("qk_rope_plain", set())


def test_while_a_search_runs_the_sentence_is_about_the_seeds_that_both_have(tmp_path):
    """The baseline has two of three seeds, and alibi is ahead with both."""
    folder = fabricate(tmp_path, World({"qk_rope": 0.0, "alibi": -0.2, "nope": 0.3}, (0, 1, 2)))
    shutil.rmtree(folder / "qk_rope/seed=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeedComparison, "unfinished", {"qk_rope": 3})
        page = page_about([comparison(folder)])
    assert (
        "alibi has a lower loss than qk_rope with every seed that both have, nope has a higher one." in page.paragraph
    )
    assert page.table.frame["seeds"].to_list() == ["3, 2 shared", 2, "3, 2 shared"]


def test_three_seeds_are_enough_to_rank_schemes_and_two_are_not(experiment_copy):
    for seed, is_enough in ((3, True), (2, False)):
        for scheme in experiment_copy.iterdir():
            shutil.rmtree(scheme / f"seed={seed}")
        assert comparison(experiment_copy).can_rank == is_enough


def test_a_scheme_with_too_few_seeds_is_shown_and_not_ranked(experiment_copy):
    for seed in (0, 1):
        shutil.rmtree(experiment_copy / "nope" / f"seed={seed}")
    analysis = comparison(experiment_copy)
    assert analysis.can_rank and "nope" in analysis.schemes and "nope" not in analysis.ranked
    assert math.isnan(cell(analysis, "nope", protocol="validation")["gap_low"])


def test_a_missing_baseline_is_replaced_by_the_best_scheme(experiment_copy):
    shutil.rmtree(experiment_copy / "qk_rope")
    analysis = comparison(experiment_copy)
    assert (analysis.wanted_baseline, analysis.baseline) == ("qk_rope", "qkvo_rope")
    assert cell(analysis, "nope", protocol="validation")["gap"] > 0.05
    refuses(
        "'qk_rope' has no finished run here: choose one of qkvo_rope, alibi, nope",
        comparison,
        experiment_copy,
        baseline="qk_rope",
    )


@pytest.mark.parametrize(
    "change, says",
    [
        ({"data": "other"}, "the text or its splits: da7a .15 runs., other .alibi seed 1"),
        ({"tokenizer": "other"}, "the tokenizer"),
        ({"batches": "other"}, "the batches of seed 1"),
        ({"initial_weights": {"attention.q": "other", "norms": "new"}}, "the initial weights of seed 1: attention.q"),
    ],
)
def test_runs_that_differ_are_refused_and_what_differs_is_named(experiment_copy, change, says):
    change_fingerprints(run_of(experiment_copy, "alibi", 1), **change)
    refuses(says, comparison, experiment_copy)
    summary, rows = read([experiment_copy])
    assert len(build(choose(summary, seeds=[0, 2, 3]), rows).runs) == 12, "--seeds chooses"
    assert len(build(choose(summary, schemes=["nope", "qk_rope"]), rows).runs) == 8, "--schemes chooses"


def test_settings_that_differ_are_named_with_the_remedy(experiment_copy):
    run = run_of(experiment_copy, "alibi", 2)
    run.update_manifest(identity=run.manifest.identity | {"train.lr": 0.5})
    change_fingerprints(run, config="other")
    with pytest.raises(ConfigError, match=r"(?s)train.lr: .*15 runs.*0.5 .alibi seed 2.*--by train.lr") as e:
        comparison(experiment_copy)
    assert "--schemes" in str(e.value) and "--seeds" in str(e.value)


def test_options_of_a_scheme_must_agree_between_its_seeds_and_the_code_may_differ(experiment_copy):
    change_fingerprints(run_of(experiment_copy, "alibi", 2), code="newer")
    assert comparison(experiment_copy).runs["fingerprint.code"].nunique() == 2
    run = run_of(experiment_copy, "qk_rope", 2)
    run.update_manifest(identity=run.manifest.identity | {"scheme.base": 5.0})
    refuses(r"scheme\.base of qk_rope", comparison, experiment_copy)
    run.update_manifest(
        identity=run_of(experiment_copy, "qk_rope", 1).manifest.identity
        | {"seed": 2, "train.lr": 5e-4, "scheme.own_lr": True}
    )
    refuses(r"train\.lr of qk_rope", comparison, experiment_copy)


def test_two_runs_of_one_scheme_and_seed_are_refused(experiment_copy):
    shutil.copytree(experiment_copy, experiment_copy.with_name("again"))
    summary, rows = read([experiment_copy, experiment_copy.with_name("again")])
    refuses(r"runs of one scheme and seed: .*again/alibi/seed=0", build, summary, rows)


def test_a_place_where_runs_scored_different_windows_is_left_out_and_named(experiment_copy):
    rescore(run_of(experiment_copy, "nope", 1), "fixed", 512, lambda rows: rows.assign(start=rows["start"] + 1))
    analysis = comparison(experiment_copy)
    assert analysis.at("fixed", 512).empty and not analysis.at("fixed", 256).empty
    [line] = analysis.holes.pop(("fixed", ""))
    assert line.startswith("fixed at 512 is left out: alibi seed 0 and nope seed 1 scored different windows")
    assert "(`posbench eval demo --protocol fixed --length 512 --again` scores it)" in line and not analysis.holes


def test_a_table_shows_only_lengths_that_share_their_targets(experiment_copy):
    """All runs have 256 and 4,096 on 4,096's targets; one has 8,192, and the other lengths have other targets."""
    runs = find_runs(experiment_copy)
    for run in runs:
        [short] = [result for result in run.results()[0] if (result.protocol, result.length) == ("fixed", 256)]
        for length in (256, 4096):
            write_evaluation(run, "fixed", length, "test", short.windows.assign(nll=length), anchor=4096)
        write_evaluation(run, "fixed", 256, "test", short.windows, "data=other", anchor=256)
    write_evaluation(runs[0], "fixed", 4096, "test", short.windows, "rescale=yarn", anchor=512)
    for options in ([], ["data=other"]):
        write_evaluation(runs[0], "fixed", 8192, "test", short.windows, *options, anchor=8192)
    analysis = comparison(experiment_copy)
    cells = analysis.at("fixed", metric="loss")
    assert set(cells["length"]) == {256, 4096}
    at_4096 = cells[cells["length"] == 4096]
    assert (at_4096["change"] > 0).all(), "against 256 on the same targets"
    line, with_yarn = analysis.holes[("fixed", "")]
    assert with_yarn.startswith("fixed at 4096 under rescale=yarn is left out")
    assert "`posbench eval demo --protocol fixed --length 256,4096 --under rescale=yarn`" in with_yarn
    assert line.startswith("fixed at 512, 8192 is left out: it was scored on other targets than 4096 tokens")
    assert "`posbench eval demo --protocol fixed --length 256,512,4096,8192`" in line
    assert "--length 256,8192 --data other`" in analysis.holes[("fixed", "other")][0]


def test_losses_of_unlike_validation_windows_are_refused(experiment_copy):
    rescore(run_of(experiment_copy, "nope", 1), "validation", T, lambda rows: rows.iloc[:-1])
    refuses(r"nope seed 1.* were validated on different windows.*validation_tokens", comparison, experiment_copy)


def test_a_choice_that_is_not_there_is_named(experiment_copy):
    summary, _ = read([experiment_copy])
    refuses(r"'alibo' has no runs here.*alibi", choose, summary, schemes=["alibo"])
    refuses("seeds with runs: 0, 1, 2, 3", choose, summary, seeds=[9])
    for run in find_runs(experiment_copy):
        run.update_manifest(status="stopped")
    refuses("no run is finished here", comparison, experiment_copy)


def test_runs_without_stored_windows_have_the_losses_of_their_manifests(experiment_copy):
    for place in experiment_copy.glob("*/seed=*/eval"):
        shutil.rmtree(place)
    analysis = comparison(experiment_copy)
    assert analysis.cells.empty
    assert analysis.values.loc[0, "nope"] == run_of(experiment_copy, "nope", 0).manifest.loss
    config = yaml.safe_load((experiment_copy / "nope/seed=0/config.yaml").read_text())
    assert analysis.config["train"] == config["train"]


def test_what_the_shared_rate_was_is_no_difference_between_runs_with_their_own(experiment_copy):
    runs = posbench.results(experiment_copy)
    runs.loc[runs["scheme"] == "nope", "fingerprint.config"] = "of another shared rate"
    refuses("the configuration: ", check_agreement, runs)
    runs = runs.assign(own_rate=True)
    check_agreement(runs)
    runs.loc[runs["scheme"] == "nope", "train.lr_end_ratio"] = 0.5
    refuses(r"train\.lr_end_ratio: ", check_agreement, runs)
