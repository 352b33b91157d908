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
