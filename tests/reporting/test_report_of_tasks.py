"""The report of tasks: who has learnt, medians of those, and the length at which a task is lost."""

import math
import re

import pandas as pd
import pytest

from posbench.analysis.agreement import is_of_tasks
from posbench.analysis.tasks import compare_tasks
from posbench.reporting.figures import draw_all, encode, inline_svg
from posbench.reporting.overview import limits_table
from posbench.reporting.protocols import accuracy
from posbench.reporting.text import as_text
from tests.refusals import refuses

LENGTHS = (8, 16, 20, 32, 64)
COPY = {
    "alibi": [(1, 1, 1, 0.99, 0.9), (1, 1, 1, 0.52, 0.3), (1, 1, 1, 0.94, 0.86)],
    "qk_rope": [(1, 0.97, 0.5, 0.2, 0.1), (1, 0.96, 0.4, 0.1, 0.1), (0.9, 0.5, 0.4, 0.1, 0.1)],
    "nope": [(0.9, 0.8, 0.3, 0.2, 0.1), (0.9, 0.94, 0.3, 0.2, 0.1), (0.9, 0.7, 0.3, 0.2, 0.1)],
}


def frames(
    of_schemes,
    name="copy",
    chance=1 / 16,
    eval_options="",
):
    """Return the summary and tidy rows of runs with these accuracies by seed and length: 50 problems of 4 answers."""
    runs, rows = [], []
    for scheme, of_seeds in of_schemes.items():
        for seed, accuracies in enumerate(of_seeds):
            run = {"experiment": f"tasks-{name}", "scheme": scheme, "seed": seed, "status": "finished", "loss": 1.0}
            prints = {f"fingerprint.{field}": f"{name} {field}" for field in ("data", "tokenizer", "config", "batches")}
            run |= prints | {"fingerprint.initial_weights": "{}", "diverged": None, "path": f"{name}/{scheme}/{seed}"}
            run |= {"data.source": "task", "data.name": name, "data.lengths": "[2, 16]", "chance": chance, "goal": 0.95}
            runs.append(
                run | {"parameters": 1e5, "tokens": 2000, "num_steps": 1000, "train.lr": 1e-3, "searched": False}
            )
            for length, share in zip(LENGTHS, accuracies, strict=True):
                key = {
                    "run": len(runs) - 1,
                    "protocol": "accuracy",
                    "at_step": 0,
                    "windows_digest": f"{length}",
                    "length": length,
                    "text": "",
                    "anchor": 0,
                    "first": 0,
                    "last": 0,
                }
                key |= {"scheme": scheme, "seed": seed, "under": eval_options}
                for document in range(50):
                    rows.append(key | {"document": document, "metric": "accuracy", "value": 4 * share, "count": 4.0})
                    rows.append(key | {"document": document, "metric": "exact", "value": share**4, "count": 1.0})
    return pd.DataFrame(runs), pd.DataFrame(rows)


def compared(runs, rows):
    [comparison] = compare_tasks(runs, rows)
    return comparison


@pytest.fixture
def copying(monkeypatch):
    monkeypatch.setattr(
        "posbench.analysis.tasks.curves", lambda *_: pd.DataFrame({"step": [0, 100, 200], "accuracy": [0, 0.5, 1]})
    )
    return compared(*frames(COPY))


def test_a_seed_has_learnt_that_reaches_the_goal_at_the_longest_trained_length(copying):
    assert copying.learners.to_dict("index") == {
        "alibi": {"learnt": 3, "seeds": 3},
        "qk_rope": {"learnt": 2, "seeds": 3},
        "nope": {"learnt": 0, "seeds": 3},
    }


def test_a_figure_is_the_median_over_the_seeds_that_learnt(copying):
    assert copying.medians.loc["alibi"].to_list() == pytest.approx([1, 1, 1, 0.94, 0.86])
    assert copying.medians.loc["qk_rope"].to_list() == pytest.approx([1, 0.965, 0.45, 0.15, 0.1])
    assert "nope" not in copying.medians.index


def test_the_limit_is_where_the_way_from_chance_to_1_falls_below_nine_tenths(copying):
    goal = 1 / 16 + 0.9 * 15 / 16
    assert copying.limits == {
        "alibi": pytest.approx(32 + 32 * (0.94 - goal) / (0.94 - 0.86)),
        "qk_rope": pytest.approx(16 + 4 * (0.965 - goal) / (0.965 - 0.45)),
    }
    copy_scores = compared(*frames({"alibi": [(1, 1, 1, 1, 0.95)]}, chance=0.5))
    assert copy_scores.limits == {"alibi": math.inf}, "0.95 is nine tenths of the way from a half to 1"
    assert copy_scores.limit_text("alibi") == "≥64"


