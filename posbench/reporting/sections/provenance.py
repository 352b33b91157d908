"""Where the figures come from: set-up, versions and fingerprints, and the runs that were not compared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.reporting.findings import Findings
from posbench.reporting.frame import FINGERPRINTS, records
from posbench.reporting.sections.section import Section
from posbench.reporting.sections.training import spikes_text
from posbench.reporting.tables import DASH, Table, millions, whole
from posbench.runs import Run

if TYPE_CHECKING:
    import pandas as pd


def setup(findings: Findings) -> Section:
    """What was trained, in full."""
    config, frame = findings.config, findings.joined.runs
    runs, mapping = records(frame), findings.config.to_mapping()
    skipped = [f"{r['scheme']} seed {r['seed']}: {r['skipped_steps']:.0f}" for r in runs if r["skipped_steps"] > 0]
    rows = [
        ["experiment", f"{config.experiment.name}: {config.experiment.description}"],
        ["schemes", ", ".join(findings.schemes)],
        ["seeds", ", ".join(map(str, findings.joined.seeds))],
        ["parameters", millions(frame["parameters"].max())],
        ["tokens trained on", whole(frame["tokens"].max())],
        ["device", ", ".join(sorted({f"{r['device']} ({r['dtype']})" for r in runs}))],
        ["skipped steps", ", ".join(skipped) or "none"],
        ["gradient spikes", spikes_text(findings)],
    ]
    for group in ("model", "data", "tokenizer", "train", "evaluation"):
        rows.append([group, ", ".join(f"{k}={v}" for k, v in mapping[group].items() if v is not None)])
    return Section("Set-up", tables=[_facts("Set-up", rows), schemes_table(findings)], on_terminal=False)


def schemes_table(findings: Findings) -> Table:
    """One row a scheme: its kind, its options as its runs have stored them, and what they amount to."""
    rows = []
    for scheme in findings.schemes:
        found = [_scheme_text(run) for (name, _), run in findings.runs.items() if name == scheme]
        kinds, options, amounts = (", or ".join(dict.fromkeys(column)) or DASH for column in zip(*found, strict=True))
        rows.append([scheme, kinds, options, amounts])
    return Table("Schemes", ["scheme", "kind", "options", "in words"], rows, left=frozenset(range(4)))


def _scheme_text(run: Run) -> tuple[str, str, str]:
    from posbench.model import shape_of
    from posbench.schemes import build_scheme

    config = run.config
    options = ", ".join(f"{key}={value}" for key, value in config.scheme.options.items())
    try:
        amounts = build_scheme(config.scheme, shape_of(config)).describe()
    except (ConfigError, ValueError, RuntimeError):  # of a package that is not installed here, or another version
        amounts = "not known here"
    return config.scheme.kind, options, amounts


def fingerprints(findings: Findings) -> Section:
    """What all compared runs share. It was checked when they were joined."""
    runs = findings.joined.runs
    versions = [column for column in map(str, runs.columns) if column.startswith("version.")]
    rows = [row for name in FINGERPRINTS for row in _fingerprint(name, runs[f"fingerprint.{name}"])]
    rows += [[column.removeprefix("version."), _distinct(runs[column])] for column in versions]
    rows += [["first started", _distinct(runs["started"])[:25]], ["last ended", _distinct(runs["ended"])[-25:]]]
    words = [
        "Data, tokenizer, configuration and code are the same for all compared runs. Initial weights and batches are "
        "the same for all schemes of a seed."
    ]
    title = "Versions and fingerprints"
    return Section(title, words, [_facts(title, rows)], on_terminal=False)


def _fingerprint(name: str, column: pd.Series) -> list[list[str]]:
    """The digests of the runs, a row for each logical part of the initial weights; none where none is recorded."""
    title = name.replace("_", " ")
    if name != "initial_weights":
        digests = _distinct(column)
        return [[title, digests]] if digests != DASH else []
    parts = [json.loads(text) for text in column]
    names = dict.fromkeys(part for each in parts for part in each)
    return [
        [title if len(names) == 1 else f"{title}: {part}", _distinct(each.get(part) for each in parts)]
        for part in names
    ]


def left_out(findings: Findings) -> Section:
    """Every run that takes no part, and every remark on those that do."""
    gone = sorted(findings.joined.left_out, key=lambda run: (run.scheme, run.seed))
    rows = [[run.scheme, str(run.seed), run.why] for run in gone]
    tables = [Table("Runs not compared", ["scheme", "seed", "why"], rows, left=frozenset({0, 2}))] if rows else []
    words = findings.notes or ([] if rows else ["None: every run found is in the tables."])
    return Section("Runs not compared", list(words), tables)


def _facts(title: str, rows: list[list[str]]) -> Table:
    return Table(title, ["", "value"], rows, left=frozenset({0, 1}))


def _distinct(values: Iterable[Any]) -> str:
    """The different values, those that are not known (None, NaN, empty) left out."""
    return ", ".join(sorted({str(value) for value in values if value and value == value})) or DASH
