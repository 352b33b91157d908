"""Run folders with known losses, in the exact form that training and evaluation write them."""

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pandas as pd
import yaml

from posbench.analysis.comparison import build
from posbench.analysis.table import read
from posbench.catalogue.choices import choices, read_row
from posbench.composition.compose import compose
from posbench.config import Config
from posbench.reporting.report import page_about
from posbench.runs import Run, append_metrics, find_runs
from posbench.runs.finding import REFERENCE
from posbench.runs.fingerprints import identity
from posbench.runs.manifest import Fingerprints
from posbench.runs.results import ResultKey

T = 256  # training length, tokens
BYTES_PER_TOKEN = 3  # about
RELATIVE = {"nope", "qk_rope", "vo_rope", "qkvo_rope", "alibi"}


@dataclass
class World:
    """The planted effects: true loss of each scheme, effect of a seed on all schemes, noise of a (scheme, seed)."""

    effects: dict[str, float]  # scheme -> nats/token above 3.0
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    seed_sd: float = 0.02
    noise_sd: float = 0.0015
    documents: int = 12
    lengths: tuple[int, ...] = ()
    experiment: str = "demo"
    overrides: tuple[str, ...] = (
        "model=tiny",
        "experiment=demo",
        f"train.context_length={T}",
        "train.optimizer=adamw",
        "train.lr=5e-3",
    )
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    probes: bool = False


def fabricate(root, world):
    """Write every run of the world under `root/<experiment>` and return that folder."""
    of_seed = {seed: world.random.normal(0, world.seed_sd) for seed in world.seeds}
    split = {name: _windows(world, name) for name in ("validation", "test")}
    for scheme, effect in world.effects.items():
        for seed in world.seeds:
            level = 3.0 + effect + of_seed[seed] + world.random.normal(0, world.noise_sd)
            write_run(root, world, scheme, seed, level, split)
    return root / world.experiment


def fabricate_search(root, effects, seeds):
    """Write the runs of a search of `demo` at these learning rates below root/demo-tune, and return root/demo."""
    for rate, of_rate in effects.items():
        world = World(of_rate, tuple(seeds[rate]))
        folder, target = fabricate(root / "written", world), root / "demo-tune" / f"lr={rate!r}"
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        for run in find_runs(target):
            own = {"train.lr": rate, "scheme.own_lr": True}
            run.update_manifest(experiment=target.name, identity=run.manifest.identity | own)
    return root / "demo"


def searched(root, **levels):
    """Write a finished search, which keeps 0.001 and 0.002, and return root/demo.

    `levels` are losses of schemes above 3.0; they rise with the rate.
    """
    rates = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
    effects = {rate: {scheme: level + 5 * rate for scheme, level in levels.items()} for rate in rates}
    return fabricate_search(root, effects, {rate: range(5 if rate < 3e-3 else 2) for rate in rates})


def _windows(world, split):
    """Return windows of up to 64 targets over documents; `ease` shifts the loss of every model, 0 on average."""
    document = np.repeat(np.arange(world.documents), world.random.integers(2, 9, world.documents))
    targets = world.random.choice([64, 41, 9], len(document), p=[0.7, 0.2, 0.1]).astype(np.int32)
    ease = world.random.normal(0, 0.3, world.documents)[document] + world.random.normal(0, 0.1, len(document))
    ease -= np.average(ease, weights=targets)
    start = np.cumsum(targets) - targets + 1
    text = BYTES_PER_TOKEN * targets + world.random.integers(0, 20, len(document))
    return pd.DataFrame({"document": document, "start": start, "targets": targets, "bytes": text, "ease": ease})


def write_run(root, world, scheme, seed, level, split, **manifest):
    """Write a run folder with mean validation loss `level`, nats/token. `manifest` overrides keys of run.json."""
    run = Run(root / world.experiment / scheme / f"seed={seed}")
    run.path.mkdir(parents=True, exist_ok=True)
    mapping = {**_configuration(scheme, world.experiment, world.overrides), "seed": seed}
    (run.path / "config.yaml").write_text(yaml.safe_dump(mapping), encoding="utf-8")
    validation = _scored(split["validation"], level, world.random)
    loss = float(validation["nll"].sum() / validation["targets"].sum())
    run.write_manifest(replace(_manifest(world, scheme, seed, loss), **manifest))
    _metrics(run.path / "metrics.jsonl", level, world.random)
    write_evaluation(run, "validation", T, "validation", validation)
    for length in world.lengths:
        beyond = max(0.0, math.log2(length / T))
        rise = beyond * (0.02 if scheme == "alibi" else 0.8 if scheme == "sinusoidal" else 0.25)
        worse = level + rise - 0.1 * math.log2(length / T) * (beyond == 0)
        write_evaluation(run, "fixed", length, "test", _scored(split["test"], worse, world.random))
        write_evaluation(run, "nonoverlapping", length, "test", _scored(split["test"], worse + 0.05, world.random))
    if world.probes:
        write_evaluation(run, "order", T, "test", _order(world, scheme, seed))
    return run


