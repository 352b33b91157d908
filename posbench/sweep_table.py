"""What came of a sweep: one table of the runs that were trained, that were finished before, and that failed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from posbench.sweep import Outcome

_MOST_SEEDS = 8  # columns


def show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """One row a scheme and one column a seed, where there is more than one run; results are the runs' manifests."""
    named = [outcome for outcome in outcomes if outcome.name.count("/") == 2]
    if len(named) < 2:
        return
    cells: dict[str, dict[str, str]] = {}
    for outcome in named:
        row, _, seed = outcome.name.rpartition("/seed=")
        cells.setdefault(row, {})[seed] = _cell(outcome)
    seeds = list(dict.fromkeys(seed for of_row in cells.values() for seed in of_row))
    if len({row.partition("/")[0] for row in cells}) == 1:
        cells = {row.partition("/")[2]: of_row for row, of_row in cells.items()}
    if len(seeds) <= _MOST_SEEDS:
        table = Table(box=None, pad_edge=False)
        table.add_column("loss, nats/token", no_wrap=True)
        for seed in seeds:
            table.add_column(f"seed {seed}", justify="right", no_wrap=True)
        for row, of_row in cells.items():
            table.add_row(row, *(of_row.get(seed, "") for seed in seeds))
        console.print(table)
    console.out(_summary(named))


def _cell(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "failed"
    return f"{outcome.result.loss:.4f}{'*' * outcome.was_finished}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    """`33 runs: 20 trained, 12 finished before (*), 1 failed`."""
    failed = sum(outcome.error is not None for outcome in outcomes)
    before = sum(outcome.was_finished for outcome in outcomes)
    counts = {"trained": len(outcomes) - failed - before, "finished before (*)": before, "failed": failed}
    return f"{len(outcomes)} runs: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}"
