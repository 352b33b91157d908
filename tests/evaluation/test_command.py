"""The table that `posbench eval` ends with."""

import io
import re

import pytest
import torch
from rich.console import Console

from posbench.data import prepare
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.evaluate import evaluate_run
from posbench.evaluation.request import Request
from posbench.runs import Run
from posbench.runs.results import ResultKey
from posbench.training import train
from tests.refusals import refuses

NAMES = ("learned", "nope")


@pytest.mark.slow
def test_lengths_beyond_those_of_a_scheme_are_not_scored_and_show_a_dash(config):
    learned, nope = (train(config(f"scheme={name}", "evaluation.targets=8", "train.steps=1")) for name in NAMES)
    console = Console(file=io.StringIO(), width=100)
    request = Request(lengths=(16, 32, 64), protocols=("fixed",), device="cpu", dtype="float32")
    evaluate_runs([learned, nope], request, console)
    text = console.file.getvalue()
    assert text.count("learned is defined up to 32 tokens: longer lengths are skipped") == 1
    assert re.search(r"learned +\d+\.\d+ +\d+\.\d+ +–\nnope( +\d+\.\d+){3}\n", text)
    stored = {run: [saved for saved in run.results()[0] if saved.protocol == "fixed"] for run in (learned, nope)}
    assert [result.length for result in stored[learned]] == [16, 32]
    assert stored[learned][0].windows[["document", "start"]].equals(stored[nope][0].windows[["document", "start"]])
    evaluate_runs([learned], Request(lengths=(64,), protocols=("fixed",), device="cpu", dtype="float32"), console)
    assert console.file.getvalue().rstrip().endswith("learned/seed=0: nothing to score")


@pytest.mark.parametrize("protocol", ["nonoverlapping", "order"])
def test_a_loss_that_is_not_finite_is_not_a_result(config, monkeypatch, protocol):
    """Pandas leaves NaN out of its sums: a model that overflows looked better than any other."""
    run = train(config("train.steps=1", "evaluation.windows=4"))
    model = run.load_model()
    torch.nn.init.constant_(model.norm.weight, torch.nan)
    monkeypatch.setattr(Run, "load_model", lambda *arguments: model)
    refuses(
        f"a loss of {protocol} at 16 tokens is not a finite number in float32",
        evaluate_run,
        run,
        prepare(run.config),
        Request((16,), (protocol,), dtype="float32"),
    )
    assert [result.protocol for result in run.results()[0]] == ["validation"]


ROWS = ("qk_rope", "nope", "rope_nope_interleaved")


@pytest.mark.slow
def test_finished_runs_are_read_under_rescaled_frequencies(config):
    runs = {name: train(config(f"scheme={name}", "evaluation.targets=8", "train.steps=1")) for name in ROWS}
    console = Console(file=io.StringIO(), width=100)

    def printed(*names, eval_options):
        request = Request(lengths=(16, 64), protocols=("fixed",), under=eval_options, device="cpu", dtype="float32")
        start = console.file.tell()
        evaluate_runs([runs[name] for name in names], request, console)
        return console.file.getvalue()[start:]

    text = printed(*ROWS, eval_options=("rescale=pi,yarn",))
    assert text.count("nope is scored only as trained: scheme.rescale is not an option of") == 1
    assert all(re.search(rf"\n{name}( +\d+\.\d+){{2}}\n", text) for name in ROWS), "as trained, beside the options"
    for name in ("qk_rope", "rope_nope_interleaved"):
        for rescaling in ("pi", "yarn"):
            assert re.search(rf"\n{name} · rescale={rescaling} +\d+\.\d+ +\d+\.\d+\n", text)
    stored = {result.key.under: result for result in runs["qk_rope"].results()[0] if result.length == 64}
    assert stored.keys() == {(), ("rescale=pi",), ("rescale=yarn",)}
    plain, *_ = [result for result in runs["qk_rope"].results()[0] if result.key == ResultKey("fixed", 64, (), 64)]
    again = printed("qk_rope", eval_options=("rescale=yarn", "factor=1"))
    same = {result.key: result for result in runs["qk_rope"].results()[0]}
    assert (
        same[ResultKey("fixed", 64, ("factor=1", "rescale=yarn"), 64)].loss == plain.loss
        and "qk_rope · factor=1 rescale=yarn" in again
    )
    assert len({plain.loss, *(result.loss for result in stored.values())}) == 3
    refuses(
        r"scheme\.rescale is not an option of .*Name runs of a scheme", printed, "nope", eval_options=("rescale=yarn",)
    )