@cache
def _configuration(scheme, experiment, overrides):
    """Return the resolved configuration; a scheme that is not in conf/ is `nope` under a name of its own."""
    known = scheme in choices("scheme")
    row = read_row(scheme if known else "nope").to_mapping()
    return {**_composed(experiment, overrides), "scheme": row if known else {**row, "name": "stranger"}}


@cache
def _composed(experiment, overrides):
    return compose(
        ["scheme=nope", f"experiment_name={experiment}", "experiment.primary=[]", "tracking=none", *overrides]
    ).to_mapping()


@cache
def _identity(scheme, experiment, overrides):
    config = Config.from_mapping(_configuration(scheme, experiment, overrides))
    return identity(config, {"type": "cpu", "dtype": "float32", "compiled": False})


@cache
def _reference_manifest():
    """Return the manifest of a run of a pack."""
    return find_runs(REFERENCE / "demo_cpu")[0].manifest


def _manifest(world, scheme, seed, loss):
    return replace(
        _reference_manifest(),
        experiment=world.experiment,
        scheme=scheme,
        seed=seed,
        fingerprints=Fingerprints(
            data="da7a",
            tokenizer="70ce",
            config="c0f1",
            code="c0de",
            initial_weights={"attention.q": f"we19{seed}", "attention.k": f"we1a{seed}"},
            batches=f"ba7c{seed}",
        ),
        identity=_identity(scheme, world.experiment, world.overrides),
        is_relative=scheme in RELATIVE,
        loss=loss,
        bits_per_byte=loss / math.log(2) / BYTES_PER_TOKEN,
        weights=f"weights of {scheme} under {seed}",
    )


def _scored(windows, level, random):
    """Return windows with slightly noisy losses whose token-weighted mean is `level`."""
    noise = random.normal(0, 0.01, len(windows))
    noise -= np.average(noise, weights=windows["targets"])
    return windows.drop(columns="ease").assign(nll=(level + windows["ease"] + noise) * windows["targets"])


def _order(world, scheme, seed):
    """Return scores of order that fall with distance to 0 beyond 16 tokens, and 0 for nope; identity falls slower."""
    rows, random = [], np.random.default_rng([seed, len(scheme)])
    for document, n in itertools.product(range(world.documents), range(8)):
        low, high = (0 if n == 0 else 2 ** (n - 1)) + 1, 2**n + 1
        lost = 0.0 if n > 4 or scheme == "nope" else 0.6 / 2**n
        noise, targets = random.normal(0, 0.02, 3), 2 * (high - low)
        nll = targets * (3.0 + random.normal(0, 0.3) + np.array([0, lost, 0.8 / 1.5**n]) + noise)
        rows.append((document, low, high, targets, *nll))
    columns = ["document", "bucket_start", "bucket_end", "targets", "nll", "shuffled_nll", "other_nll"]
    return pd.DataFrame(rows, columns=columns)


def write_evaluation(run, protocol, length, split, rows, *eval_options, **header):
    """Store windows and their header like `posbench eval`; `header` adds or replaces entries."""
    header = {
        "split": split,
        "documents": int(rows["document"].nunique()),
        "windows": len(rows),
        "settings": {"targets": 64},
        "weights": run.manifest.weights,
        **header,
    }
    run.store(ResultKey(protocol, length, eval_options, header.get("anchor", 0)), rows, header)


def _metrics(path, level, random):
    for step in range(0, 196, 15):
        loss = level + 5.3 * math.exp(-6 * step / 195) - 5.3 * math.exp(-6)
        progress = {"step": step, "tokens": step * 2048}
        rates = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 2e4}
        append_metrics(path, {"kind": "train", **progress, "loss": loss + random.normal(0, 0.05), **rates})
        append_metrics(path, {"kind": "validation", **progress, "loss": loss, "bits_per_byte": loss / 2})


def comparison(folder, **options):
    """Return the comparison of the runs in a folder."""
    return build(*read([folder]), **options)


def change_fingerprints(run, **fingerprints):
    """Change a run's fingerprints, and store its results again, since they name its text."""
    results, _ = run.results()
    run.update_manifest(fingerprints=replace(run.manifest.fingerprints, **fingerprints))
    for result in results:
        run.store(result.key, result.windows, result.header)


def run_of(folder, scheme, seed):
    """Return the run in an experiment's folder."""
    return Run(folder / scheme / f"seed={seed}")


def rescore(run, protocol, length, change, **header):
    """Store other windows in place of a result (None: of all lengths), as if the run had been scored so."""
    for result in run.results()[0]:
        if result.protocol == protocol and length in (None, result.length):
            run.store(result.key, change(result.windows), {**result.header, **header})


def paragraph(comparison):
    """Return the paragraph of a report that names winners."""
    return page_about([comparison]).paragraph
