"""Refactoring may not change initial weights, logged losses or the fingerprints of packed runs.

Weights are drawn in float64 and hashed, so they are equal on every machine. Losses agree between kinds of CPU to about
six digits. A change that is meant to move them writes the values that the failing test shows to golden_runs.json.
"""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from posbench.catalogue.choices import choices
from posbench.runs import find_runs
from posbench.runs.fingerprints import comparable_fingerprint, config_fingerprint, identity
from posbench.training import train
from posbench.verify import certificate_config
from tests.rows import rows

FILE = Path(__file__).with_name("golden_runs.json")
GOLDEN = json.loads(FILE.read_text())
REFERENCE = Path(__file__).parents[2] / "runs" / "reference"


def summary(run):
    """Return a digest of the initial weights that schemes share, and the logged losses of 12 steps."""
    weights = run.manifest.fingerprints.initial_weights
    losses = [round(row["loss"], 6) for row in run.logged if row["kind"] == "train"]
    return {"weights": sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()[:16], "losses": losses}


@pytest.mark.parametrize("scheme", rows(fast=("alibi", "gdn", "linear_qk_rope", "mla", "nope", "qkvo_rope")))
def test_a_short_run_of_every_scheme_is_what_it_was(scheme, config):
    layers = max(4, certificate_config(scheme).model.num_layers)  # all schemes of a list that alternates
    run = train(config(f"scheme={scheme}", f"model.num_layers={layers}", "model.num_heads=4"))
    now, golden = summary(run), GOLDEN[scheme]
    assert now["weights"] == golden["weights"]
    assert now["losses"] == pytest.approx(golden["losses"], abs=2e-5)


def experiments():
    """Return the folder of each reference experiment whose runs began with initial weights."""
    return sorted({run.path.parents[1] for run in find_runs(REFERENCE) if not run.manifest.continued})


@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiments(), ids=lambda folder: str(folder.relative_to(REFERENCE)))
def test_a_packed_runs_configuration_has_the_fingerprint_it_had(experiment):
    run = next(run for run in find_runs(experiment) if not run.manifest.continued)
    manifest = run.manifest
    device = {key: manifest.identity[f"device.{key}"] for key in ("type", "dtype", "compiled")}
    assert config_fingerprint(identity(run.config, device)) == config_fingerprint(manifest.identity)


def test_a_setting_that_came_later_at_its_default_does_not_part_runs():
    identity = find_runs(REFERENCE / "demo_cpu")[0].manifest.identity
    older = {key: value for key, value in identity.items() if key not in ("train.grad_clip", "model.tied_embeddings")}
    assert comparable_fingerprint(older) == comparable_fingerprint(identity)
    assert comparable_fingerprint(identity | {"train.grad_clip": 2.0}) != comparable_fingerprint(identity)


def test_every_scheme_has_golden_values():
    assert set(GOLDEN) == set(choices("scheme"))
