"""What the sections on lengths say, by findings whose counts are changed by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from posbench.reporting.findings import Findings
from posbench.reporting.sections import lengths


def said(findings: Findings, protocol: str) -> str:
    """The sentences of a protocol's section."""
    (section,) = [s for s in lengths.extrapolation(findings, []) if s.title.endswith(protocol)]
    return " ".join(section.words)


def test_the_early_part_is_an_estimate_with_its_doubt(findings: Findings) -> None:
    row = {"gain": 0.0301, "gain_documents": 0.0021, "early": 0.0202, "early_documents": 0.0612}
    found = replace(findings, early=pd.DataFrame([{"scheme": "qk_rope", "length": 1024, **row}]))
    assert lengths.early_table(found).rows == [["qk_rope", "+0.030 ± 0.002", "+0.020 ± 0.061"]]
    words = said(found, "nonoverlapping")
    assert "an estimate" in words and "over documents" in words and "is no bound" in words
    assert "at least" not in words and "is what the longer context did" not in words


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