def test_an_option_for_layers_without_a_window_changes_only_these(config):
    layers = "{name: qk_rope, kind: rotary, sites: [q, k], rescale: ntk, factor: 8}"
    run = train(
        config("scheme=window_rope_nope", f"scheme.layers=[window_qk_rope,{layers}]", "scheme.name=w", "train.steps=1")
    )
    option = "full_attention.rescale"
    for under, parameters in {
        (f"{option}=pi",): {"rope_type": "linear", "factor": None},  # not the factor of the trained rescaling
        ("full_attention.factor=4", f"{option}=pi"): {"rope_type": "linear", "factor": 4},
        (f"{option}={{rope_type: linear, factor: 2}}",): {"rope_type": "linear", "factor": 2},
        (f"{option}={{rope_type: linear, factor: 2}}", f"{option}.factor=3"): {"rope_type": "linear", "factor": 3},
        (f"{option}=null",): None,
    }.items():
        near, far = run.load_model(under=under).scheme
        assert near.rescaling is None
        length = {"original_max_position_embeddings": 32} if under[-1].endswith("pi") else {}
        assert far.rescaling is None if parameters is None else far.rescaling.parameters == parameters | length
    refuses(
        r"factor=0, which must be a number, 1 or more",
        run.load_model,
        under=(f"{option}={{rope_type: linear, factor: 0}}",),
    )


def test_a_comma_inside_a_mapping_or_a_list_does_not_separate_options():
    mapping = "{rope_type: longrope, short_factor: [1, 2], long_factor: [3, 4]}"
    variants = Request(under=(f"rescale=pi,{mapping}",), device="cpu", dtype="float32").variants
    assert [variant.under for variant in variants] == [(), ("rescale=pi",), (f"rescale={mapping}",)]


@pytest.fixture
def score(config):
    """Train runs of one experiment, give them to `posbench eval` at lengths, and return what it prints."""
    trained = {name: train(config(f"scheme={name}", "evaluation.targets=8", "train.steps=1")) for name in FEW}

    def score(names, *lengths, **request):
        console = Console(file=io.StringIO(), width=100)
        asked = Request(lengths, ("fixed",), device="cpu", dtype="float32", **request)
        evaluate_runs([trained[name] for name in names], asked, console)
        return console.file.getvalue()

    score.trained = trained
    return score


FEW = ("qk_rope", "nope")


def stored(run):
    """Return {(length, anchor): index of the last target of each window} of the results of `fixed` as trained."""
    results = [result for result in run.results()[0] if result.protocol == "fixed" and not result.key.under]
    return {(r.length, r.header["anchor"]): {*(r.windows["start"] + r.windows["targets"])} for r in results}


def test_a_longer_length_has_targets_of_its_own_and_leaves_the_others(score):
    """All lengths of one command are scored on the targets of its longest, and nothing else is scored again."""
    score(FEW, 32, 64)
    before = stored(score.trained["nope"])
    assert set(before) == {(32, 64), (64, 64)} and before[32, 64] == before[64, 64]
    assert "nope/seed=0: scored fixed 32, 128\n" in score(["nope"], 32, 128)
    after = stored(score.trained["nope"])
    assert set(after) == {(32, 64), (64, 64), (32, 128), (128, 128)}
    assert after[32, 128] == after[128, 128] != after[32, 64] == before[32, 64]
    assert set(stored(score.trained["qk_rope"])) == {(32, 64), (64, 64)}, "another run's lengths change nothing"
    assert "nope/seed=0: already there\n" in score(["nope"], 128, 32)
    assert "qk_rope/seed=0: scored fixed 128; fixed · rescale=yarn 128\n" in score(
        ["qk_rope"], 128, under=("rescale=yarn",)
    )


def test_the_table_marks_a_row_of_other_windows(score):
    assert "*" not in score(FEW, 64)
    run = score.trained["nope"]
    result = next(candidate for candidate in run.results()[0] if candidate.protocol == "fixed")
    run.store(result.key, result.windows.assign(start=result.windows["start"] + 1), result.header)
    text = score(FEW, 64)
    assert re.search(r"\nqk_rope +\d+\.\d+ *\nnope +\d+\.\d+\*\n\*: other windows", text)
