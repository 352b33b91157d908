"""A packed experiment says what its run folders say, to the last digit, and what is damaged in it is named."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

import posbench
from posbench.config import ConfigError
from posbench.evaluation import Question
from posbench.evaluation.command import evaluate_runs
from posbench.machine.files import sealed
from posbench.reporting.report import report
from posbench.runs import DIED, find_runs, load_run, run_folder
from posbench.runs.pack import pack
from posbench.runs.packed import READINGS, Pack
from tests.reporting.fabricate import World, fabricate, run_of, write_evaluation

EFFECTS = {"nope": 0.08, "qk_rope": 0.0, "vo_rope": 0.03}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 schemes x 2 seeds, two lengths, probes; a result under other words, one that lacks a column, one of another
    number format; one tokenizer; one run that died."""
    world = World(EFFECTS, seeds=(0, 1), lengths=(256, 512))
    folder = fabricate(tmp_path_factory.mktemp("runs"), world)
    run = run_of(folder, "qk_rope", 1)
    results = {str(result.reading): result for result in run.results()[0]}
    write_evaluation(run, "fixed", 512, "test", results["fixed at 512"].windows, "base=1e6")
    older = results["retrieval at 512"].windows.drop(columns="shuffled_nll")
    write_evaluation(run, "retrieval", 512, "test", older)
    other = results["nonoverlapping at 256"].windows.astype({"targets": "int64"})
    write_evaluation(run, "nonoverlapping", 256, "test", other)
    (run.path / "tokenizer.json").write_text("{}")
    run_of(folder, "vo_rope", 1).update_manifest(status=DIED)
    return folder


@pytest.fixture(scope="session")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, packed."""
    output = tmp_path_factory.mktemp("packed") / "demo"
    pack(folder, output, print)
    return output


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    """A copy of the pack, for a test to change."""
    return Path(shutil.copytree(whole, tmp_path / "packed" / "demo"))


def alter(file: Path) -> None:
    """Another byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def reseal(packed: Path, **changes: Any) -> None:
    """Make `pack.json` agree with the files, as somebody who alters them on purpose would."""
    from posbench.runs.pack import _size_and_sum

    content = json.loads((packed / "pack.json").read_text())
    content["files"] = {name: _size_and_sum(packed / name) for name in content["files"]}
    (packed / "pack.json").write_text(json.dumps(sealed({**content, **changes})))


@pytest.mark.slow
def test_a_pack_gives_the_same_frame_and_report_as_the_run_folders(folder: Path, whole: Path, tmp_path: Path) -> None:
    before, after = (posbench.results(place).drop(columns="path") for place in (folder, whole))
    before = before[before["status"] == "finished"].reset_index(drop=True)
    before, after = (frame.astype(object).where(frame.notna(), None) for frame in (before, after[before.columns]))
    pd.testing.assert_frame_equal(before, after)
    rows = posbench.results(whole, tidy=True)
    assert "base=1e6" in set(rows["under"])
    for name, place in (("before", folder), ("after", whole)):
        report(place, output=tmp_path / name, console=Console(file=io.StringIO()))
    for name in ("table.csv", "pairs.csv", "schemes.csv"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_a_packed_run_is_read_as_a_run_folder_is(folder: Path, whole: Path) -> None:
    for before in find_runs(folder / "qk_rope"):
        after = load_run(whole / "qk_rope" / before.path.name)
        assert (after.name, after.config, after.manifest) == (before.name, before.config, before.manifest)
        assert after.is_finished and not after.has_weights
        pd.testing.assert_frame_equal(after.metrics, before.metrics)
        for ours, theirs in zip(after.results()[0], before.results()[0], strict=True):
            assert (ours.reading, ours.header) == (theirs.reading, theirs.header)
            pd.testing.assert_frame_equal(ours.windows, theirs.windows)
    assert [run.path for run in find_runs(whole / "nope")] == [whole / "nope" / f"seed={n}" for n in (0, 1)]
    with pytest.raises(ConfigError, match=r"packed experiment and contains no run nope/seed=7"):
        load_run(whole / "nope" / "seed=7")


def test_a_pack_can_be_packed_again(whole: Path, tmp_path: Path) -> None:
    pack(whole, tmp_path / "demo", print)
    assert {file.name for file in whole.iterdir()} > {"tokenizer.json", "windows-nonoverlapping-2.parquet"}
    assert all((tmp_path / "demo" / file.name).read_bytes() == file.read_bytes() for file in whole.iterdir())


def test_the_results_of_a_protocol_may_stay_out(whole: Path, tmp_path: Path) -> None:
    pack(whole, tmp_path / "demo", pytest.fail, without=["retrieval"])
    before, after = (pd.read_parquet(place / "readings.parquet") for place in (whole, tmp_path / "demo"))
    assert list(after["sha256"]) == list(before[before["protocol"] != "retrieval"]["sha256"]) != list(before["sha256"])
    assert not list((tmp_path / "demo").glob("windows-retrieval*"))
    with pytest.raises(ConfigError, match="--without ordre: the runs have no such results; they have fixed, "):
        pack(whole, tmp_path / "other", print, without=["ordre"])
    with pytest.raises(ConfigError, match="every report needs these results"):
        pack(whole, tmp_path / "other", print, without=["validation"])


def test_every_file_can_be_read_on_its_own(folder: Path, whole: Path) -> None:
    frames = {file.stem: pd.read_parquet(file) for file in whole.glob("*.parquet")}
    assert {"scheme", "seed"} <= set.intersection(*(set(frame) for frame in frames.values()))
    windows = frames["windows-fixed"]
    mine = windows[(windows["scheme"] == "qk_rope") & (windows["seed"] == 1) & (windows["length"] == 512)]
    stored = pd.read_parquet(run_of(folder, "qk_rope", 1).path / "eval/fixed/512.parquet")
    own = mine[mine["under"] == ""][list(stored)].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, stored)
    assert set(mine["under"]) == {"", "base=1e6"}


