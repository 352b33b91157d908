"""Losses on other text stand in a section and a file of their own, and move nothing in the ranking."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from fabricate import T, World, fabricate, run_of, write_evaluation
from rich.console import Console

from posbench.reporting import spreadsheet
from posbench.reporting.findings import find
from posbench.reporting.report import as_markdown, print_sections
from posbench.reporting.sections import sections
from posbench.runs.readings import store

BETTER = 0.5  # nats a token, of nope on the notes
SEEDS = (0, 1, 2)


@pytest.fixture
def folder(tmp_path: Path, world: Callable[..., World]) -> Path:
    """Two schemes of three seeds, of which nope is the worse one, without results on other text."""
    return fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.1}, seeds=SEEDS, lengths=(256, 512)))


def read(folder: Path, name: str, scheme: str, seed: int, gain: float, *under: str, text: str = "07e5") -> None:
    """Store losses on another text: the run's own windows, with less nll."""
    run = run_of(folder, scheme, seed)
    by_place = {(r.protocol, r.length): r.windows for r in run.results()[0] if not r.reading.under}
    for protocol, length in (("validation", T), ("fixed", 512)):
        if protocol == "fixed" or not under:
            rows = by_place[protocol, length]
            rows = rows.assign(nll=rows["nll"] - gain * rows["targets"])
            facts = {"data": text, "overlap": 0.0123}
            write_evaluation(run, protocol, length, "whole", rows, f"data={name}", *under, **facts)


def test_they_have_a_section_and_a_file_and_rank_nothing(folder: Path, tmp_path: Path) -> None:
    before = find(folder)
    for seed in SEEDS:
        read(folder, "notes", "qk_rope", seed, 0.0)
        read(folder, "notes", "nope", seed, BETTER)
        read(folder, "notes", "qk_rope", seed, 1.0, "rescale=yarn")
    findings = find(folder)
    assert findings.pairs == before.pairs and findings.schemes == before.schemes == ["qk_rope", "nope"]
    assert spreadsheet.measurements(findings).equals(spreadsheet.measurements(before))
    [section] = [each for each in sections(findings, []) if each.title.startswith("Loss on other text")]
    assert (
        section.title == "Loss on other text: notes" and "Of its 13-grams of words 1.2% also occur" in section.words[2]
    )
    losses, perplexities = section.tables[:2]
    assert losses.headers[2] == "gap to qk_rope\nnats/token" and [row[0] for row in losses.rows] == ["qk_rope", "nope"]
    there = {m.scheme: m for m in findings.texts[0].measurements if m.protocol == "validation"}
    own = {m.scheme: m for m in findings.measurements if m.protocol == "validation"}
    assert there["nope"].gap.mean == pytest.approx(own["nope"].gap.mean - BETTER)
    assert there["nope"].bits_per_byte < own["nope"].bits_per_byte
    assert perplexities.title == "Perplexity by length in tokens: fixed, on notes"
    assert [row[0] for row in perplexities.rows] == ["qk_rope", "qk_rope · yarn", "nope"]
    table = spreadsheet.frames(findings)["texts.csv"].set_index(["text", "scheme", "protocol", "length"])
    assert table.loc[("notes", "nope", "validation", T), "loss"] == pytest.approx(there["nope"].loss.mean)
    assert "texts.csv" not in spreadsheet.frames(before)
    console = Console(file=io.StringIO(), width=100)
    print_sections([section], console)
    assert "Loss on other text: notes" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "## Loss on other text: notes" in as_markdown("demo", [section])


def test_of_two_texts_of_one_name_the_one_of_most_results_is_shown(folder: Path) -> None:
    for seed in SEEDS:
        read(folder, "notes", "qk_rope", seed, 0.0)
        read(folder, "notes", "nope", seed, BETTER, text="07e5")
        for scheme in ("qk_rope", "nope"):  # the folder of notes has changed, and one length was scored since
            run = run_of(folder, scheme, seed)
            [rows] = [r.windows for r in run.results()[0] if str(r.reading) == "fixed at 256"]
            write_evaluation(run, "fixed", 256, "whole", rows, "data=notes", data="01d")
    findings = find(folder)
    assert findings.texts[0].overlaps == {"whole": 0.0123}
    assert {(m.protocol, m.length) for m in findings.texts[0].measurements} == {("validation", T), ("fixed", 512)}
    [note] = [note for note in findings.notes if "another text of this name" in note]
    assert note.startswith("On other text, notes: left out 6 results of another text") and "--data" in note


def test_what_no_section_shows_is_counted(folder: Path) -> None:
    read(folder, "notes", "nope", 0, 0.0, "step=100")
    findings = find(folder)
    assert findings.texts == []
    assert "Not in these tables: 1 results under data=notes step=100." in findings.notes


def test_a_share_that_is_no_number_is_not_known(folder: Path) -> None:
    """A header under a seal can still have been written by anybody."""
    for scheme in ("qk_rope", "nope"):
        read(folder, "notes", scheme, 0, 0.0)
        run = run_of(folder, scheme, 0)
        for result in [r for r in run.results()[0] if r.reading.data]:
            store(run, result.reading, result.windows, {**result.header, "overlap": "much"})
    [section] = [each for each in sections(find(folder), []) if each.title.startswith("Loss on other text")]
    assert section.words[2].endswith("was not measured.")
