"""A pack says what its run folders say, to the last digit, and is read in place by whatever reads runs."""

import json
import shutil
import zipfile

import numpy as np
import pandas as pd
import pytest

import posbench
from posbench.composition.compose import compose
from posbench.config import ConfigError
from posbench.runs import Run, find_runs, load_run
from posbench.runs.finding import pack_experiment
from posbench.training import train
from tests.conftest import small_run
from tests.refusals import refuses
from tests.runs.conftest import WORDS


def facts(run):
    """Return all facts that a run stores, with numbers as bytes."""
    results, damaged = run.results()
    assert not damaged
    windows = [(r.key, dict(r.header), r.windows.dtypes.to_dict(), r.windows.to_numpy().tobytes()) for r in results]
    return run.config, run.manifest, run.logged, run.tokenizer.to_str(), run.evaluated(), windows


@pytest.mark.slow
def test_packed_runs_say_what_their_folders_say_and_packing_twice_gives_the_same_bytes(runs):
    facts_before = {run.path: facts(run) for run in find_runs(runs)}
    frame = posbench.results(runs)
    file = pack_experiment(runs / "demo", None, pytest.fail)
    again = pack_experiment(runs / "demo", runs.parent / "demo.zip", pytest.fail)
    assert file == runs / "demo.zip" and file.read_bytes() == again.read_bytes()
    shutil.rmtree(runs / "demo")
    for place in (runs, runs / "demo", file):
        assert {run.path: facts(run) for run in find_runs(place)} == facts_before
    assert [run.path.name for run in find_runs(runs / "demo/vo_rope/seed=1")] == ["seed=1"]
    assert facts(load_run(runs / "demo/vo_rope/seed=0")) == facts_before[runs / "demo/vo_rope/seed=0"]
    pd.testing.assert_frame_equal(posbench.results(runs), frame)


def test_further_seeds_are_a_further_pack_and_both_are_one_experiment(runs, documents, cache):
    first = pack_experiment(runs / "demo", None, pytest.fail)
    content = first.read_bytes()
    shutil.rmtree(runs / "demo")
    words = [*small_run(documents, cache, runs), *WORDS]
    assert train(compose([*words, "seed=1"])).manifest.status == "finished"
    assert not (runs / "demo").exists(), "it is finished: nothing was trained"
    train(compose([*words, "seed=1764000000"]))
    assert [run.manifest.seed for run in find_runs(runs / "demo")] == [0, 1, 1764000000]
    notices = []
    second = pack_experiment(runs / "demo", None, notices.append)
    assert second.name == "demo.2.zip" and all("packed already" in notice for notice in notices) and notices
    shutil.rmtree(runs / "demo")
    for place in (runs / "demo", first, second):
        assert [run.manifest.seed for run in find_runs(place)] == [0, 1, 1764000000]
    assert first.read_bytes() == content
    refuses(r"exists, and packs are never rewritten: .*/demo\.3\.zip", pack_experiment, runs / "demo", second, print)


def test_a_name_may_end_with_a_dot_and_a_number(runs):
    """`demo.1` is an experiment, also beside a pack of `demo`."""
    pack_experiment(runs / "demo", None, pytest.fail)
    (runs / "demo").rename(runs / "demo.1")
    file = pack_experiment(runs / "demo.1", None, pytest.fail)
    shutil.rmtree(runs / "demo.1")
    assert file.name == "demo.1.zip"
    assert {run.path.parts[-3] for run in find_runs(runs)} == {"demo", "demo.1"}


def test_with_weights_a_packed_run_is_evaluated(runs, run, evaluate):
    [loss] = [result.loss for result in evaluate(run, lengths=(64,), again=True)]
    whole = run.load_model()
    plain = pack_experiment(runs / "demo", runs.parent / "plain.zip", pytest.fail)
    pack_experiment(runs / "demo", None, pytest.fail, weights=True)
    shutil.rmtree(runs / "demo")
    packed = load_run(run.path)
    assert packed.has_weights and not find_runs(plain)[0].has_weights
    for ours, theirs in zip(packed.load_model().parameters(), whole.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= theirs.abs().max() / 256
    [rounded] = [result.loss for result in evaluate(packed, lengths=(64,))]
    assert rounded != loss and rounded == pytest.approx(loss, abs=0.01)
    stored = {str(result.key): result for result in packed.results()[0]}
    assert {"fixed at 64", "fixed at 64 under weights=bfloat16"} <= set(stored)
    assert [found_run.path for found_run in find_runs(runs)] == [run.path, run.path.with_name("seed=1")]
    refuses("has results but no weights", find_runs(plain)[0].load_model)
    refuses("no weights of step 2", packed.load_model, at_step=2)


@pytest.mark.parametrize("name", ["pack.json", "metrics.parquet", "windows-fixed.parquet"])
def test_a_damaged_pack_is_named(runs, name):
    file = pack_experiment(runs / "demo", None, pytest.fail)
    shutil.rmtree(runs / "demo")
    with zipfile.ZipFile(file) as archive:
        at = archive.getinfo(name).header_offset + 200
    content = bytearray(file.read_bytes())
    content[at] ^= 8
    file.write_bytes(content)
    if name == "pack.json":
        notices = []
        assert find_runs(runs, notices.append) == [] and "demo.zip cannot be read" in notices[0]
        return
    run = find_runs(runs)[0]
    with pytest.raises(ConfigError, match=r"demo\.zip cannot be read .*restore it from a copy"):
        _ = run.logged if name == "metrics.parquet" else run.results()


@pytest.mark.parametrize("name", ["../evil/seed=0", "a/../seed=0", "x/seed=one", "/etc/seed=0"])
def test_names_in_a_pack_of_somebody_else_lead_nowhere_else(tmp_path, name):
    content = {"format": 1, "experiment": "demo", "texts": ["{}"], "runs": {name: {"run.json": 0}}, "results": []}
    with zipfile.ZipFile(tmp_path / "demo.zip", "w") as archive:
        archive.writestr("pack.json", json.dumps(content))
    notices = []
    assert find_runs(tmp_path, notices.append) == [] and notices[0].startswith("skipped: ")


def test_only_finished_runs_of_one_experiment_are_packed(runs, tmp_path):
    Run(runs / "demo/vo_rope/seed=1").update_manifest(status="died", reason="NaN")
    notices = []
    pack_experiment(runs / "demo", tmp_path / "out.zip", notices.append)
    assert notices[0] == "demo/vo_rope/seed=1 is skipped: died"
    assert [run.path for run in find_runs(tmp_path / "out.zip")] == [tmp_path / "out/vo_rope/seed=0"]
    refuses("give the folder of one experiment", pack_experiment, runs, tmp_path / "all.zip", print)
    refuses("is not the name of a zip file", pack_experiment, runs / "demo", tmp_path / "folder", print)
    assert np.isfinite(posbench.results(tmp_path / "out.zip")["loss"]).all()
