"""A task from the command line: trained, resumed, evaluated, packed; and one of one's own is one file."""

import json
import re
from pathlib import Path

import pytest

from posbench import results
from posbench.catalogue import own_files
from posbench.runs import Run

SMALL = ["data.lengths=[2,4]", "data.longest=8", "evaluation.problems=16", "model.d_model=16", "model.num_heads=2"]
SMALL += ["train.batch_size=8", "train.steps=6", "train.validation_tokens=80", "train.log_every=1", "tracking=none"]
SMALL += ["train.checkpoint_every=2", "train.device=cpu", "hydra/launcher=basic"]
GUIDE = Path(__file__).parents[2] / "docs" / "tasks.md"
[SUMS] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_a_task_of_ones_own_is_one_file(posbench, monkeypatch):
    monkeypatch.setattr(own_files, "_trusted", set())
    Path("my_task.py").write_text(SUMS)
    words = ["data=my_task.py:Sums", "data.base=8", "scheme=learned", *SMALL]
    assert posbench("train", *words).status == 0
    run = Run(Path("runs/sums/learned/seed=0"))
    assert (run.path / "my_task.py").read_text() == SUMS and list(run.manifest.scheme_files) == ["my_task.py"]
    assert run.config.data.to_mapping()["base"] == 8 and run.config.train.context_length == 8
    result = posbench("eval", "sums")
    assert "sums: accuracy by length in items (accuracy, 64 to 128 answers)" in result.out
    assert "already there" in posbench("eval", "sums").out
    Path("my_task.py").write_text(SUMS.replace("% self.base", "% 7"))
    assert re.search(
        r"my_task\.py has changed since .* add --scheme-changed", posbench("eval", "sums", "-l", "7").refusal
    )
    assert "sums: accuracy" in posbench("eval", "sums", "--length", "7", "--scheme-changed").out
    assert "did you mean 'Sums'" in posbench("train", "data=my_task.py:Summs", *SMALL).refusal
    assert "did you mean 'base'" in posbench("train", "data=my_task.py:Sums", "data.bass=3", *SMALL).refusal


@pytest.mark.slow
def test_a_sweep_over_tasks_and_schemes_is_evaluated_and_packed(posbench):
    result = posbench("train", "-m", "data=copy,reverse", "scheme=nope,alibi", "data.letters=5", *SMALL)
    assert result.status == 0 and "loss, nats/answer" in result.out
    assert posbench("eval", "copy", "reverse", "--length", "6").status == 0
    rows_before = results("runs/copy", "runs/reverse", tidy=True)
    scored = rows_before[rows_before["protocol"] == "accuracy"]
    assert set(scored["length"]) == {4, 6} and set(scored["scheme"]) == {"nope", "alibi"}
    assert set(scored["data.task"]) == {"copy", "reverse"}
    assert posbench("pack", "copy").status == 0
    assert (
        results("runs/copy.zip", tidy=True)
        .drop(columns="experiment")
        .equals(results("runs/copy", tidy=True).drop(columns="experiment"))
    )


@pytest.mark.slow
def test_an_option_of_the_task_holds_for_one_evaluation_and_the_report_shows_it_beside_the_others(
    posbench,
):
    words = ["data=flip_flop", "scheme=nope,alibi", "seed=0,1", *SMALL]
    assert posbench("train", "-m", *words, "train.lr=1e-2", "train.steps=40", "train.checkpoint_every=null").status == 0
    assert posbench("eval", "flip_flop").status == 0
    assert posbench("eval", "flip_flop", "--under", "ignored=0,1").status == 0
    assert "already there" in posbench("eval", "flip_flop", "--under", "ignored=0").out
    rows = results("runs/flip_flop", tidy=True)
    answers = (
        rows[(rows["metric"] == "accuracy") & (rows["length"] == 8)].groupby("under", observed=True)["count"].mean()
    )
    assert answers["ignored=1"] == 1 and answers[""] < 3 < answers["ignored=0"], (
        "reads: of nothing but the last to a half"
    )
    assert posbench("report", "flip_flop").status == 0
    page = Path("runs/flip_flop/report/report.md").read_text()
    assert re.search(r"^alibi \| [0-2]/2 \|", page, re.MULTILINE) and "chance is 0.5" in page


@pytest.mark.slow
def test_commands_that_read_text_take_a_task_or_say_why_not(posbench):
    words = ["data=copy", "scheme=qk_rope", *SMALL]
    assert posbench("train", *words).status == 0
    assert "token cache" not in posbench("plan", *words).out
    assert posbench("bench", "--schemes", "nope", "--rounds", "1", "--steps", "1", *words[:1], *SMALL).status == 0
    assert "cannot be scored on text" in posbench("eval", "copy", "--data", "stdlib").refusal
    assert "nothing to prepare" in posbench("prepare", "data=copy").refusal
    assert posbench("export", "copy/qk_rope/seed=0", "exported").status == 0
    assert json.loads(Path("exported/config.json").read_text())["vocab_size"] == 17
