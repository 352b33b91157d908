"""Report models that were not trained here (`posbench.evaluation.subjects`): each by length and under each option.

Each set of options of a model (`--under rescale=yarn`) is a row, as schemes are in other reports. Models with different
tokenizers score different windows, so they are compared by bits per byte only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison, build
from posbench.config import ConfigError
from posbench.config.units import DASH, count_of, perplexity_text, plus_minus, short_count, short_length
from posbench.evaluation.protocols import MECHANISM, PROTOCOLS
from posbench.evaluation.protocols.section import Plot, Section, joined, text_table
from posbench.reporting.figures import draw_all
from posbench.runs import run_at
from posbench.runs.results import MARKS, row_name

_NUMBERS = ["scheme", "length", "value", "value_documents", "perplexity", "gap", "gap_documents"]  # of --json


def content_of_subjects(summary: pd.DataFrame, rows: pd.DataFrame) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Return the values that fill the report's templates, and the tables to write as CSV, by file name.

    Arguments: summary, a row per model; rows, the tidy table, a row per scored window and metric.
    Raises: ConfigError if no model has a result.
    """
    models = {str(name): _compared(of_model, rows) for name, of_model in summary.groupby("scheme", sort=True)}
    compared = {name: c for name, c in models.items() if c is not None}
    if not compared:
        raise ConfigError("these models have no results: score them first (posbench eval FOLDER --length 2k)")
    facts = {name: _facts(name, c) for name, c in compared.items()}
    sections: list[Section] = [_bits_per_byte(compared, facts)]
    figures: dict[str, Any] = {}
    for name, c in compared.items():
        of_model = _sections(name, c, facts[name], several=len(compared) > 1)
        figures |= draw_all(c, of_model)
        sections += of_model
    files = {file: [s.files[file] for s in sections if file in s.files] for s in sections for file in s.files}
    return {
        "page": "subjects.md.j2",
        "paragraph": "subjects_conclusions.j2",
        "names": ", ".join(compared),
        "lede": f"{count_of(len(compared), 'model')} in Hugging Face's format, scored and not trained here. "
        "Losses are in nats per token; lower is better.",
        "facts": list(facts.values()),
        "numbers": [row for c in compared.values() for row in _losses(c)[_NUMBERS].to_dict("records")],
        "sections": sections,
        "figures": figures,
        "notes": [line for c in compared.values() for line in (*c.notes, *chain(*c.holes.values()))],
        "latex": {s.latex[0]: (s.table, s.latex[1]) for s in sections if s.latex and s.table is not None},
    }, {
        "table.csv": pd.concat([c.cells for c in compared.values()]),
        **{file: pd.concat(frames) for file, frames in files.items()},
    }


def _compared(model: pd.DataFrame, rows: pd.DataFrame) -> Comparison | None:
    """Return the Comparison of one model with itself under other options, each a scheme; None without results.

    Arguments: model, the model's row of the summary; rows, the tidy table.
    """
    rows = rows[rows["run"].isin(model.index)].copy()
    rows["under"] = [" ".join(word for word in str(text).split() if word not in MARKS) for text in rows["under"]]
    if rows.empty:
        return None
    name = str(model["scheme"].iloc[0])
    options = sorted({"", *rows["under"]}, key=lambda text: (text != "", text))
    rows["run"] = rows["under"].map(options.index)
    rows["scheme"] = rows["under"].map(lambda text: row_name(name, text.split()))
    rows["under"] = ""
    runs = pd.concat(
        [model.assign(scheme=row_name(name, text.split()), loss=float(n)) for n, text in enumerate(options)]
    )
    return build(runs.reset_index(drop=True), rows, baseline=name)


def _facts(name: str, c: Comparison) -> dict[str, Any]:
    """Return facts about a model that the report states, {name: value}. Arguments: name, the model's."""
    run = run_at(str(c.runs["path"].iloc[0]))
    manifest, T = run.manifest, c.training_length
    assert manifest.subject is not None
    losses = _losses(c)
    of_model = losses[losses["scheme"] == name].set_index("length")
    reference = max((n for n in of_model.index if n <= T), default=None)
    longest = max(losses["length"], default=T)
    at_longest = losses[losses["length"] == longest].sort_values("value")
    documents = np.asarray(manifest.subject["document_tokens"])
    return {
        "name": name,
        "T": T,
        "characters": manifest.subject["characters_per_token"],
        "parameters": short_count(c.runs["parameters"].iloc[0]),
        "text": run.config.data.name,
        "documents": len(documents),
        "long_enough": int((documents > longest).sum()),
        "longest": longest,
        "reference": reference,
        "perplexities": {n: perplexity_text(p) for n, p in of_model["perplexity"].items()},
        "best": None if len(at_longest) < 2 else at_longest.iloc[0]["scheme"],
        "best_perplexity": perplexity_text(at_longest.iloc[0]["perplexity"]) if len(at_longest) else DASH,
        "path": manifest.subject["path"],
        "digest": str(manifest.weights)[:12],
        "windows": run.config.evaluation.windows,
        "dtypes": sorted({str(r.header["dtype"]) for r in run.results()[0]}),
    }


