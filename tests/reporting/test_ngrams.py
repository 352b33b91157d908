"""n-gram models stand at the foot of the loss table: compared with every scheme, and ranked with none."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from posbench.runs.ngrams import NgramLosses, ngrams_of, store, task_of
from rich.console import Console

from posbench.machine.files import sealed
from posbench.reporting import report
from posbench.reporting.findings import Findings, find
from posbench.reporting.sections.losses import loss_table
from posbench.reporting.sections.ngrams import ngram_words
from posbench.runs import Run, find_runs
from posbench.runs.pack import pack


def write_ngrams(run: Run, bigram: float) -> Path:
    """What `posbench eval` leaves beside a run. The schemes lose 3.00 (qk_rope) to 3.08 (nope) and 0.02 by seed."""
    validation = next(result for result in run.results()[0] if result.protocol == "validation")
    losses = {2: bigram, 3: 2.5, 5: 4.0}
    return store(run, NgramLosses(task_of(run.manifest, validation), losses, 399_000, 1000, 3000, 0.5))


@pytest.fixture
def beside(own: Path) -> Path:
    """An experiment of four seeds with its records: the bigram loses 0.065 more than qk_rope on the same seed."""
    for run in find_runs(own / "qk_rope"):
        write_ngrams(run, run.manifest.loss + 0.065 + 0.001 * (-1) ** run.manifest.seed)  # type: ignore[operator]
    return own


def said(findings: Findings) -> str:
    return " ".join(ngram_words(findings))


def test_rows_at_the_foot_say_what_n_grams_lose(beside: Path) -> None:
    """By hand: paired differences of 0.066 and 0.064 twice each, t(3) = 3.182, sd 0.001155."""
    found = find(beside)
    table = loss_table(found)
    half = 3.182 * 0.001155 / 2
    assert [row[0] for row in table.foot] == ["Kneser-Ney 2", "Kneser-Ney 3", "Kneser-Ney 5"]
    bigram = dict(zip(table.headers, table.foot[0], strict=True))
    assert bigram["position"] == "last token" and bigram["gap to qk_rope\nnats/token"] == f"+0.0650 ± {half:.4f}"
    assert bigram["group"] == bigram["gap ± by\ndocuments"] == "–"
    assert not {row[0] for row in table.rows} & {row[0] for row in table.foot}
    assert all("Kneser-Ney" not in name for pair in found.pairs for name in (pair.left, pair.right))
    assert "Kneser-Ney" not in found.chain.text


def test_schemes_that_are_worse_than_the_bigram_and_the_trigram_are_named(beside: Path) -> None:
    """nope is planted 0.08 above qk_rope, alibi 0.05; the noise of a run is 0.0015."""
    words = said(find(beside))
    assert "Worse than the bigram: nope. Every scheme's model is worse than the trigram." in words
    assert "(399,000 tokens, each once)" in words
    for run in find_runs(beside / "qk_rope"):
        write_ngrams(run, run.manifest.loss + 0.005 + 0.01 * (-1) ** run.manifest.seed)  # type: ignore[operator]
    assert (
        "Worse than the bigram: alibi, nope. Not significantly different from the bigram: qk_rope, qkvo_rope."
        in said(find(beside))
    )


@pytest.mark.slow
def test_files_and_packs_hold_them(beside: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    report(beside, output=tmp_path / "report", console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("Kneser-Ney 2  last token") > shown.index("nope")
    assert "| *Kneser-Ney 5* | *last 4 tokens* |" in (tmp_path / "report/report.md").read_text()
    assert "<tfoot>" in (tmp_path / "report/report.html").read_text()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report/ngrams.csv").read_text())))
    assert [(row["model"], row["seeds"]) for row in rows] == [(f"Kneser-Ney {n}", "4") for n in (2, 3, 5)]
    assert rows[1]["worse"].split() == find(beside).schemes and rows[0]["worse"] == "nope"
    pack(beside, tmp_path / "packed" / "demo", pytest.fail)
    report(tmp_path / "packed" / "demo", output=tmp_path / "again", console=console)
    assert (tmp_path / "again/ngrams.csv").read_bytes() == (tmp_path / "report/ngrams.csv").read_bytes()
    damaged = Path(shutil.copytree(tmp_path / "packed", tmp_path / "damaged")) / "demo"
    (damaged / "ngrams.json").write_text("{}")
    found = find(damaged)
    assert not found.ngrams and any("ngrams.json does not match its checksum" in note for note in found.notes)


def test_without_a_record_of_every_seed_there_are_no_rows_and_the_report_says_so(beside: Path) -> None:
    run = next(iter(find_runs(beside / "nope")))
    path = write_ngrams(run, 3.0)
    path.unlink()
    found = find(beside)
    assert not found.ngrams and not loss_table(found).foot and not said(found)
    assert any("no losses of n-gram models are stored for seed 0; `posbench eval`" in note for note in found.notes)


def test_runs_of_more_tokens_than_the_setting_say_why_there_are_none(beside: Path) -> None:
    for run in find_runs(beside):
        run.update_manifest(tokens=20_000_001)
    found = find(beside)
    assert not found.ngrams
    assert any("the runs read 20,000,001 tokens" in note and "ngram_tokens=20,000,000" in note for note in found.notes)


@pytest.mark.parametrize(
    "changes",
    [{"format": 2}, {"losses": {"2": "nan"}}, {"losses": 3}, {"targets": 0}, {"task": {"data": "x"}}, {"tokens": "x"}],
    ids=str,
)
def test_what_is_no_record_is_named_and_not_believed(beside: Path, changes: dict[str, object]) -> None:
    """Sealed anew, as somebody who alters it on purpose would."""
    run = next(iter(find_runs(beside / "nope")))
    path = write_ngrams(run, 3.0)
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **changes})))
    records, faults = ngrams_of(run)
    assert not records and len(faults) == 1 and faults[0].startswith(f"{path} is not used (it ")
