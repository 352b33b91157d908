"""Text that a run was not trained on: its losses are stored separately from the losses on the run's own text."""

import io
import math
import random
import shutil

import pytest
import torch
from rich.console import Console

import posbench
from posbench.composition.compose import compose
from posbench.data.text import overlap
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.request import Request
from posbench.evaluation.texts import text_named
from posbench.runs import Run, find_runs
from posbench.runs.finding import pack_experiment
from posbench.runs.results import ResultKey
from posbench.training import train
from tests.conftest import small_run
from tests.refusals import refuses

T, BOS = 32, 256
LETTERS = 80  # of each document of the notes, bytes


@pytest.fixture(scope="module")
def trained(documents, cache, tmp_path_factory):
    """Return a finished run of one step."""
    words = small_run(documents, cache, tmp_path_factory.mktemp("trained"))
    run = train(compose([*words, "scheme=nope", "train.steps=1", "evaluation.targets=8", "evaluation.windows=4"]))
    return run.path.parents[2]


@pytest.fixture
def run(trained, tmp_path):
    """Return a copy of the finished run."""
    shutil.copytree(trained, tmp_path / "runs")
    return Run(tmp_path / "runs" / "demo" / "nope" / "seed=0")


@pytest.fixture
def notes(tmp_path):
    """Return three documents of digits, which the run has never seen: too few for three splits."""
    folder = tmp_path / "notes"
    folder.mkdir()
    write(folder, seed=1)
    return folder


def write(folder, seed):
    chosen = random.Random(seed)
    texts = ["".join(chosen.choices("0123456789 ", k=LETTERS)) for _ in range(3)]
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text(text)
    return texts


def ask(run, folder, *words, name="notes", lengths=()):
    return results_and_output(run, folder, *words, name=name, lengths=lengths)[0]


def results_and_output(run, folder, *words, name="notes", lengths=()):
    """Evaluate the run on the text, and return the results and the printed output."""
    console = Console(file=io.StringIO(), width=200)
    data = text_named(["files", f"data.path={folder}", f"data.name={name}", *words])
    evaluations = evaluate_runs([run], Request(data=data, lengths=lengths, device="cpu", dtype="float32"), console)
    return [result for _, result in evaluations], console.file.getvalue()


def test_it_is_the_loss_of_the_model_on_the_whole_text_and_leaves_the_runs_own_alone(run, notes):
    texts = write(notes, seed=1)
    results_before = run.results()[0]
    [result] = ask(run, notes)
    assert result.key == ResultKey("validation", T, ("data=notes",)) and result.key.data == "notes"
    tokens = torch.tensor([token for text in texts for token in (BOS, *text.encode())])
    windows = tokens[: (len(tokens) - 1) // T * T + 1].unfold(0, T + 1, T)
    targets = windows[:, 1:].flatten()
    log_p = run.load_model()(windows[:, :-1]).log_softmax(-1).flatten(0, 1)
    expected = -log_p[torch.arange(len(targets)), targets][targets != BOS].mean()
    assert result.loss == pytest.approx(float(expected.detach()), abs=1e-5)
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2)), "a token is a byte"
    assert (result.header["split"], result.header["documents"], result.header["overlap"]) == ("whole", 3, 0.0)
    assert (run.path / "eval/validation/32@data=notes.parquet").is_file()
    results_after = run.results()[0]
    assert [stored.key for stored in results_after] == [results_before[0].key, result.key] and results_after[
        0
    ].loss == results_before[0].loss
    [row] = posbench.results(run.path).to_dict("records")
    assert row["loss"] == run.manifest.loss and row["damaged"] is None
    rows = posbench.results(run.path, tidy=True)
    sums = rows[(rows["text"] == "notes") & (rows["metric"] == "loss")][["value", "count"]].sum()
    assert sums["value"] / sums["count"] == pytest.approx(result.loss)


def test_lengths_are_scored_by_the_runs_protocols_and_all_of_it_packs(run, notes, tmp_path):
    results, text = results_and_output(run, notes, lengths=(16, 64))
    eval_options = ("data=notes",)
    expected = [
        ResultKey("validation", T, eval_options),
        ResultKey("fixed", 16, eval_options, 64),
        ResultKey("fixed", 64, eval_options, 64),
    ]
    assert [result.key for result in results] == expected
    assert "demo on notes: perplexity by length in tokens (fixed" in text and "\nnope " in text
    frame = posbench.evaluate(run, lengths=[16], data=["files", f"data.path={notes}", "data.name=notes"], quiet=True)
    assert frame[["protocol", "under", "data"]].to_numpy().tolist() == [
        ["validation", "", "notes"],
        ["fixed", "", "notes"],
    ]
    pack_experiment(run.path.parents[1], tmp_path / "packed.zip", print)
    [packed] = find_runs(tmp_path / "packed.zip")
    assert [(r.key, r.loss) for r in packed.results()[0]] == [(r.key, r.loss) for r in run.results()[0]]


@pytest.mark.slow
def test_it_is_scored_once_until_the_text_changes_and_another_name_keeps_both(run, notes):
    [first] = ask(run, notes)
    assert "already there" in results_and_output(run, notes)[1]
    write(notes, seed=2)
    [diary] = ask(run, notes, name="diary")
    [second] = ask(run, notes)
    assert second.loss == diary.loss != first.loss
    assert "another text" not in results_and_output(run, notes)[1]
    names = [result.key.data for result in run.results()[0]]
    assert names == [None, "diary", "notes"] and run.results()[1] == []


def test_text_that_was_trained_on_is_warned_of_by_a_measure_that_is_kept(run, notes, documents, monkeypatch):
    for n in range(4):
        shutil.copy(documents / f"{n}.txt", notes)
    [result], text = results_and_output(run, notes)
    assert result.header["overlap"] == 0.25, "one of the four"
    assert "of its whole text also occurs in the text of data=files that the runs were trained on" in text
    monkeypatch.setattr(overlap, "measure_overlap", None)
    assert "also occurs in the text" in results_and_output(run, notes)[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.path=a"], "--data names 0 texts: give one of files, "),
        (["induction"], "--data induction is a task: give a text"),
        (["pg19", "stdlib"], "--data names 2 texts"),
        (["stdlib", "data.name=a b"], "data.name='a b' cannot name a folder"),
    ],
)
def test_words_that_name_no_text_are_refused(words, says):
    refuses(says, lambda: Request(data=text_named(words)))


def test_a_choice_of_ones_own_is_a_text_too(tmp_path, notes):
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "diary.yaml").write_text(f"name: diary\nsource: files\npath: {notes}\n")
    data = text_named(["diary", "data.text_column=body", f"--config-dir={tmp_path}/conf"])
    assert data is not None and (data.name, data.path, data.text_column) == ("diary", str(notes), "body")
    refuses("--data names 0 texts", text_named, [f"--config-dir={tmp_path}/conf"])
