"""Stored losses equal plain torch, token by token, for every protocol."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

import posbench
from posbench.config import EvaluationConfig
from posbench.data import prepare
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.evaluate import score_split
from posbench.evaluation.protocols import PROTOCOLS, EvalProtocol
from posbench.evaluation.request import Request
from posbench.model.decoder import build_model
from posbench.reporting.section import Plot, Section
from posbench.runs import Run
from posbench.training import train
from tests.conftest import write_documents
from tests.refusals import refuses

SETTINGS = EvaluationConfig(targets=16, windows=10, max_tokens=2000, batch_tokens=400)


@pytest.fixture
def corpus(config):
    return prepare(config())


@pytest.fixture
def model(config, corpus):
    return build_model(config("scheme=qk_rope", "model.init_std=0.2"), corpus.vocab_size).eval()


def _nll(model, tokens):
    """Return the loss of each token after the first, by plain torch in float64."""
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.double()(row[:, :-1])
    model.float()
    return torch.nn.functional.cross_entropy(logits[0], row[0, 1:], reduction="none").numpy()


@pytest.mark.parametrize("protocol", ["fixed", "nonoverlapping"])
def test_stored_windows_recompute_by_plain_torch(protocol, model, corpus):
    rows, summary = score_split(model, corpus, "test", protocol, 48, SETTINGS, anchor=96)
    tokens = np.array(corpus.test.tokens)
    scored = {"fixed": 16, "nonoverlapping": 48}[protocol]
    total = count = 0
    starts = sorted({int(s) for s in rows["start"]})
    for begin in [s for s in starts if protocol != "nonoverlapping" or (s - 1) % 48 == 0]:
        window = tokens[begin - 1 - 48 + scored : begin + scored]  # 48 read, `scored` of the targets at its end
        targets = window[1:][-scored:] != corpus.bos_id
        losses = _nll(model, window)[-scored:][targets]
        mine = rows[(rows["start"] >= begin) & (rows["start"] < begin + scored)]
        assert mine["nll"].sum() == pytest.approx(losses.sum(), abs=1e-3)
        total, count = total + losses.sum(), count + len(losses)
    assert summary["nll_mean"] == pytest.approx(total / count, abs=1e-5)
    assert summary["targets_total"] == count == rows["targets"].sum()
    assert summary["bits_per_byte"] == pytest.approx(rows["nll"].sum() / math.log(2) / rows["bytes"].sum())
    assert rows["bytes"].sum() == count  # one byte a token here, none for the beginning of a document


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name not in ("accuracy", "mechanism")])
def test_the_batch_size_changes_nothing_beyond_a_millionth(protocol, model, corpus):
    from dataclasses import replace

    single, _ = score_split(model, corpus, "test", protocol, 48, replace(SETTINGS, batch_tokens=48))
    many, _ = score_split(model, corpus, "test", protocol, 48, replace(SETTINGS, batch_tokens=48 * 32))
    nll = [column for column in single if column.endswith("nll")]
    per_target = (single[nll].sub(many[nll]).abs()).div(single["targets"], axis=0)
    assert float(per_target.to_numpy().max()) < 1e-6
    pd.testing.assert_frame_equal(single.drop(columns=nll), many.drop(columns=nll))


def _evaluate(run, *lengths, protocol="fixed", **options):
    request = Request(lengths, (protocol,), device="cpu", dtype="float32", **options)
    return [result for _, result in evaluate_runs([run], request, Console(quiet=True))]


def test_other_text_or_no_finished_run_is_refused(config, tmp_path):
    run = train(config("train.steps=1"))
    text = (run.path / "config.yaml").read_text()
    other_text = write_documents(tmp_path / "other", words=290)
    (run.path / "config.yaml").write_text(text.replace(run.config.data.path, f"{other_text}/*.txt"))
    refuses("another text", _evaluate, Run(run.path), 64)
    run.update_manifest(status="stopped")
    refuses("none of these runs is finished", _evaluate, Run(run.path), 64)


def test_lengths_alone_are_scored_with_the_training_length_and_nothing_else(config):
    run = train(config("train.steps=1", "evaluation.targets=16", "evaluation.protocols=[fixed,order,nonoverlapping]"))
    evaluate_runs([run], Request(lengths=(64,)), Console(quiet=True))
    stored = [(key.protocol, key.length) for key in run.evaluated()]
    assert stored == [("fixed", 32), ("fixed", 64), ("nonoverlapping", 32), ("nonoverlapping", 64), ("validation", 32)]


@pytest.mark.parametrize(("test_words", "says"), [(0, "has no test text"), (1, "ask for shorter lengths")])
def test_a_text_without_a_length_to_score_is_refused(config, tmp_path, test_words, says):
    paths = [f"data.{split}_path={write_documents(tmp_path / split)}/*.txt" for split in ("train", "validation")]
    if test_words:
        paths.append(f"data.test_path={write_documents(tmp_path / 'test', words=test_words)}/*.txt")
    run = train(config("train.steps=1", "data.path=null", "evaluation.lengths=[]", *paths))
    refuses(says, _evaluate, run)


class Halves(EvalProtocol):
    """A protocol of a test: a made-up loss for each half of each document."""

    name = "halves"
    caption = "Loss by half of the document."

    def score(self, *_):
        rows = pd.DataFrame(
            {"document": [0, 0, 1, 1], "bucket_start": [0, 1, 0, 1], "targets": 4, "nll": [8.0, 4.0, 12.0, 4.0]}
        )
        rows["bucket_end"] = rows["bucket_start"] + 1
        return rows, {"nll_mean": 1.75, "targets_total": 16, "windows": 2, "documents": 2}

    def tokens_read(self, settings, length, anchor):
        return 2 * length

    def sections(self, comparison):
        points = comparison.at("halves").assign(x=[1, 2], y=[2.5, 1.0])
        return [Section("By half", plots=[Plot("halves", "lines", "Loss by half.", points)], note="Two halves.")]


def test_a_protocol_is_one_class(config, monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "halves", Halves())
    run = train(config("scheme=nope", "train.steps=1", "evaluation.protocols=[halves]"))
    evaluate_runs([run], Request(lengths=(64,)), Console(quiet=True))
    rows = posbench.results(run.path, tidy=True)
    sums = rows[rows["protocol"] == "halves"].groupby("first")[["value", "count"]].sum()
    assert (sums["value"] / sums["count"]).to_dict() == {0: 2.5, 1: 1.0}
    posbench.report(run.path, output=run.path / "report", console=Console(quiet=True))
    text = (run.path / "report" / "report.md").read_text()
    assert "## By half\n\n![Loss by half. 1 position scheme," in text and "(halves.svg)\n\nTwo halves." in text


@pytest.mark.parametrize("protocol", ["fixed", "nonoverlapping"])
def test_default_lengths_beyond_the_text_are_left_out(config, protocol, capsys):
    run = train(config("train.steps=1", "evaluation.targets=16", "evaluation.lengths=[64,8192]"))
    results = evaluate_runs([run], Request(protocols=(protocol,)), Console(width=200))
    assert [result.length for _, result in results] == [64]
    assert f"{protocol}: without 8192 of the default lengths: length 8192 is " in capsys.readouterr().out
