"""docs/optimizers.md: each row of its table, and the difference of gaps, follow from the packs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from posbench.analysis.statistics import interaction
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
SCHEMES = ("alibi", "qk_rope")


@cache
def scored(optimizer: str) -> pd.DataFrame:
    """Return the runs of ALiBi and QK at 6.1 million tokens: rate, scheme, seed, loss, onset in millions, order."""
    folder = {"adamw": "headline-6.14M", "muon": "headline_muon-tune"}[optimizer]
    rows = []
    for run in find_runs(REFERENCE / folder):
        if run.config.scheme.name not in SCHEMES:
            continue
        onset = PROTOCOLS["order"].of_training(run.logged)["onset_tokens"]
        order = [line["order_beyond_32"] for line in run.logged if line["kind"] == "order"]
        row = {"rate": run.config.scheme_lr, "scheme": run.config.scheme.name, "seed": run.config.seed}
        rows.append(row | {"loss": run.manifest.loss, "onset": onset / 1e6, "order": order[-1]})
    return pd.DataFrame(rows)


def table_of(optimizer: str, values: str) -> pd.DataFrame:
    """Return one column of `scored` as a table: a row per rate and seed, a column per scheme."""
    return scored(optimizer).pivot_table(index=["rate", "seed"], columns="scheme", values=values).dropna()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_pair_of_runs_has_its_row(optimizer: str) -> None:
    losses, onsets, orders = (table_of(optimizer, values) for values in ("loss", "onset", "order"))
    for rate, seed in losses.index:
        at = (rate, seed)
        cells = [*losses.loc[at, list(SCHEMES)].map("{:.3f}".format)]
        cells.append(f"{losses.loc[at, 'qk_rope'] - losses.loc[at, 'alibi']:+.3f}")
        cells += ["never" if onset == float("inf") else f"{onset:.1f}" for onset in onsets.loc[at, list(SCHEMES)]]
        cells += [f"{order:.2f}" for order in orders.loc[at, list(SCHEMES)]]
        assert f"| `{optimizer}` | {rate:g} | {seed} | {' | '.join(cells)} |" in PAGE, cells


def test_the_page_has_no_other_rows() -> None:
    rows = sum(line.startswith(("| `adamw` | 0", "| `muon` | 0")) for line in PAGE.splitlines())
    assert rows == len(table_of("adamw", "loss")) + len(table_of("muon", "loss"))


def test_the_difference_of_gaps_at_the_common_rate() -> None:
    first, second = (table_of(optimizer, "loss").loc[0.002] for optimizer in ("adamw", "muon"))
    [row] = interaction(first, second, [SCHEMES], fewest=2).to_dict("records")
    half = (row["difference_high"] - row["difference_low"]) / 2
    sentence = f"{row['difference']:+.2f} ±{half:.2f} nats over {row['seeds']} seeds"
    assert sentence in PAGE, sentence
