"""Run folders as rows: nothing is dropped, nothing is mixed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from fabricate import T, run_of, write_evaluation

import posbench
from posbench.config import ConfigError
from posbench.reporting import results
from posbench.reporting.findings import find
from posbench.runs import DIED, Run
from posbench.runs.readings import store


def test_one_row_a_run_with_the_loss_of_its_windows(experiment: Path) -> None:
    frame = posbench.results(experiment)
    assert len(frame) == 16
    for row in frame.itertuples():
        windows = pyarrow.parquet.read_table(Path(row.path) / "eval" / "validation" / f"{T}.parquet").to_pydict()
        loss = math.fsum(windows["nll"]) / sum(windows["targets"])
        assert row.loss == pytest.approx(loss, rel=1e-12)
        assert row.perplexity == pytest.approx(math.exp(loss))
        assert row.bits_per_byte == pytest.approx(math.fsum(windows["nll"]) / math.log(2) / sum(windows["bytes"]))


def test_settings_are_columns_by_their_names_and_stand_last(own: Path) -> None:
    said = {"nope": {"train.lr": 0.25, "path": "elsewhere"}, "qk_rope": {"scheme.sites": ["q", "k"], "train.lr": 0.5}}
    for scheme, identity in said.items():
        run_of(own, scheme, 0).update_manifest(identity={**identity, "fingerprint.data": "another"})
    frame = posbench.results(own)
    assert list(frame)[-3:] == ["path", "scheme.sites", "train.lr"] and frame["fingerprint.data"].nunique() == 1
    rows = frame.set_index(["scheme", "seed"])
    assert rows.loc[("qk_rope", 0), ["scheme.sites", "train.lr"]].tolist() == ['["q", "k"]', 0.5]
    assert rows.loc[("nope", 0), ["path", "train.lr"]].tolist() == [str(run_of(own, "nope", 0).path), 0.25]
    assert rows.loc[("nope", 1), ["scheme.sites", "train.lr"]].isna().all()


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


def hand_made(run: Run, **changes: object) -> None:
    """A manifest of format 1, which knows no seal: anybody can write it."""
    content = json.loads((run.path / "run.json").read_text())
    older = {**content["fingerprints"], "initial_weights": "we19"}
    (run.path / "run.json").write_text(json.dumps({**content, "format": 1, "fingerprints": older, **changes}))


@pytest.mark.parametrize("value", ["x", [1], {"data": [1]}, 10**400, {"body": 10**400}, -1.5e308, True])
def test_hand_made_manifests_do_not_break_the_others(own: Path, value: object) -> None:
    fields = ["seed", "fingerprints", "costs", "versions", "device", "num_parameters", "loss", "tokens", "identity"]
    runs = [run_of(own, scheme, seed) for scheme in ("nope", "alibi", "qkvo_rope") for seed in (1, 2, 3)]
    for run, field in zip(runs, fields, strict=True):
        hand_made(run, **{field: value})
    found = find(own)
    assert len(found.frame) == 16 and not found.joined.runs.empty


def test_a_torn_evaluation_is_named_with_its_remedy_and_the_others_are_read(own: Path) -> None:
    file = own / "nope" / "seed=2" / "eval" / "validation" / f"{T}.parquet"
    file.write_bytes(file.read_bytes()[:100])
    frame = results(own).set_index(["scheme", "seed"])
    assert math.isnan(frame.loc[("nope", 2), "loss"]) and frame["loss"].notna().sum() == 15
    assert frame["damaged"].notna().sum() == 1
    assert re.search(r"256\.parquet is not used: .*posbench eval .*nope", frame.loc[("nope", 2), "damaged"])


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
    assert (left.scheme, left.seed) == ("nope", 2) and "has no config.yaml" in left.why


def test_a_result_that_lacks_a_column_of_its_protocol_is_damaged(own: Path) -> None:
    run = run_of(own, "nope", 2)
    [result] = run.results()[0]
    store(run, result.reading, result.windows.drop(columns="bytes"), result.header)
    frame = results(own).set_index(["scheme", "seed"])
    assert "lacks the column 'bytes'" in frame.loc[("nope", 2), "damaged"]
    assert math.isnan(frame.loc[("nope", 2), "loss"])


def test_results_under_other_words_have_columns_of_their_own(own: Path) -> None:
    run = run_of(own, "qk_rope", 0)
    rows = run.results()[0][0].windows
    write_evaluation(run, "fixed", 512, "test", rows, "rescale=yarn", "factor=4")
    write_evaluation(run, "fixed", 512, "test", rows)
    columns = [c for c in results(own) if c.startswith("perplexity@")]
    assert columns == ["perplexity@512/fixed", "perplexity@512/fixed[factor=4 rescale=yarn]"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        results(tmp_path / "nowhere")
