"""Make the page about models that were not trained here (`posbench.evaluation.subjects`): each under each option.

Models with different tokenizers score different windows, so they are compared by bits per byte only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.card import card_of, gaps
from posbench.analysis.comparison import Comparison
from posbench.analysis.subjects import compared_options, losses_of
from posbench.config import ConfigError
from posbench.config.units import DASH, count_of, perplexity_text, short_count, short_length
from posbench.evaluation.protocols import MECHANISM, PROTOCOLS
from posbench.evaluation.protocols.section import Format, Plot, Section, Table, in_order, joined, pivot
from posbench.reporting.card import card_lines
from posbench.reporting.page import Page, paragraph, unshown
from posbench.reporting.text import words
from posbench.runs import Run, run_at

_NUMBERS = ["scheme", "length", "value", "value_documents", "perplexity", "gap", "gap_documents"]  # of --json
Models = Mapping[str, Comparison]  # a model's name -> it, compared with itself under other options


def subjects_page(summary: pd.DataFrame, rows: pd.DataFrame) -> Page:
    """Return the page about these models.

    Arguments: summary, a row per model; rows, the tidy table. Raises: ConfigError if no model has a result.
    """
    models = {str(name): compared_options(of_model, rows) for name, of_model in summary.groupby("scheme", sort=True)}
    compared = {name: c for name, c in models.items() if c is not None}
    if not compared:
        raise ConfigError("these models have no results: score them first (posbench eval FOLDER --length 2k)")
    facts = {name: _facts(name, c) for name, c in compared.items()}
    _check_versions(facts)
    sections = [bits_per_byte(compared, facts), *_gaps(compared)]
    for name, c in compared.items():
        of_model = sections_of_model(c)
        # With several models, titles and files need the model's name.
        if len(compared) > 1:
            of_model = [_named(section, name) for section in of_model]
        sections += of_model
    notes: list[str] = []
    figures: list[Any] = []
    setup_lines: list[tuple[str, str]] = []
    cards = []
    for name, c in compared.items():
        notes += [*c.notes, *unshown(chain(*c.holes.values()), sections)]
        figures += losses_of(c)[_NUMBERS].to_dict("records")
        setup_lines += [(name, line) for line in _setup(facts[name])]
        card = card_of(_run_of(c))
        if card:
            cards.append(card.as_json())
    return Page(
        title=", ".join(compared),
        lede=f"{count_of(len(compared), 'model')} in Hugging Face's format, scored and not trained here. Losses are in "
        "nats per token; lower is better.",
        paragraph=paragraph("subjects_paragraph", list(facts.values())),
        sections=sections,
        runs=pd.concat([c.runs for c in compared.values()]),
        setup=setup_lines,
        notes=notes,
        numbers=figures,
        cards=cards,
        files={"table.csv": pd.concat([c.cells for c in compared.values()])},
    )


def _check_versions(facts: Mapping[str, Mapping[str, Any]]) -> None:
    # Raise ConfigError if the models were scored by different programs.
    # Other versions of transformers or of the adapter may compute other losses for the same weights.
    by_versions: dict[str, list[str]] = {}
    for name, fact in facts.items():
        versions = fact["versions"]
        described = "posbench's own decoder"
        if versions is not None:
            described = f"transformers {versions['transformers']} (adapter {versions['adapter']})"
        by_versions.setdefault(described, []).append(name)
    if len(by_versions) > 1:
        parts = "; ".join(f"{', '.join(names)} by {versions}" for versions, names in by_versions.items())
        raise ConfigError(
            f"these models were scored by different programs: {parts}. Report one group with --schemes, or delete the "
            "results of the others and score them again"
        )


def _facts(name: str, c: Comparison) -> dict[str, Any]:
    # Return the facts about a model that the page's paragraph and set-up show.
    run = _run_of(c)
    manifest, T, losses = run.manifest, c.training_length, losses_of(c)
    assert manifest.subject is not None
    as_it_is = losses[losses["scheme"] == name].set_index("length")
    longest = max(losses["length"], default=T)
    at_longest = losses[losses["length"] == longest].sort_values("value")
    # The option with the lowest loss at the longest length; None if only one was scored there.
    best, best_perplexity = None, DASH
    if len(at_longest):
        best_perplexity = perplexity_text(at_longest.iloc[0]["perplexity"])
    if len(at_longest) > 1:
        best = at_longest.iloc[0]["scheme"]
    documents = np.asarray(manifest.subject["document_tokens"])
    card = card_of(run)
    return {
        "name": name,
        "T": T,
        "characters": manifest.subject["characters_per_token"],
        "parameters": short_count(c.runs["parameters"].iloc[0]),
        "text": run.config.data.name,
        "documents": len(documents),
        "long_enough": int((documents > longest).sum()),
        "longest": longest,
        "reference": max((n for n in as_it_is.index if n <= T), default=None),
        "perplexities": {n: perplexity_text(p) for n, p in as_it_is["perplexity"].items()},
        "best": best,
        "best_perplexity": best_perplexity,
        "path": manifest.subject["path"],
        "digest": str(manifest.weights)[:12],
        "windows": run.config.evaluation.windows,
        "card": card_lines(card)[:2] if card else [],
        "versions": manifest.subject.get("versions"),
        "rotations": manifest.subject.get("rotations"),
        "dtypes": sorted({str(result.header["dtype"]) for result in run.results()[0]}),
    }


def _run_of(c: Comparison) -> Run:
    return run_at(str(c.runs["path"].iloc[0]))


def _setup(f: Mapping[str, Any]) -> tuple[str, str]:
    """Return two lines, about the model and about the text. Arguments: f, as `_facts` returns it."""
    model = f"{f['path']}, weights {f['digest']}, {f['parameters']} parameters, trained on windows of {f['T']} tokens"
    if f["rotations"]:
        model += f", rotations {json.dumps(f['rotations'])}"
    # None: the manifest does not record rotations; {}: there are none.
    elif f["rotations"] is not None:
        model += ", no rotations"
    text = f"data={f['text']}, {f['documents']} documents, {f['long_enough']} of them longer than {f['longest']} tokens"
    return (
        f"{model}; scored in {words(f['dtypes'])}",
        f"{text}; at most {f['windows']} windows for each length; a token is {f['characters']:.2f} characters",
    )


def bits_per_byte(compared: Models, facts: Mapping[str, Mapping[str, Any]]) -> Section:
    """Return the first section: bits per byte of each model, under each option, by length in tokens and characters."""
    parts = []
    for name, c in compared.items():
        cells = c.at(metric="bits_per_byte", last=0)
        cells = in_order(cells[cells["protocol"].isin(losses_of(c)["protocol"])], _in_order(c), "length")
        characters = cells["length"] * facts[name]["characters"]
        character_texts = [f" ({short_count(count)})" for count in characters]
        parts.append(cells.assign(characters=character_texts))
    scored: set[int] = set()
    for c in compared.values():
        scored.update(losses_of(c)["length"])
    lengths = {n: short_length(n) for n in sorted(scored)}
    table_rows = pd.concat(parts)
    table = pivot(table_rows, lengths, "length", format=Format(digits=4, after="characters"))
    note = "Bits per byte by length in tokens; in brackets the length in characters. "
    if len(compared) > 1:
        note += "Models with different tokenizers read different windows of the same text."
    plots = []
    if len(compared) > 1:
        # Only models as they are; with options the lines would be too many.
        models = table_rows[table_rows["scheme"].isin(list(compared))]
        points = models.assign(x=models["length"] * models["scheme"].map(_characters(facts)), y=models["value"])
        plots = [Plot("models", "characters", "Bits per byte of each model as it is, by length in characters.", points)]
    return Section(
        "", plots=plots, table=Table(table.frame.rename(columns={"scheme": "model"}), table.formats), note=note
    )


def _gaps(compared: Models) -> list[Section]:
    # Losses in nats compare only models that read the same windows.
    table = gaps({name: _run_of(c) for name, c in compared.items()})
    if table.empty:
        return []
    first = next(iter(compared))
    lengths = {n: short_length(n) for n in sorted(set(table["length"]))}
    shown = pivot(table, lengths, "length", "gap", Format(half="half", sign=True))
    note = f"Loss minus that of {first} on the same windows, nats/token; ±: half the 95 % interval over documents."
    return [Section(f"Gap to {first}", table=shown, note=note)]


def _characters(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {name: fact["characters"] for name, fact in facts.items()}


def _in_order(c: Comparison) -> list[str]:
    # The schemes are options of one model, and the baseline is the model as it is, which comes first.
    return sorted(c.schemes, key=lambda scheme: (scheme != c.baseline, scheme))


def sections_of_model(c: Comparison) -> list[Section]:
    """Return the sections about one model."""
    alone = replace(c, losses=c.losses[[c.baseline]])  # heads are measured without options only
    sections = []
    for protocol in PROTOCOLS.values():
        shown = alone if protocol is MECHANISM else c
        sections += protocol.sections(shown, every_length=True)
    return joined(sections, c.schemes)


def _named(section: Section, name: str) -> Section:
    return replace(
        section,
        title=section.title and f"{name}: {section.title}",
        plots=[replace(plot, name=f"{plot.name}-{name}") for plot in section.plots],
        latex=section.latex and (f"{section.latex[0]}-{name}", section.latex[1]),
    )
