"""What a person reads at the end of a sweep."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace

from rich.console import Console

from posbench.config import ConfigError
from posbench.sweep import Outcome
from posbench.sweep_table import show_outcomes


def shown(outcomes: list[Outcome]) -> list[str]:
    file = io.StringIO()
    show_outcomes([pickle.loads(pickle.dumps(outcome)) for outcome in outcomes], Console(file=file, width=80))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_one_table_of_what_was_trained_what_was_there_and_what_failed() -> None:
    lines = shown(
        [
            Outcome("demo/nope/seed=0", result=SimpleNamespace(loss=3.25), was_finished=True),
            Outcome("demo/nope/seed=1", result=SimpleNamespace(loss=3.125)),
            Outcome("demo/qk_rope/seed=0", ConfigError("no room")),
        ]
    )
    assert [line.split() for line in lines] == [
        ["loss,", "nats/token", "seed", "0", "seed", "1"],
        ["nope", "3.2500*", "3.1250"],
        ["qk_rope", "failed"],
        ["3", "runs:", "1", "trained,", "1", "finished", "before", "(*),", "1", "failed"],
    ]


def test_runs_of_several_experiments_are_told_apart_and_one_run_has_no_table() -> None:
    losses = [Outcome(f"{name}/nope/seed=0", result=SimpleNamespace(loss=2.5)) for name in ("a", "b")]
    assert [line.split()[0] for line in shown(losses)] == ["loss,", "a/nope", "b/nope", "2"]
    assert shown(losses[:1]) == []
