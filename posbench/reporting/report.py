"""The report of an experiment: tables on the terminal; table.csv, report.md, report.html and pictures in its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from posbench.config import ConfigError
from posbench.reporting.evaluations import LENGTH_PROTOCOLS, VALIDATION
from posbench.reporting.findings import Findings, find
from posbench.reporting.tables import (
    DASH,
    Table,
    csv_text,
    length_text,
    markdown,
    number,
    perplexity_text,
    plus_minus,
    print_notes,
    print_table,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


def report(
    folder: str | Path,
    against: str | None = None,
    baseline: str | None = None,
    output: str | Path | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Print the tables of the experiment in `folder`, write its files, and return their paths.

    Arguments: against, published results to set beside ours (default: the experiment's own); baseline, the scheme gaps are
    measured against (default: the experiment's own); output, where files go (default: `folder`/report).
    Raises: ConfigError where no run is finished, a name is unknown, or the output cannot be written.
    """
    from rich.console import Console

    from posbench.reporting import plots

    console = console or Console()
    findings = find(folder, baseline, against)
    target = Path(output) if output else Path(folder) / "report"
    tables = all_tables(findings)
    for table in tables:
        print_table(table, console)
    print_notes([*chain_lines(findings), *findings.notes], console)
    files = {"table.csv": csv_bytes(measurement_frame(findings)), "runs.csv": csv_bytes(findings.frame)}
    files["report.md"] = "\n".join(markdown(table) for table in tables).encode()
    paths = []
    for name, content in files.items():
        write(target / name, content)
        paths.append(target / name)
    paths += plots.save_all(plots.draw_all(findings), target, write)
    console.print(f"wrote {target}/: {', '.join(path.name for path in paths)}", highlight=False, markup=False, soft_wrap=True)
    return paths


def write(path: Path, content: bytes) -> None:
    """Write beside and rename. Raises: ConfigError where the folder cannot be written."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path.parent} ({error.strerror or error}): give another folder with --output") from error


def all_tables(findings: Findings) -> list[Table]:
    return [loss_table(findings), *(extrapolation_table(findings, p) for p in LENGTH_PROTOCOLS if findings.lengths(p))]


def loss_table(findings: Findings) -> Table:
    """One row a scheme, best first; at the end the schemes that have no run to compare."""
    there = findings.at(VALIDATION)
    joined, base = findings.joined, findings.baseline
    published = findings.against[0] if findings.against else None
    theirs = {row.scheme: row for row in published.rows} if published else {}
    means = joined.runs.groupby("scheme")
    headers = ["scheme", "position", "loss\nnats/token"]
    headers += [f"gap to {base}\nnats/token"] if base else []
    headers += ["seeds"]
    headers += [f"published\n{published.measurement.metric}", "published\ngap"] if published else []
    headers += ["gap\nby texts"] if base else []
    headers += ["bits\nper byte", "speed\ntokens/s", "memory\nMiB"]
    rows = []
    for scheme in findings.schemes:
        m, runs, t = there.get(scheme), means.get_group(scheme), theirs.get(scheme)
        row = [scheme, position_text(findings, scheme)]
        row += [plus_minus(m.loss.mean, m.loss.half_width) if m else number(runs["loss"].mean())]
        row += [gap_text(m.gap.mean, m.gap.half_width, scheme == base) if m else DASH] if base else []
        row += [str(len(runs))]
        if published:
            digits = 3 if published.measurement.metric == "loss" else 2
            row += [number(t.theirs, digits) if t else DASH, gap_text(t.their_gap, math.nan, scheme == published.baseline, 3) if t else DASH]
        if base:
            row += [f"± {m.gap_documents:.4f}" if m and scheme != base and not math.isnan(m.gap_documents) else DASH]
        row += [number(m.bits_per_byte if m else runs["bits_per_byte"].mean(), 3)]
        row += [_whole(runs["tokens_per_second"].mean()), _whole(runs["peak_memory_bytes"].max() / 2**20)]
        rows.append(row)
    for scheme, reason in absent_schemes(findings).items():
        rows.append([scheme, DASH, reason, *[DASH] * (len(headers) - 3)])
    return Table("Loss on held-out text", headers, rows, [], left=frozenset({0, 1}))


def position_text(findings: Findings, scheme: str) -> str:
    """What the scheme was measured to be, and what it promises where that is not the same."""
    measured = findings.measured.get(scheme, "not measured")
    promised = findings.joined.runs.set_index("scheme")["is_relative"].to_dict().get(scheme)
    word = {True: "relative", False: "absolute"}.get(promised, "unknown") if isinstance(promised, (bool,)) else "unknown"
    return measured if measured == word else f"{measured} ({word} promised)"


def gap_text(mean: float, half_width: float, is_baseline: bool, digits: int = 4) -> str:
    return "0" if is_baseline else plus_minus(mean, half_width, sign=True, digits=digits)


def absent_schemes(findings: Findings) -> dict[str, str]:
    """Schemes with runs of which none is compared -> their status."""
    gone = findings.frame[~findings.frame["scheme"].isin(findings.schemes)]
    return {str(scheme): ", ".join(sorted(set(group["status"]))) for scheme, group in gone.groupby("scheme")}


def extrapolation_table(findings: Findings, protocol: str) -> Table:
    """Perplexity by scheme and length for one protocol."""
    lengths = findings.lengths(protocol)
    places = {length: findings.at(protocol, length) for length in lengths}
    headers = ["scheme", *(length_text(n) + (" *" if n == findings.training_length else "") for n in lengths)]
    schemes = [s for s in findings.schemes if any(s in places[n] for n in lengths)]
    rows = [[s, *(perplexity_text(places[n][s].perplexity) if s in places[n] else DASH for n in lengths)] for s in schemes]
    note = f"Perplexity, {_PROTOCOLS[protocol]} * training length."
    return Table(f"Perplexity by length in tokens, {protocol} protocol", headers, rows, [note])


_PROTOCOLS = {
    "fixed": "fixed targets: the same tokens are scored at every length, only the context to their left grows.",
    "nonoverlapping": "non-overlapping windows: every token is scored once; longer windows gain already by having fewer tokens near a window's start.",
    "sliding": "sliding windows: only the last tokens of each window are scored.",
}


def chain_lines(findings: Findings) -> list[str]:
    if not findings.chain.is_tested:
        return [f"By loss, best first: {findings.chain.text}. 1 seed: order not tested."]
    return [f"Ranking: {findings.chain.text}"]


def measurement_frame(findings: Findings) -> pd.DataFrame:
    """table.csv: one row a scheme, protocol and length. Losses and gaps in nats/token."""
    import pandas as pd

    rows = [
        {
            "scheme": m.scheme,
            "protocol": m.protocol,
            "split": m.split,
            "length": m.length,
            "seeds": len(m.seeds),
            "loss": m.loss.mean,
            "loss_low": m.loss.low,
            "loss_high": m.loss.high,
            "gap": m.gap.mean,
            "gap_low": m.gap.low,
            "gap_high": m.gap.high,
            "loss_documents": m.loss_documents,
            "gap_documents": m.gap_documents,
            "bits_per_byte": m.bits_per_byte,
            "perplexity": m.perplexity,
            "targets": m.targets,
            "windows": m.windows,
            "documents": m.documents,
        }
        for m in findings.measurements
    ]
    return pd.DataFrame(rows)


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """As CSV; words that a spreadsheet would take for a formula are neutralised, numbers are written in full."""
    words = frame.apply(lambda column: column.map(lambda v: csv_text(v) if isinstance(v, str) else v))
    return words.to_csv(index=False).encode()


def _whole(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:,.0f}"
