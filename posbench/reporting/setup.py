"""Describe the set-up of a report's runs in lines of text."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pandas as pd

from posbench.analysis.comparison import Comparison, SeedComparison
from posbench.analysis.loss_table import LossTable
from posbench.analysis.subjects import ModelComparison
from posbench.analysis.table import config_of, settings_of
from posbench.config import chosen_experiment
from posbench.config.units import short_count
from posbench.reporting.page import prose
from posbench.reporting.text import words
from posbench.runs import run_at
from posbench.runs.fingerprints import settings_in_use


def setup(comparisons: Sequence[Comparison], group_by: str) -> list[tuple[str, str]]:
    """Return (name, text) pairs that describe a report's set-up. Arguments: group_by, as of `page_about`."""
    lines = []
    for c in comparisons:
        if isinstance(c, ModelComparison):
            lines += _setup_of_model(c)
        elif isinstance(c, LossTable):
            run = c.runs.iloc[0]
            lines += [("table", f"{run['path']}, {len(c.runs)} runs; {run['metric'] or 'loss'} {run['text']}")]
            lines += [("not known", c.unknown)]
        elif group_by and isinstance(c, SeedComparison):
            lines.append((f"{group_by}={c.group}", prose("models", c)))
    runs = pd.concat([c.runs for c in comparisons])
    if group_by and len(lines):
        lines += [("the groups", text) for text in _differences(runs, group_by)]
    return lines or setup_of_runs(runs)


def _differences(runs: pd.DataFrame, group_by: str) -> list[str]:
    # Return a line for each way in which groups of runs differ besides `by`.
    shared = [
        column for column in settings_of(runs) if not column.startswith("scheme.") and column not in group_by.split(",")
    ]
    differing = [column for column in shared if runs[column].astype(str).nunique() > 1]
    lines = []
    if differing:
        lines.append(f"also differ in {', '.join(differing)}")
    if runs["fingerprint.data"].nunique() > 1:
        lines.append("were trained on different text")
    return lines


def _setup_of_model(c: ModelComparison) -> list[tuple[str, str]]:
    # Return two lines, about the model and about the text.
    evaluation, digest = c.run.config.evaluation, str(c.run.manifest.weights)[:12]
    parameters = short_count(c.runs["parameters"].iloc[0])
    model = f"{c.subject['path']}, weights {digest}, {parameters} parameters, trained on windows of "
    model += f"{c.training_length} tokens"
    # None: the manifest does not record rotations; {}: there are none.
    rotations = c.subject.get("rotations")
    if rotations:
        model += f", rotations {json.dumps(rotations)}"
    elif rotations is not None:
        model += ", no rotations"
    dtypes = sorted({str(result.header["dtype"]) for result in c.run.results()[0]})
    text = f"data={c.run.config.data.name}, {c.documents} documents, {c.long_enough} of them longer than {c.longest} "
    text += f"tokens; at most {evaluation.windows} windows for each length; a token is "
    text += f"{c.subject['characters_per_token']:.2f} characters"
    return [(c.name, f"{model}; scored in {words(dtypes)}"), (c.name, text)]


