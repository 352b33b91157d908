"""Run folders as rows: nothing is dropped, nothing is mixed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest
from fabricate import T, run_of

import posbench
from posbench.config import ConfigError
from posbench.reporting import results
from posbench.reporting.findings import find
from posbench.runs import DIED


def test_one_row_a_run_with_the_loss_of_its_windows(experiment: Path) -> None:
    frame = posbench.results(experiment)
    assert len(frame) == 16
    for row in frame.itertuples():
        windows = pyarrow.parquet.read_table(Path(row.path) / "eval" / "validation" / f"{T}.parquet").to_pydict()
        loss = math.fsum(windows["nll"]) / sum(windows["targets"])
        assert row.loss == pytest.approx(loss, rel=1e-12)
        assert row.perplexity == pytest.approx(math.exp(loss))
        assert row.bits_per_byte == pytest.approx(math.fsum(windows["nll"]) / math.log(2) / sum(windows["bytes"]))


def test_protocols_have_columns_of_their_own(experiment: Path) -> None:
    columns = [c for c in results(experiment) if c.startswith("perplexity@")]
    lengths = (128, 256, 512, 1024, 2048)
    assert columns == [f"perplexity@{n}/{p}" for p in ("fixed", "nonoverlapping") for n in lengths]


def test_a_run_that_died_is_a_row_that_says_so(own: Path) -> None:
    run_of(own, "nope", 2).update_manifest(status=DIED, reason="loss nan at step 7", loss=None)
    frame = results(own).set_index(["scheme", "seed"])
    assert frame.loc[("nope", 2), ["status", "reason"]].tolist() == [DIED, "loss nan at step 7"]


def test_a_manifest_that_cannot_be_read_is_a_row_too(own: Path) -> None:
    (own / "nope" / "seed=2" / "run.json").write_text('{"format": 1, "sta')
    frame = results(own).set_index(["scheme", "seed"])
    assert frame.loc[("nope", 2), "status"] == "unreadable"
    assert "cannot be read" in frame.loc[("nope", 2), "reason"]


@pytest.mark.parametrize("field", ["seed", "fingerprints", "costs", "versions", "device", "num_parameters", "loss"])
@pytest.mark.parametrize("value", [None, "x", [1], {"data": [1]}])
def test_a_hand_made_manifest_does_not_break_the_others(own: Path, field: str, value: object) -> None:
    run = run_of(own, "nope", 2)
    (run.path / "run.json").write_text(json.dumps({**run.manifest, field: value}))
    assert len(results(own)) == 16


def test_a_torn_evaluation_names_its_file_and_the_remedy(own: Path) -> None:
    file = own / "nope" / "seed=2" / "eval" / "validation" / f"{T}.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"256\.parquet cannot be read .*posbench eval"):
        results(own)


@pytest.mark.parametrize("field", ["tokens", "num_steps", "loss", "seed", "num_parameters"])
def test_numbers_without_end_are_not_known(own: Path, field: str) -> None:
    run = run_of(own, "nope", 2)
    huge = {"body": 10**400} if field == "num_parameters" else 10**400
    (run.path / "run.json").write_text(json.dumps({**run.manifest, field: huge}))
    assert len(results(own)) == 16


def test_digits_that_are_no_numbers_are_no_seed_and_no_length(own: Path) -> None:
    two = "\N{SUPERSCRIPT TWO}"
    (own / "nope" / "seed=2").rename(own / "nope" / f"seed={two}")
    (own / "nope" / f"seed={two}" / "run.json").write_text("{")
    for suffix in ("json", "parquet"):
        (own / "nope" / "seed=1" / "eval" / "validation" / f"{two}.{suffix}").touch()
    assert len(results(own)) == 16


def test_a_run_without_its_configuration_is_left_out_by_name(own: Path) -> None:
    (own / "nope" / "seed=2" / "config.yaml").unlink()
    found = find(own)
    [left] = [left for left in found.joined.left_out if left.why.startswith("unreadable")]
    assert (left.scheme, left.seed) == ("nope", 2) and "holds no config.yaml" in left.why


@pytest.mark.parametrize(
    "column, value", [("nll", "x"), ("targets", "x"), ("targets", 0), ("targets", None), ("bytes", 0), ("document", -1)]
)
def test_windows_of_what_cannot_be_are_named(own: Path, column: str, value: object) -> None:
    file = own / "nope" / "seed=2" / "eval" / "validation" / f"{T}.parquet"
    pd.read_parquet(file).assign(**{column: value}).to_parquet(file)
    with pytest.raises(ConfigError, match=rf"256\.parquet: the column '{column}' holds what it cannot"):
        results(own)


@pytest.mark.parametrize(
    "row",
    [
        '"tokens": 1',
        '"loss": 1',
        '"tokens": 1, "loss": "x"',
        '"tokens": [1], "loss": 1',
        '"loss": 1, "tokens": 1e999',
        f'"loss": 1, "tokens": {10**400}',
        '"x": ' + "[" * 100_000,
    ],
    ids=lambda row: row[:24],
)
def test_metrics_that_are_none_cost_a_curve_and_no_more(own: Path, row: str) -> None:
    with (own / "nope" / "seed=2" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "validation", {row}}}\n')
    assert [note for note in find(own).notes if "The loss curve of nope seed 2 is not shown" in note]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        results(tmp_path / "nowhere")
