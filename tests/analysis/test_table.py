"""The tidy table and its summary against the files that the figures come from."""

import json
import math

import pandas as pd
import pytest

import posbench
from posbench.reporting.page import meaning
from posbench.runs import DIED
from tests.analysis.fabricate import run_of, write_evaluation


def windows(folder, scheme, seed, protocol, stem):
    return pd.read_parquet(folder / scheme / f"seed={seed}" / "eval" / protocol / f"{stem}.parquet")


def test_sums_of_the_tidy_rows_are_those_of_the_stored_windows(experiment):
    rows = posbench.results(experiment, tidy=True)
    assert {"model.d_model", "train.lr", "tokens", "parameters"} <= set(rows.columns) and "run" not in rows
    rows = rows[(rows["scheme"] == "alibi") & (rows["seed"] == 2)]
    by_hand = windows(experiment, "alibi", 2, "fixed", 512)
    selected = rows[(rows["protocol"] == "fixed") & (rows["length"] == 512)].groupby("metric", observed=True)
    sums = selected[["value", "count"]].sum()
    assert tuple(sums.loc["loss"]) == pytest.approx((by_hand["nll"].sum(), by_hand["targets"].sum()))
    bits = (by_hand["nll"].sum() / math.log(2), by_hand["bytes"].sum())
    assert tuple(sums.loc["bits_per_byte"]) == pytest.approx(bits)

    by_hand = windows(experiment, "alibi", 2, "order", 256)
    by_hand = by_hand[by_hand["bucket_start"] == 5]
    selected = rows[(rows["metric"] == "lost_order") & (rows["first"] == 5)]
    assert set(selected["last"]) == set(by_hand["bucket_end"] - 1)
    assert selected["value"].sum() == pytest.approx((by_hand["shuffled_nll"] - by_hand["nll"]).sum())
    assert selected["count"].sum() == by_hand["targets"].sum()


def test_other_text_options_at_evaluation_and_older_weights_are_columns(experiment_copy):
    run = run_of(experiment_copy, "alibi", 0)
    rows = windows(experiment_copy, "alibi", 0, "fixed", 512)
    for word in ("data=wiki", "rescale=yarn", "step=100"):
        write_evaluation(run, "fixed", 512, "test", rows.assign(nll=rows["nll"] * 1.1), word)
    tidy = posbench.results(experiment_copy, tidy=True)
    tidy = tidy[(tidy["scheme"] == "alibi") & (tidy["seed"] == 0) & (tidy["metric"] == "loss")]
    tidy = tidy[(tidy["length"] == 512) & (tidy["protocol"] == "fixed")]
    sums = tidy.groupby(["text", "under", "at_step"], observed=True)["value"].sum()
    assert set(sums.index) == {("", "", 0), ("wiki", "", 0), ("", "rescale=yarn", 0), ("", "", 100)}
    assert sums[("wiki", "", 0)] == pytest.approx(1.1 * sums[("", "", 0)])


def test_the_summary_has_a_row_a_run_also_of_those_that_cannot_be_compared(experiment_copy):
    run_of(experiment_copy, "alibi", 0).update_manifest(status=DIED, reason="the loss is nan", loss=None)
    (experiment_copy / "nope" / "seed=1" / "run.json").write_text("{")
    (experiment_copy / "qk_rope" / "seed=0" / "eval" / "fixed" / "512.parquet").write_bytes(b"torn")
    summary = posbench.results(experiment_copy).set_index(["scheme", "seed"])
    assert len(summary) == 16 and set(summary["status"]) == {"finished", "died", "unreadable"}
    assert summary.loc[("alibi", 0), "diverged"] == "died: the loss is nan"
    assert "run.json" in summary.loc[("nope", 1), "reason"]
    assert "posbench eval" in summary.loc[("qk_rope", 0), "damaged"]
    by_hand = windows(experiment_copy, "nope", 3, "validation", 256)
    assert summary.loc[("nope", 3), "loss"] == pytest.approx(by_hand["nll"].sum() / by_hand["targets"].sum())
    assert (
        summary.loc[("nope", 3), "train.lr"]
        == json.loads((experiment_copy / "nope/seed=3/run.json").read_text())["identity"]["train.lr"]
    )


def test_every_column_is_documented(experiment):
    for frame in (posbench.results(experiment), posbench.results(experiment, tidy=True)):
        assert all(meaning(str(column))[0] for column in frame.columns)
    assert meaning("of_a_protocol_of_mine") == ("", "")
