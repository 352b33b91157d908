"""A result belongs to its run's folder, weights and text; any other is named, and scored again on request."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from posbench.composition.compose import compose
from posbench.config import SchemeConfig
from posbench.model.decoder import build_model
from posbench.runs import Run
from posbench.runs.results import ResultKey
from posbench.training import train
from tests.conftest import small_run
from tests.refusals import refuses
from tests.runs.conftest import WORDS


def torn(file):
    file.write_bytes(file.read_bytes()[:100])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[60] ^= 4
    file.write_bytes(content)


def without_header(file):
    file.with_suffix(".json").unlink()


def torn_header(file):
    file.with_suffix(".json").write_text('{"protocol": "fix')


@pytest.mark.parametrize(("protocol", "length", "name"), [("fixed", 64, "64@anchor=64"), ("validation", 32, "32")])
@pytest.mark.parametrize("harm", [torn, flipped, without_header, torn_header])
def test_a_damaged_result_is_named_and_made_again(run, evaluate, protocol, length, name, harm):
    results_before, _ = run.results()
    file = run.path / "eval" / protocol / f"{name}.parquet"
    whole = file.read_bytes()
    harm(file)
    results, [damage] = run.results()
    assert damage.file == file and len(results) == len(results_before) - 1
    evaluate(run, protocols=(protocol,), lengths=(length,))
    assert run.results()[1] == [] and file.read_bytes() == whole
    assert [r.loss for r in run.results()[0]] == [r.loss for r in results_before]


def test_results_of_another_run_are_not_this_runs(run, evaluate):
    other_run = Run(run.path.with_name("seed=1"))
    [loss] = [result.loss for result in other_run.results()[0] if result.protocol == "validation"]
    shutil.rmtree(other_run.path / "eval")
    shutil.copytree(run.path / "eval", other_run.path / "eval")
    results, damaged = other_run.results()
    assert not results
    assert {damage.reason for damage in damaged} == {"its header says run=demo/vo_rope/seed=0, not demo/vo_rope/seed=1"}
    evaluate(other_run, protocols=("validation",))
    assert [result.loss for result in other_run.results()[0]] == [loss]


def test_results_of_older_weights_or_other_text_are_not_this_runs(run):
    fingerprints = run.manifest.fingerprints
    run.update_manifest(weights="0" * 64)
    assert not run.results()[0] and all("says weights=" in damage.reason for damage in run.results()[1])
    run.update_manifest(fingerprints=type(fingerprints)(**{**vars(fingerprints), "data": "1" * 64}))
    assert not run.results()[0] and all("says data=" in damage.reason for damage in run.results()[1])


def test_a_result_that_was_renamed_to_another_length_is_not_a_result(run):
    folder = run.path / "eval" / "fixed"
    for suffix in ("json", "parquet"):
        shutil.copy(folder / f"64@anchor=64.{suffix}", folder / f"128@anchor=64.{suffix}")
        shutil.copy(folder / f"64@anchor=64.{suffix}", folder / f"64@anchor=128.{suffix}")
    moved, longer = run.results()[1]
    assert moved.key == ResultKey("fixed", 64, (), 128) and moved.reason == "its header says anchor=64, not 128"
    assert longer.key == ResultKey("fixed", 128, (), 64) and longer.reason == "its header says length=64, not 128"


def test_the_anchor_of_an_older_result_is_in_its_header_only(run, evaluate):
    folder = run.path / "eval" / "fixed"
    for suffix in ("json", "parquet"):
        (folder / f"64@anchor=64.{suffix}").rename(folder / f"64.{suffix}")
    assert ResultKey("fixed", 64, (), 64) in [result.key for result in run.results()[0]]
    evaluate(run, lengths=(64,))
    assert not (folder / "64@anchor=64.parquet").exists(), "it is not scored again"


def test_options_at_evaluation_are_a_result_of_their_own(run, evaluate):
    [trained] = evaluate(run, lengths=(64,))
    [changed] = evaluate(run, lengths=(64,), under=("base=1e2",))
    assert changed.key == ResultKey("fixed", 64, ("base=1e2",), 64) and changed.loss != trained.loss
    assert (run.path / "eval/fixed/64@anchor=64@base=1e2.parquet").is_file()
    assert changed.header["weights"] == trained.header["weights"] == run.manifest.weights
    same = run.load_model(under=["base=10000.0"])
    assert all(
        parameter.equal(original)
        for parameter, original in zip(same.parameters(), run.load_model().parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("base",), r"scheme\.base"),
        (("base=../../x",), r"scheme\.base"),
    ],
)
def test_options_that_no_scheme_can_take_are_refused(run, options, says):
    refuses(says, run.load_model, under=options)


@pytest.mark.parametrize("name", ["8@anchor=1@anchor=2", "8@anchor=x", "8@anchor=-1", "x", "8@", "8@a"])
def test_a_file_with_another_name_is_no_result_and_stops_nothing(run, name):
    expected = run.evaluated()
    (run.path / "eval" / "fixed" / f"{name}.parquet").touch()
    assert run.evaluated() == [result.key for result in run.results()[0]] == expected


def test_older_weights_are_a_result_of_their_own(run, evaluate):
    [last] = evaluate(run, lengths=(64,))
    [older] = evaluate(run, lengths=(64,), at_step=2)
    assert older.key.under == ("step=2",) and older.key.step == 2 and older.loss != last.loss
    [same] = evaluate(run, lengths=(64,), at_step=4)
    assert same.key.under == (), "the last step is what is read anyway"


@pytest.mark.parametrize("reason", ["does not match its checksum", "is missing"])
def test_weights_of_the_last_step_or_an_error_with_the_steps_that_are_left(run, evaluate, reason):
    checkpoints = run.path / "checkpoints"
    (checkpoints / "step=00000004" / "optimizer.safetensors").unlink()
    run.load_model()  # which needs no optimizer
    if reason == "is missing":
        shutil.rmtree(checkpoints / "step=00000004")
    else:
        file = checkpoints / "step=00000004" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    refuses(rf"step 4 .*{reason}.* with --at-step \(there are: 2\)", run.load_model)
    refuses(r"step 4 .*--at-step", evaluate, run, lengths=(128,))
    run.load_model(at_step=2)
    shutil.rmtree(checkpoints / "step=00000002")
    refuses(r"there are: none\), or delete the folder .* and train the run again", run.load_model)


def test_another_number_format_than_the_stored_one_is_scored_again(run, evaluate):
    header = run.path / "eval/fixed/64@anchor=64.json"
    header_bytes = header.read_bytes()
    assert evaluate(run, lengths=(64,), dtype="auto")[0].header["dtype"] == "float32"
    assert header.read_bytes() == header_bytes
    (again,) = evaluate(run, lengths=(64,), dtype="bfloat16")
    assert again.header["dtype"] == json.loads(header.read_text())["dtype"] == "bfloat16"


def test_trained_weights_are_read_under_another_scheme_that_learns_nothing(run, evaluate, documents, cache, tmp_path):
    [trained] = evaluate(run, lengths=(64,))
    [read] = evaluate(run, lengths=(64,), under=("scheme=nope",))
    assert read.key.under == ("scheme=nope",) and read.header["weights"] == trained.header["weights"]
    tokens = torch.arange(40)[None]
    nope = build_model(replace(run.config, scheme=SchemeConfig("nope", "nope")), run.manifest.vocab_size)
    nope.load_state_dict(run.load_weights())
    assert torch.equal(run.load_model(["scheme=nope"])(tokens), nope(tokens))
    file = tmp_path / "mine.py"
    file.write_text("from posbench.schemes import Scheme\n\n\nclass Mine(Scheme):\n    pass\n", encoding="utf-8")
    [rescored] = evaluate(run, lengths=(64,), under=(f"scheme={file}:Mine",))
    assert rescored.loss == read.loss and rescored.key in run.evaluated(), (
        "found again, though its name has the folder's slashes"
    )
    near = replace(run.config, scheme=replace(run.config.scheme, options={**run.config.scheme.options, "window": 8}))
    windowed = run.path.parent / "seed=9"
    shutil.copytree(run.path, windowed)
    (windowed / "config.yaml").write_text(yaml.safe_dump(near.to_mapping()))
    assert Run(windowed).load_model(["scheme=nope"]).scheme[0].window == 8
    turned = run.load_model(["base=1e2", "scheme=qk_rope"])  # options are of the scheme that is named, in any order
    assert turned.scheme[0].sites == {"q", "k"} and turned.scheme[0].base == 100
    learned = train(compose([*small_run(documents, cache, tmp_path), *WORDS, "scheme=t5"]))
    nope.load_state_dict(
        {name: tensor for name, tensor in learned.load_weights().items() if not name.startswith("scheme.")}
    )
    assert torch.equal(learned.load_model(["scheme=nope"])(tokens), nope(tokens))
    refuses("--under changes the parameters", run.load_model, ["scheme=t5"])
    refuses(
        "scheme=sink_nope has another kind of attention than demo/vo_rope/seed=0", run.load_model, ["scheme=sink_nope"]
    )
    refuses("scheme=hybrid_nope has another kind of attention", run.load_model, ["scheme=hybrid_nope"])
