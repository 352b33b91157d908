"""What the sections on lengths say, and the counts behind their columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from fabricate import World, fabricate

from posbench.reporting.findings import Findings, find
from posbench.reporting.joining import Joined
from posbench.reporting.measure import measure
from posbench.reporting.sections import lengths
from posbench.runs import load_run


def said(findings: Findings, protocol: str) -> str:
    """The sentences of a protocol's section."""
    (section,) = [s for s in lengths.extrapolation(findings, []) if s.title.endswith(protocol)]
    return " ".join(section.words)


def test_the_early_part_is_an_estimate_with_its_doubt(findings: Findings) -> None:
    row = {"gain": 0.0301, "gain_documents": 0.0021, "early": 0.0202, "early_documents": 0.0612}
    found = replace(findings, early=pd.DataFrame([{"scheme": "qk_rope", "length": 1024, **row}]))
    assert lengths.early_table(found).rows == [["qk_rope", "+0.0301 ± 0.0021", "+0.020 ± 0.061"]]
    words = said(found, "nonoverlapping")
    assert "an estimate" in words and "over documents" in words and "is not a bound" in words
    assert "at least" not in words and "is what the longer context did" not in words


def test_without_the_training_length_no_changes_are_promised(findings: Findings) -> None:
    assert "* marks the training length" in said(findings, "fixed") and "read the changes below" in said(
        findings, "fixed"
    )
    unknown = replace(findings.measurements[0].change, mean=math.nan, low=math.nan)
    longer = [replace(m, change=unknown) for m in findings.measurements if m.length == 512]
    words = said(replace(findings, measurements=longer), "fixed")
    assert "changes below" not in words and "* marks" not in words and words.endswith("posbench eval -p fixed -l 256")


def test_columns_that_score_different_numbers_of_tokens_each_say_theirs(findings: Findings) -> None:
    fewer = {(n, protocol): 99_000 - n for n in (128, 256) for protocol in ("nonoverlapping",)}
    changed = [replace(m, targets=fewer.get((m.length, m.protocol), m.targets)) for m in findings.measurements]
    there = findings.at("fixed", 512)["nope"]
    all_of_them = f"{there.targets:,} tokens of 12 documents"
    found = replace(findings, measurements=changed)
    assert f"On the test split, {all_of_them} scored at each length." in said(found, "fixed")
    words = said(found, "nonoverlapping")
    assert "scored at 128: 98,872 tokens of 12 documents; at 256: 98,744 tokens of 12 documents; at 512: " in words
    assert f"; at 2k: {all_of_them}." in words and "each length" not in words


@pytest.mark.parametrize(("protocol", "length"), [("validation", 128), ("fixed", 512)])
def test_windows_are_counted_and_not_their_documents(protocol: str, length: int) -> None:
    """Of a reference run, by where in the stream its rows begin."""
    run = Path(__file__).parents[2] / "runs" / "reference" / "demo_cpu" / "qk_rope" / "seed=0"
    (e,) = [e for e in load_run(run).results()[0] if (e.protocol, e.length) == (protocol, length)]
    (found,) = measure({("qk_rope", 0): [e]}, Joined(pd.DataFrame(), ["qk_rope"], [0], None), 128, [])
    windows = set(e.windows["start"] if protocol == "fixed" else (e.windows["start"] - 1) // length)
    assert found.windows == len(windows) <= len(e.windows)
    assert (len(windows) < len(e.windows)) == (protocol != "fixed")


def test_just_past_the_training_length_few_targets_are_beyond_it(tmp_path: Path, world: Callable[..., World]) -> None:
    """The last 64 targets of a window: at 256 + 10 tokens those of positions 257 to 266 are beyond, 10 of them."""
    effects = {"qk_rope": 0.0, "nope": 0.1}
    near = find(fabricate(tmp_path / "near", world(effects, seeds=(0,), lengths=(256, 257, 266, 319, 320, 512))))
    assert "only some of the 64 targets at the end of a window" in said(near, "fixed")
    assert "beyond it: 1 at 257, 10 at 266, 63 at 319. " in said(near, "fixed")
    far = find(fabricate(tmp_path / "far", world(effects, seeds=(0,), lengths=(128, 256, 320))))
    assert "beyond it" not in said(far, "fixed") and "beyond it" not in said(near, "nonoverlapping")