def test_a_scheme_that_was_tested_less_far_does_not_keep_a_task_furthest(monkeypatch):
    monkeypatch.setattr(
        "posbench.analysis.tasks.curves", lambda *_: pd.DataFrame({"step": [0, 100, 200], "accuracy": [0, 0.5, 1]})
    )
    runs, rows = frames({"fox": [(1, 1, 1, 1, 1)], "alibi": [(1, 1, 1, 0.97, 0.8)]})
    scored = compared(runs, rows[(rows["scheme"] == "alibi") | (rows["length"] <= 16)])
    assert scored.schemes == [*scored.furthest, "fox"] == ["alibi", "fox"] and not scored.is_kept
    assert scored.limit_text("fox") == "≥16"


def test_what_no_seed_learnt_comes_last_and_is_not_ranked(copying):
    assert copying.schemes == ["alibi", "qk_rope", "nope"]
    table = as_text(accuracy.task_table(copying)).set_index("scheme")
    assert table.loc["nope"].to_list() == ["0/3", "–", "–", "–", "–", "–", "–", "–"]
    assert table.loc["alibi"].to_list() == ["3/3", "45", "190", "1.00", "1.00", "1.00", "0.94", "0.86"]
    assert as_text(limits_table([copying]))["copy"].to_list() == ["45", "16 (2/3)", "– (0/3)"]


def test_steps_until_learnt_are_of_the_seeds_that_learnt(copying):
    assert copying.steps["scheme"].to_list() == ["alibi"] * 3 + ["qk_rope"] * 2
    assert copying.steps["steps"].to_list() == pytest.approx([190] * 5)  # the first with a validation accuracy of 0.95


def test_options_of_an_evaluation_stand_beside_and_not_among_the_scores():
    runs, rows = frames({"alibi": [(1, 1, 1, 1, 1)]})
    rescored = rows.assign(under="depth=0.5", value=rows["value"] / 2)
    scored = compared(runs, pd.concat([rows, rescored]))
    assert scored.medians.loc["alibi"].to_list() == [1.0] * 5
    assert set(scored.scores.loc[scored.scores["under"] != "", "accuracy"]) == {0.5}
    figures = draw_all(runs, accuracy.sections(scored))
    assert set(figures) == {"task-copy", "options-copy"}
    page = inline_svg(encode(figures["task-copy"], "svg").decode(), "")
    assert "fill-opacity: 0.6" in page and not re.search("#f[\\da-f]{5}", page), "cells let a dark page through"
    marked = compared(runs, pd.concat([rows, rows.assign(under="weights=bfloat16")]))
    assert set(draw_all(runs, accuracy.sections(marked))) == {"task-copy"}


def test_a_run_that_was_not_evaluated_is_named_and_counts_for_nothing():
    runs, rows = frames({"nope": [(1, 1, 1, 1, 1)], "alibi": [(1, 1, 1, 1, 1), (0, 0, 0, 0, 0)]})
    runs.loc[0, ["chance", "goal"]] = math.nan
    scored = compared(runs, rows[rows["run"] > 0])
    assert scored.learners.to_dict("index") == {"alibi": {"learnt": 1, "seeds": 2}}
    assert scored.notes == ["copy/nope/0: not evaluated at 16 items, the longest trained length"]


def test_a_run_that_was_tested_beyond_its_trained_lengths_alone_has_not_failed_to_learn():
    runs, rows = frames({"nope": [(1, 1, 1, 1, 1)], "alibi": [(1, 1, 1, 1, 1)]})
    scored = compared(runs, rows[(rows["run"] == 1) | (rows["length"] > 16)])
    assert scored.schemes == ["alibi"] and scored.notes[0].startswith("copy/nope/0: not evaluated at 16 items")
    refuses("no run of a task has been evaluated here at its trained length", compared, runs, rows[rows["length"] > 16])
    rows.loc[(rows["run"] == 1) & (rows["length"] == 16), "windows_digest"] = "others"
    refuses("copy were scored on different problems at 16 items", compared, runs, rows)


def test_runs_that_were_given_other_problems_are_left_out_and_named():
    runs, rows = frames({"alibi": [(1, 1, 1, 1, 1)], "nope": [(1, 1, 1, 1, 1)]})
    rows.loc[(rows["scheme"] == "nope") & (rows["length"] == 64), "windows_digest"] = "others"
    scored = compared(runs, rows)
    assert scored.lengths == [8, 16, 20, 32]
    assert scored.notes == ["copy at 64: left out, runs had different problems"]


def test_a_run_that_cannot_be_read_does_not_make_a_report_of_text_and_tasks():
    runs, _ = frames(COPY)
    unreadable = pd.DataFrame([{"scheme": "alibi", "seed": 3, "status": "unreadable", "loss": math.nan}])
    assert is_of_tasks(pd.concat([runs, unreadable], ignore_index=True))
    refuses(
        "report each kind separately",
        is_of_tasks,
        pd.concat([runs, unreadable.assign(status="finished")], ignore_index=True),
    )
