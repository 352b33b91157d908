"""What a scheme cost, and the gaps where the cheapest scheme's training ended."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from fabricate import run_of
from shown import on_terminal

from posbench.reporting.costs import costs, equal_compute
from posbench.reporting.findings import Findings, find
from posbench.reporting.joining import Joined
from posbench.reporting.sections.costs import cost_table
from posbench.reporting.spreadsheet import frames
from posbench.size import Cache

TOKENS = 1000.0


def joined(flops: dict[str, float]) -> Joined:
    """Two seeds of each scheme. The loss at the end is 3 for seed 0 and 4 for seed 1."""
    rows = [
        {
            "scheme": scheme,
            "seed": seed,
            "tokens": TOKENS,
            "epochs": 0.25,
            "training_flops": of,
            "loss": 3.0 + seed,
            "parameters": 500,
            "tokens_per_second": 100.0 * (1 + seed) * (1 + (scheme == "b")),
            "peak_memory_bytes": math.nan,
        }
        for scheme, of in flops.items()
        for seed in (0, 1)
    ]
    return Joined(pd.DataFrame(rows), list(flops), [0, 1], "a")


def curves(schemes: str) -> pd.DataFrame:
    """Validations at 0, 400 and 1000 tokens; from 400 to 1000 `b` falls by 0.6 with seed 0 and by 1.2 with seed 1."""
    rows = [
        {"scheme": scheme, "seed": seed, "tokens": tokens, "loss": loss + seed}
        for scheme in schemes
        for seed in (0, 1)
        for tokens, loss in ((0.0, 8.0), (400.0, 3.6 + 0.6 * seed), (TOKENS, 3.0))
    ]
    return pd.DataFrame(rows)


def test_gaps_at_equal_compute_are_read_from_the_curve_of_the_dearer_scheme() -> None:
    found = equal_compute(joined({"a": 7e9, "b": 10e9}), curves("ab"))
    assert found is not None and found.flops == 7e9 and found.cut_short == {"b"}
    # b after 700 of its 1000 tokens, halfway between two validations: 3.3 with seed 0 and 4.6 with seed 1; a at its end
    assert found.gaps["b"].mean == pytest.approx((0.3 + 0.6) / 2) and found.gaps["a"].mean == 0
    assert found.gaps["b"].half_width == pytest.approx(12.706 * 0.15, rel=1e-4)
    assert found.is_estimate("b", "a") and not found.is_estimate("a", "a")
    dear_baseline = equal_compute(joined({"a": 10e9, "b": 7e9}), curves("ab").replace({"a": "b", "b": "a"}))
    assert dear_baseline and dear_baseline.is_estimate("b", "a")


def test_without_a_curve_there_is_no_gap_and_with_the_same_flops_no_view() -> None:
    found = equal_compute(joined({"a": 7e9, "b": 10e9}), curves("a"))
    assert found and math.isnan(found.gaps["b"].mean)
    assert equal_compute(joined({"a": 7e9, "b": 7.006e9}), curves("ab")) is None
    assert equal_compute(joined({"a": 7e9, "b": math.nan}), curves("ab")) is None


def test_speed_is_the_median_over_seeds() -> None:
    found = costs(joined({"a": 7e9, "b": 7e9}), {"b": Cache(1024, 0)})["b"]
    assert (found.tokens_per_second, found.tokens_per_parameter, found.cache_bytes_per_token) == (300, 2, 1024)


def test_the_report_shows_what_a_loss_cost(own: Path, losses: Findings) -> None:
    """nope at twice the FLOPs: its loss is taken from the middle of its training, 0.26 above its end."""
    text = on_terminal(losses, 120)
    assert "All schemes used the same FLOPs to within 0.1%" in " ".join(text.split())
    assert re.search(r"^nope +6,819,152 +0\.059 +1\.50e13 +20,150 +900 +1,024$", text, re.MULTILINE)
    for seed in range(4):
        run_of(own, "nope", seed).update_manifest(training_flops=3.0e13)
    found = find(own)
    text = on_terminal(found, 120)
    gap = re.search(r"^nope +\S+ +0\.059 +3\.00e13 +20,150 +900 +1,024 +\+(0\.\d+) ± 0\.\d+\*$", text, re.MULTILINE)
    nope = found.at("validation", 256)["nope"].gap.mean
    assert gap and float(gap[1]) == pytest.approx(nope + 5.3 * (math.exp(-3) - math.exp(-6)), abs=0.01)
    assert "“*” marks an estimate" in text and "at 1.50e13 FLOPs" in text
    rows = frames(found)["costs.csv"].set_index("scheme")
    assert rows.loc["nope", "gap"] == pytest.approx(float(gap[1]), abs=1e-3)
    assert (rows.loc["nope", "is_estimate"], rows.loc["alibi", "is_estimate"]) == (True, False)


def test_runs_that_did_not_record_their_flops_have_a_dash(own: Path) -> None:
    run_of(own, "nope", 0).update_manifest(training_flops=None)
    for seed in range(4):
        run_of(own, "alibi", seed).update_manifest(training_flops=None)
    text = on_terminal(find(own), 120)
    assert re.search(r"^alibi +6,819,152 +0\.059 +– ", text, re.MULTILINE)
    assert "Not every run recorded its FLOPs, so schemes are not compared at equal compute." in " ".join(text.split())


def test_a_scheme_of_another_size_is_named(own: Path, losses: Findings) -> None:
    assert "All schemes have the same number of parameters as qk_rope" in on_terminal(losses, 120)
    for seed in range(4):
        sizes = run_of(own, "nope", seed).manifest.num_parameters
        run_of(own, "nope", seed).update_manifest(num_parameters=sizes | {"body": sizes["body"] - 500_000})
    text = " ".join(on_terminal(find(own), 120).split())
    assert "Schemes with another number of parameters than qk_rope: nope -7.3%." in text


def test_a_recurrent_state_is_told_apart_from_what_grows(losses: Findings) -> None:
    scheme = losses.schemes[0]
    cost = dataclasses.replace(losses.costs[scheme], cache_bytes_per_token=0.0, state_bytes=8704.0)
    table = cost_table(dataclasses.replace(losses, costs=losses.costs | {scheme: cost}))
    column = [name.replace("\n", " ") for name in table.headers].index("cache B a token")
    assert table.rows[0][column] == "0 + 8,704"
    unknown = dataclasses.replace(cost, cache_bytes_per_token=math.nan, state_bytes=math.nan)
    assert cost_table(dataclasses.replace(losses, costs=losses.costs | {scheme: unknown})).rows[0][column] == "–"