def setup_of_runs(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return (name, text) pairs that describe the set-up: experiment, data, model, training, runs and versions.

    Arguments: runs, a row per run.
    """
    # Compared runs share these settings, so the first one's hold for all, but for those that are factors.
    config = _with_both_levels(config_of(str(runs["path"].iloc[0])))
    experiment = ", ".join(dict.fromkeys(runs["experiment"]))
    seeds = ", ".join(map(str, sorted(set(runs["seed"]))))

    def distinct(column: str) -> str:
        return ", ".join(sorted(set(runs[column].dropna().astype(str)))) or "unknown"

    # Each task has settings of its own.
    if config["data"].get("source") == "task":
        task_paths = runs.groupby("data.name", sort=False)["path"].first()
        data = [(f"data={name}", _settings(config_of(path), "data")) for name, path in task_paths.items()]
    else:
        data = [("data and tokenizer", _settings(config, "data", "tokenizer") + _context_bytes(runs))]
    num_codes = runs["fingerprint.code"].nunique()
    versions = [f"{v.removeprefix('version.')} {distinct(v)}" for v in map(str, runs) if v.startswith("version.")]
    machine = f"{distinct('device')} ({distinct('dtype')}), {min(runs['started'])[:10]}"
    code = f"; {num_codes} versions of the code" if num_codes > 1 else ""
    prints = ", ".join(f"{title} {distinct(f'fingerprint.{name}')[:12]}" for title, name in _PRINTS.items())
    facts = [
        (
            "experiment",
            ": ".join(filter(None, (experiment, chosen_experiment(config, experiment).get("description")))),
        ),
        *data,
        ("model", _settings(config, "model")),
        ("train", f"{distinct('num_steps')} steps, lr={distinct('train.lr')}, {_settings(config, 'train')}"),
        (
            "runs",
            f"seeds {seeds}; {machine}; {', '.join(versions)}{code}; fingerprints: {prints}",
        ),
    ]
    facts += _commands(runs, experiment)
    # Steps with values that were not finite changed nothing.
    skipped = runs[runs["skipped_steps"] > 0]
    if len(skipped):
        listed = ", ".join(f"{r.scheme} seed {r.seed}: {r.skipped_steps}" for r in skipped.itertuples())
        facts.append(("skipped steps", listed))
    return facts


def _commands(runs: pd.DataFrame, experiment: str) -> list[tuple[str, str]]:
    # Return a line with the commands that train and pack the runs, or none unless all recorded the same settings.
    verb, of_one_run = "train -m", {"scheme", "seed", "runs_dir"}
    last = f"seed={','.join(map(str, sorted(set(runs['seed']))))}"
    if "searched" in runs and runs["searched"].all():
        verb, last = "tune", f"experiment_name={experiment}"
        of_one_run |= {"scheme.lr", "experiment_name"}
    schemes, settings = list[str](), set[str]()
    for path in runs["path"]:
        overrides = run_at(path).manifest.command or ()
        schemes += [word for word in overrides if word.startswith("scheme=")]
        settings.add(shlex.join(word for word in overrides if word.partition("=")[0] not in of_one_run))
    # A run without a recorded command has no scheme.
    if len(settings) > 1 or len(schemes) < len(runs):
        return []
    joined = ",".join(dict.fromkeys(schemes)).replace(",scheme=", ",")
    command = " ".join(filter(None, ("posbench", verb, *settings, joined, last)))
    return [("commands", f"`{command}`, `posbench pack {experiment}`")]


def _with_both_levels(config: Mapping[str, Any]) -> dict[str, Any]:
    # Return the configuration with "first or second level" as the value of each setting that is a factor's.
    factors = (config.get("experiment") or {}).get("setups") or {}
    levels: dict[str, list[str]] = {}
    for word in chain.from_iterable(chain.from_iterable(factors.values())):
        key, _, value = word.partition("=")
        levels.setdefault(key, []).append(value)
    shown = dict(config)
    for key, values in levels.items():
        group, _, name = key.partition(".")
        # A choice such as data=sotu stands for all settings of its group.
        shown[group] = {**shown[group], name: " or ".join(values)} if name else {group: " or ".join(values)}
    return shown


def _context_bytes(runs: pd.DataFrame) -> str:
    # Tokens of several tokenizers or texts have several sizes.
    if runs["fingerprint.tokenizer"].nunique() > 1 or runs["fingerprint.data"].nunique() > 1:
        return ""
    # Bytes follow from the two units of the same loss: nats per token and bits per byte.
    run = runs.dropna(subset="bits_per_byte").head(1)
    if run.empty:
        return ""
    length, loss, bits = (float(run[name].iloc[0]) for name in ("train.context_length", "loss", "bits_per_byte"))
    size = loss / math.log(2) / bits
    return f", a token is {size:.2f} bytes of text, the context of {length:.0f} tokens {length * size:.0f} bytes"


def _settings(config: Mapping[str, Any], *groups: str) -> str:
    shown = []
    for name in groups:
        settings = config.get(name) or {}
        if name == "train" and "optimizer" in settings:
            settings = {"optimizer": settings["optimizer"], **settings_in_use(settings)}
        shown += [f"{key}={value}" for key, value in settings.items() if value and key not in HIDDEN_SETTINGS]
    return ", ".join(shown)


_PRINTS = {"text": "data", "tokenizer": "tokenizer"}  # fingerprints that a report shows, by title

# Fields of the configuration that do not matter for the comparison, or that a report shows elsewhere.
HIDDEN_SETTINGS = {
    "name", "steps", "tied_embeddings", "accumulation", "lr", "lr_end_ratio", "decay_ratio", "grad_clip", "text_column",
    "train_split", "validation_split", "test_split", "validation_fraction", "test_fraction", "tuning_fraction",
    "cache_dir", "articles", "device", "dtype", "compile", "validate_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "max_skipped_steps", "lr_of", "branch_tokens", "eps", "norm_eps", "training_bytes",
    "arms", "validation_tokens", "order_every", "tokens", "from_run",
}  # fmt: skip