def test_what_is_left_out_is_named_and_a_folder_that_holds_something_is_refused(folder: Path, tmp_path: Path) -> None:
    alter(Path(shutil.copytree(folder, tmp_path / "demo")) / "nope/seed=0/eval/fixed/512.parquet")
    notices: list[str] = []
    pack(tmp_path / "demo", tmp_path / "packed", notices.append)
    assert {notice.split(":")[0] for notice in notices} == {
        "demo/vo_rope/seed=1 is died",
        f"{tmp_path}/demo/nope/seed=0/eval/fixed/512.parquet is not used",
    }
    with pytest.raises(ConfigError, match="is not an empty folder"):
        pack(tmp_path / "demo", tmp_path / "packed", print)
    with pytest.raises(ConfigError, match="is inside the experiment"):
        pack(tmp_path / "demo", tmp_path / "demo" / "packed", print)
    with pytest.raises(ConfigError, match="give the folder of one experiment"):
        pack(tmp_path, tmp_path.parent / "another", print)


def test_an_altered_byte_in_one_file_of_windows_empties_its_cells_alone(whole: Path, packed: Path) -> None:
    alter(packed / "windows-fixed.parquet")
    before, after = posbench.results(whole), posbench.results(packed)
    assert "fixed" not in set(posbench.results(packed, tidy=True)["protocol"])
    assert after["damaged"].str.contains("windows-fixed.parquet does not match").all()
    assert after["damaged"].str.contains("git checkout").all()
    others = [name for name in before if name not in ("path", "damaged")]
    pd.testing.assert_frame_equal(before[others], after[others])


@pytest.mark.parametrize("name", ["pack.json", "runs.parquet", "readings.parquet"])
def test_a_pack_that_cannot_say_what_it_holds_is_unreadable_and_named(packed: Path, name: str) -> None:
    alter(packed / name)
    frame = posbench.results(packed.parent)
    assert set(frame["status"]) == {"unreadable"} and set(frame["experiment"]) == {"demo"}
    assert frame["reason"].str.contains(f"{packed / name} .*: restore ").all()


def test_numbers_that_somebody_altered_and_sealed_anew_are_not_believed(packed: Path) -> None:
    file = packed / "windows-fixed.parquet"
    windows = pd.read_parquet(file)
    windows.loc[windows["length"] == 512, "nll"] /= 2
    windows.to_parquet(file, index=False)
    reseal(packed)
    rows = posbench.results(packed, tidy=True)
    assert set(rows.loc[(rows["protocol"] == "fixed") & (rows["under"] == ""), "length"]) == {256}


def test_a_result_of_another_run_is_not_one_of_this(packed: Path) -> None:
    readings = pd.read_parquet(packed / READINGS)
    readings["scheme"] = readings["scheme"].map({"nope": "qk_rope", "qk_rope": "nope", "vo_rope": "vo_rope"})
    readings.to_parquet(packed / READINGS, index=False)
    reseal(packed)
    frame = posbench.results(packed).set_index("scheme")
    rows = posbench.results(packed, tidy=True)
    assert set(rows.loc[rows["protocol"] == "fixed", "scheme"]) == {"vo_rope"}
    assert "it is of another run" in frame.loc["nope", "damaged"].iloc[0]


@pytest.mark.parametrize(
    "changes",
    [{"format": 2}, {"format": "1"}, {"runs": ["../seed=0"]}, {"runs": 3}, {"files": {"../../x": {}}}],
    ids=str,
)
def test_a_list_that_is_not_one_is_refused_at_the_door(packed: Path, changes: dict[str, Any]) -> None:
    content = json.loads((packed / "pack.json").read_text())
    (packed / "pack.json").write_text(json.dumps(sealed({**content, **changes})))
    with pytest.raises(ConfigError, match=r"pack\.json"):
        _ = Pack(packed).index
    assert list(posbench.results(packed)["status"]) == ["unreadable"]


def test_a_packed_experiment_holds_no_weights_and_takes_no_runs(packed: Path) -> None:
    before = {file.name: file.read_bytes() for file in packed.iterdir()}
    runs = find_runs(packed)
    with pytest.raises(ConfigError, match="has results but no weights"):
        evaluate_runs(runs[:1], Question(lengths=(64,)), Console(quiet=True))
    with pytest.raises(ConfigError, match="has results but no weights"):
        runs[0].load_model()
    with pytest.raises(ConfigError, match="cannot be changed"):
        runs[0].update_manifest(reason="none")
    with pytest.raises(ConfigError, match="so no runs can be added to it"):
        run_folder(replace(runs[0].config, runs_dir=str(packed.parent)))
    assert {file.name: file.read_bytes() for file in packed.iterdir()} == before