def _losses(c: Comparison) -> pd.DataFrame:
    """Return the figures of the first protocol that scores perplexity by length, a row per option and length."""
    cells = c.at(metric="loss", last=0)
    by_length = [p.name for p in PROTOCOLS.values() if p.is_by_length and (cells["protocol"] == p.name).any()]
    return cells[cells["protocol"] == (by_length[0] if by_length else "")]


def _bits_per_byte(compared: Mapping[str, Comparison], facts: Mapping[str, Mapping[str, Any]]) -> Section:
    """Return the first section: bits per byte of each model, under each option, by length in tokens and characters."""
    rows = []
    for name, c in compared.items():
        cells = c.at(metric="bits_per_byte", last=0)
        cells = cells[cells["protocol"].isin(_losses(c)["protocol"])]
        for scheme in _in_order(c):
            row = {"scheme": scheme}
            for length, bits in cells.loc[cells["scheme"] == scheme, ["length", "value"]].to_numpy().tolist():
                characters = short_count(length * facts[name]["characters"])
                row[short_length(int(length))] = f"{bits:.4f} ({characters})"
            rows.append(row)
    lengths = sorted({n for c in compared.values() for n in _losses(c)["length"]})
    table = text_table(rows).reindex(columns=["scheme", *map(short_length, lengths)]).fillna(DASH)
    note = "Bits per byte by length in tokens; in brackets the length in characters. "
    if len(compared) > 1:
        note += "Models with different tokenizers read different windows of the same text."
    return Section("", table=table.rename(columns={"scheme": "model"}), note=note)


def _in_order(c: Comparison) -> list[str]:
    """Return the model's name, then its names with options, in the order of the options."""
    return sorted(c.schemes, key=lambda scheme: (scheme != c.baseline, scheme))


def _sections(name: str, c: Comparison, facts: Mapping[str, Any], several: bool) -> list[Section]:
    """Return the sections about one model. Arguments: name, the model's; several, whether others are reported too."""
    alone = replace(c, losses=c.losses[[name]])  # heads are measured without options only
    brought = [
        section
        for protocol in PROTOCOLS.values()
        if not protocol.is_by_length
        for section in protocol.sections(alone if protocol is MECHANISM else c, True)
    ]
    sections = [*_by_length(c), *joined(brought, c.schemes)]
    if not several:
        return sections
    return [
        replace(
            section,
            title=section.title and f"{name}: {section.title}",
            plots=[replace(plot, name=f"{plot.name}-{name}") for plot in section.plots],
            latex=section.latex and (f"{section.latex[0]}-{name}", section.latex[1]),
        )
        for section in sections
    ]


def _by_length(c: Comparison) -> Iterator[Section]:
    """Yield the section on perplexity by length: a picture, and a row for the model under each set of options."""
    losses = _losses(c)
    if losses.empty:
        return
    lengths, T = sorted(set(losses["length"])), c.training_length
    rows = []
    for scheme in _in_order(c):
        of_scheme = losses[losses["scheme"] == scheme].set_index("length")
        row = {"scheme": scheme}
        for n in lengths:
            cell = of_scheme.loc[n] if n in of_scheme.index else None
            title = short_length(n) + " (trained)" * (n == T)
            row[title] = DASH if cell is None else perplexity_text(cell["perplexity"])
        last = of_scheme.reindex([lengths[-1]]).iloc[0]
        if T in lengths and lengths[-1] > T and scheme == c.baseline:
            row[f"change from {short_length(T)}"] = plus_minus(last["change"], last["change_documents"], sign=True)
        if len(c.schemes) > 1:
            gap = plus_minus(last["gap"], last["gap_documents"], sign=True)
            row[f"gap at {short_length(lengths[-1])}"] = "0" if scheme == c.baseline else gap
        rows.append(row)
    note = (
        f"Perplexity on the same targets at every length ({c.baseline} in the first row as its config.json says). "
        "Change and gap to the first row: nats per token, ± half a 95 % interval over documents."
    )
    points = losses.assign(x=losses["length"], y=losses["perplexity"])
    plot = Plot("perplexity", "lengths", "Perplexity against length, both on log scales.", points)
    latex = ("perplexity", "Perplexity by length.")
    yield Section(
        "Perplexity by length", plots=[plot] if lengths[1:] else [], table=text_table(rows), note=note, latex=latex
    )
