"""The results in the repository are those of the runs beside them, and the documents quote them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from posbench.reporting import report, results, trend_report
from posbench.reporting.statistics import t_interval
from posbench.reporting.tables import gap_text, plus_minus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "reference"
PACKS = sorted(path.parent for path in FOLDER.glob("*/pack.json"))
REPORTED = [folder for folder in PACKS if (folder / "report").is_dir()]
LADDER = [f"ladder_{each}" for each in ("s-512k", "s-1.02M", "s", "m-1.02M", "m-2.05M", "m", "l-2.05M", "l-4.1M", "l")]


def cells(line: str) -> list[str]:
    """The cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))


def same(a: str, b: str) -> bool:
    """Equal, numbers to rounding: the last digits of a t quantile are scipy's."""
    try:
        return float(a) == pytest.approx(float(b), rel=1e-6, abs=1e-9, nan_ok=True)
    except ValueError:
        return a == b


@pytest.mark.slow
@pytest.mark.parametrize("folder", REPORTED, ids=lambda path: path.name)
def test_a_committed_table_is_what_its_runs_say(folder: Path, tmp_path: Path) -> None:
    report(folder, against="kexue-10862", output=tmp_path, console=Console(file=io.StringIO()))
    for name in ("table.csv", "pairs.csv"):
        made, kept = rows(tmp_path / name), rows(folder / "report" / name)
        assert len(made) == len(kept) > 0
        for ours, theirs in zip(made, kept, strict=True):
            assert ours.keys() == theirs.keys()
            assert not [(key, ours[key], theirs[key]) for key in ours if not same(ours[key], theirs[key])]


@pytest.mark.slow
def test_the_committed_trend_is_what_its_runs_say(tmp_path: Path) -> None:
    trend_report([FOLDER / name for name in LADDER], output=tmp_path, console=Console(file=io.StringIO()))
    for name in ("trend.csv", "links.csv"):
        made, kept = rows(tmp_path / name), rows(FOLDER / "ladder" / name)
        assert len(made) == len(kept) > 0
        for ours, theirs in zip(made, kept, strict=True):
            assert not [(key, ours[key], theirs[key]) for key in ours if not same(ours[key], theirs[key])]


def test_readme_and_results_quote_the_reports() -> None:
    """Every cell of their tables is one of the scheme's in a report, or a loss or gap by learning rate."""
    known: dict[str, set[str]] = {}
    for file in FOLDER.glob("**/report.md"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("|"):
                known.setdefault(cells(line)[0], set()).update(cells(line))
    for size in ("ladder_m", "ladder_l"):
        for scheme, found in by_rate(size).items():
            known[scheme] |= found
    documents = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))
    schemes = {path.stem for path in (ROOT / "conf" / "scheme").iterdir()}
    quoted = [cells(line) for line in documents.splitlines() if line.startswith("|") and cells(line)[0] in schemes]
    assert len({row[0] for row in quoted}) >= 11
    for row in quoted:
        assert set(row) <= known[row[0]] | {"–"}, row


def by_rate(size: str) -> dict[str, set[str]]:
    """Scheme -> its losses after the most tokens at each learning rate, and its gap with every scheme at its best."""
    runs = pd.concat([results(folder) for folder in PACKS if folder.name.startswith(size)])
    runs = runs[runs["tokens"] == runs["tokens"].max()]
    lr = (runs["scheme.lr"] if "scheme.lr" in runs else runs["train.lr"]).astype(float).fillna(runs["train.lr"])
    losses = runs.assign(lr=lr).pivot_table("loss", ["scheme", "lr"], "seed")
    best = losses.mean(axis=1).groupby("scheme").idxmin()
    own = losses.loc[best].droplevel("lr")
    shown: dict[str, set[str]] = {}
    for (scheme, rate), each in losses.iterrows():
        loss = t_interval(each.dropna().to_numpy())
        shown.setdefault(str(scheme), set()).update((plus_minus(loss.mean, loss.half_width), f"{rate:g}"))
    for scheme, each in own.iterrows():
        gap = t_interval((each - own.loc["qk_rope"]).dropna().to_numpy())
        shown[str(scheme)].add(gap_text(gap.mean, gap.half_width, scheme == "qk_rope"))
    return shown


@pytest.mark.parametrize("folder", REPORTED, ids=lambda path: path.name)
def test_a_loss_of_the_table_can_be_computed_from_one_file_alone(folder: Path) -> None:
    windows = pd.read_parquet(folder / "windows-validation.parquet")
    sums = windows.groupby(["scheme", "seed"])[["nll", "targets"]].sum()
    losses = (sums["nll"] / sums["targets"]).groupby("scheme").mean()
    for row in rows(folder / "report" / "table.csv"):
        if row["protocol"] == "validation":
            assert losses[row["scheme"]] == pytest.approx(float(row["loss"]), rel=1e-12)


ROTATED = {"qkvo_rope", "qk_rope", "qkv_rope"}
BEHIND = {"nope", "sinusoidal", "k_rope", "q_rope", "v_rope", "o_rope"}
BETTER = {  # by mean loss than the trigram, and than the 5-gram
    "ladder_m-1.02M": ({"alibi"}, set()),
    "ladder_m-2.05M": ({"alibi", "qkvo_rope", "qk_rope"}, set()),
    "ladder_m": ({"alibi", *ROTATED}, {"alibi"}),
    "ladder_l-2.05M": ({"alibi", *ROTATED}, {"alibi"}),
    "ladder_l-4.1M": ({"alibi", *ROTATED, "vo_rope", "k_rope"}, {"alibi"}),
    "ladder_l": ({"alibi", *ROTATED, "vo_rope", *BEHIND}, {"alibi", *ROTATED, "q_rope", "o_rope"}),
}


@pytest.mark.parametrize("name", [*LADDER, "demo_cpu"])
def test_models_beside_ngrams_are_where_the_documents_say(name: str) -> None:
    ngrams = json.loads((FOLDER / name / "ngrams.json").read_text(encoding="utf-8")).values()
    bigram, trigram, fivegram = (sum(each["losses"][n] for each in ngrams) / len(ngrams) for n in ("2", "3", "5"))
    windows = pd.read_parquet(FOLDER / name / "windows-validation.parquet")
    sums = windows.groupby(["scheme", "seed"])[["nll", "targets"]].sum()
    losses = (sums["nll"] / sums["targets"]).groupby("scheme").mean()
    better = [set(losses.index[losses < of]) for of in (trigram, fivegram)]
    assert better == list(BETTER.get(name, (set(), set())))
    assert set(losses.index[losses > bigram]) == (BEHIND if name == "ladder_s-512k" else set())


@pytest.mark.slow
def test_reference_results_are_few_small_files() -> None:
    for folder in PACKS:
        files = [path for path in folder.iterdir() if path.is_file()]
        assert {path.suffix for path in files} == {".json", ".parquet"} and len(files) < 20
        assert results(folder)["is_bound"].all()
    assert sum(path.stat().st_size for folder in PACKS for path in folder.iterdir() if path.is_file()) < 6 * 2**20
