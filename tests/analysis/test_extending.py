"""docs/extending.md: each figure of its tables follows from the packs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.analysis.statistics import interval
from posbench.runs import Run, find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BEGAN = 4800  # the step of the base's checkpoint
LENGTHS = (256, 1024, 2048, 4096)  # most tokens of context
# Experiment and scheme -> the row's name on the page.
ROWS = {
    ("extend_base", "qk_rope"): "QK, the base, to its end at 256",
    ("extend-short", "qk_rope_short"): "control: 256, the arms' text",
    ("extend-arms", "qk_rope_plain"): "QK, nothing changed",
    ("extend-arms", "qk_rope_pi"): "PI",
    ("extend-arms", "qk_rope_ntk"): "NTK",
    ("extend-arms", "qk_rope_base_x4"): "base 40,000",
    ("extend-arms", "qk_rope_yarn"): "YaRN",
    ("extend-arms", "qk_rope_dropped"): "positions dropped",
    ("extend-long", "qk_rope"): "control: 1,024 from the first step",
    ("extend_base", "alibi"): "ALiBi, the base, to its end at 256",
    ("extend-arms", "alibi_plain"): "ALiBi, nothing changed",
}


@cache
def runs_of(experiment: str) -> dict[tuple[str, int], Run]:
    """Return {(scheme, seed): run} of a pack; {} if there is no such pack yet."""
    place = REFERENCE / f"{experiment}.zip"
    runs = find_runs(place) if place.exists() else []
    return {(run.manifest.scheme, run.manifest.seed): run for run in runs}


@cache
def losses(experiment: str, scheme: str, length: int, under: tuple[str, ...] = ()) -> pd.Series:
    """Return each seed's loss on the test text with up to `length` tokens of context, nats per token."""
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        for result in run.results()[0] if name == scheme else ():
            key = result.key
            if key.protocol == "fixed" and key.length == length and tuple(key.under) == under:
                by_seed[seed] = result.windows["nll"].sum() / result.windows["targets"].sum()
    return pd.Series(by_seed, dtype=float).sort_index()


def copyable(experiment: str, scheme: str) -> pd.Series:
    """Return what order more than 32 tokens back is worth on copyable targets to each seed, nats per token."""
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        if name == scheme:
            [last] = [row for row in run.logged if row["kind"] == "order"][-1:]
            by_seed[seed] = last["copyable_order_beyond_32"]
    return pd.Series(by_seed, dtype=float).sort_index()


def tokens_until_better(experiment: str, scheme: str) -> pd.Series:
    """Return after how many thousand tokens each seed's validation loss is below that of the checkpoint it began at."""
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        rows = [row for row in run.logged if row["kind"] == "validation"]
        start = next((row["loss"] for row in rows if row["step"] == BEGAN), np.nan)
        if name == scheme:
            below = [row["step"] - BEGAN for row in rows if row["step"] > BEGAN and row["loss"] < start]
            by_seed[seed] = 1.024 * below[0] if below else np.inf
    return pd.Series(by_seed, dtype=float).sort_index()


def plus_minus(values: pd.Series, digits: int = 3) -> str:
    mean, low, high = interval(values.to_numpy(float))
    half = f" ±{(high - low) / 2:.{digits}f}" if len(values) > 2 else ""
    return f"{mean:.{digits}f}{half}"


def table() -> list[str]:
    lines = [
        "| | seeds | ≤ 256 | ≤ 1,024 | ≤ 2,048 | ≤ 4,096 | copyable order | better after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (experiment, scheme), name in ROWS.items():
        at = [losses(experiment, scheme, length) for length in LENGTHS]
        cells = [name, str(len(at[0])), *map(plus_minus, at), plus_minus(copyable(experiment, scheme), 2)]
        after = tokens_until_better(experiment, scheme) if "arms" in experiment else pd.Series(dtype=float)
        cells.append(f"{after.min():.0f}k to {after.max():.0f}k" if len(after) else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_tables_follow_from_the_packs() -> None:
    for line in table():
        assert line in PAGE, f"the packs say:\n{line}"


if __name__ == "__main__":
    print("\n".join(table()))
