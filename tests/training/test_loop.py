"""Runs: fair between schemes, read back, refused before anything is written."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from posbench import load_run
from posbench.data import prepare
from posbench.runs.run import initial_loss
from posbench.training import train
from tests.refusals import refuses
from tests.schemes.trials import trial


def test_a_run_learns_and_is_read_back(config):
    run = load_run(train(config("scheme=vo_rope", "train.steps=40", "train.lr=1e-2")).path)
    losses = run.metrics.query("kind == 'validation'")["loss"].tolist()
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)  # nothing is known at the start
    assert losses[-1] < losses[0] - 1
    assert run.manifest.status == "finished" and run.manifest.loss < losses[0] - 1
    assert initial_loss(run.logged) == losses[0]
    model = run.load_model()
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 257)
    assert run.tokenizer.decode(run.tokenizer.encode("water").ids) == "water"
    assert run.config.scheme.name == "vo_rope"


@pytest.mark.slow
def test_a_scheme_that_states_no_operations_has_a_run_without_them(config):
    words = ("train.steps=2", "train.warmup_ratio=0", "scheme=nope")
    ours, theirs = (
        train(config(*words)),
        train(config(*words, "scheme.name=own", f"scheme.kind={trial('Gentle').kind}")),
    )
    assert ours.manifest.training_flops > 0 and theirs.manifest.training_flops is None


def test_a_run_says_which_of_its_schemes_no_layer_has(config, capsys):
    row = "scheme=rope_nope_interleaved"
    for layers in (2, 4):
        train(config(row, "train.steps=2", "train.warmup_ratio=0", f"model.num_layers={layers}", f"seed={layers}"))
        says = f"{row}: none of the {layers} layers has nope, so this run does not test it"
        assert (says in " ".join(capsys.readouterr().err.split())) == (layers == 2)


def test_a_scheme_without_a_rate_of_its_own_says_which_it_takes(config, capsys):
    run_config = config("scheme=nope", "train.steps=2", "train.warmup_ratio=0")
    for rates, says in (({"alibi": 1e-3}, True), ({"nope": 1e-3}, False), (None, False)):
        train(
            replace(
                run_config,
                train=replace(run_config.train, lr_of=rates),
                experiment_name=f"rates_{says}_{rates is None}",
            )
        )
        assert ("scheme=nope has no learning rate of its own" in capsys.readouterr().err) == says


def test_the_curve_and_the_table_are_of_the_same_windows_and_end_at_the_same_number(config):
    run_config = config("scheme=qk_rope")
    assert run_config.train.validation_tokens * 4 < prepare(run_config).validation.num_tokens
    run = train(run_config)
    curve = run.metrics.query("kind == 'validation'")
    assert curve["step"].tolist() == [0, 6, 12]
    assert curve["loss"].iloc[-1] == run.manifest.loss and curve["bits_per_byte"].iloc[-1] == run.manifest.bits_per_byte
    [stored] = [result for result in run.results()[0] if result.protocol == "validation"]
    assert stored.header["nll_mean"] == run.manifest.loss and stored.header["windows"] == 256 // 32


def test_order_is_scored_every_so_many_tokens_and_changes_nothing_else(config):
    words = (
        "scheme=qk_rope",
        "train.context_length=128",
        "train.batch_size=2",
        "train.tokens=2816",
        "train.steps=null",
    )
    scored = train(config(*words, "train.order_every=600", "experiment_name=scored"))
    plain = train(config(*words, "experiment_name=plain"))
    rows = [row for row in scored.logged if row["kind"] == "order"]
    assert [row["step"] for row in rows] == [3, 5, 8, 10, 11] and rows[0]["tokens"] == 768
    scores = {f"order_beyond_{distance}" for distance in (8, 16, 32)}  # 64 needs a context of 256
    copyable = "copyable_order_beyond_32"  # missing if no target can be copied
    assert all(set(row) - {copyable} == {"kind", "step", "tokens"} | scores for row in rows)
    assert all(math.isfinite(row[score]) for row in rows for score in scores)
    other_results = [
        [{**row, "tokens_per_second": 0} for row in run.logged if row["kind"] != "order"] for run in (scored, plain)
    ]
    assert other_results[0] == other_results[1] and scored.manifest.weights == plain.manifest.weights
    assert scored.manifest.identity == plain.manifest.identity
    refuses(
        "in its longest document",
        train,
        config(
            *words, "train.tokens=8k", "train.order_every=4k", "train.context_length=2000", "experiment_name=longer"
        ),
    )
    assert not (scored.path.parents[2] / "longer").exists()
    refuses(
        r"context_length=64 is too short for it", config, *words, "train.order_every=600", "train.context_length=64"
    )


def test_a_run_that_reads_each_document_alone_is_another_run_of_the_same_text(config):
    words = ("train.steps=3", "train.context_length=128", "train.batch_size=16", "train.accumulation=2")
    plain = train(config(*words, "scheme=qk_rope"))
    alone = train(config(*words, "scheme=qk_rope", "data.document_mask=true", "experiment_name=alone"))
    masked, unmasked = alone.manifest.identity, plain.manifest.identity
    assert {key: masked[key] for key in masked.keys() - unmasked.keys()} == {"data.document_mask": True}
    prints = [run.manifest.fingerprints for run in (alone, plain)]
    assert prints[0].data == prints[1].data and prints[0].batches == prints[1].batches
    assert alone.load_model().bos_id == 256 and alone.manifest.loss != plain.manifest.loss


def test_a_run_that_ends_above_its_start_says_so(config, capsys):
    run = train(config("scheme=qk_rope", "train.steps=6", "train.lr=2.0", "train.schedule=constant"))
    initial = initial_loss(run.logged)
    assert initial is not None and run.manifest.loss > initial
    assert f"diverged: its loss of {run.manifest.loss:.4f} is above the" in capsys.readouterr().err


@pytest.mark.slow
def test_schemes_under_one_seed_share_weights_and_batches(config):
    runs = [train(config(f"scheme={name}", "train.steps=3")) for name in ("nope", "sinusoidal", "qkvo_rope")]
    for key in ("initial_weights", "batches", "data", "tokenizer", "config", "code"):
        assert len({str(getattr(run.manifest.fingerprints, key)) for run in runs}) == 1, key
    other_seed = train(config("scheme=nope", "train.steps=3", "seed=1"))
    for key in ("initial_weights", "batches"):
        assert getattr(other_seed.manifest.fingerprints, key) != getattr(runs[0].manifest.fingerprints, key)
    assert len({run.manifest.loss for run in runs}) == 3


def test_the_loss_is_the_mean_of_the_stored_windows_and_of_plain_torch(config):
    import pandas as pd

    run_config = config("scheme=qk_rope", "train.validation_tokens=1_000_000")  # more than there are
    run = train(run_config)
    rows = pd.read_parquet(run.path / "eval" / "validation" / "32.parquet")
    assert rows["nll"].sum() / rows["targets"].sum() == run.manifest.loss
    split = prepare(run_config).validation
    tokens = torch.from_numpy(np.array(split.tokens[: len(split.tokens) // 32 * 32 + 1], dtype=np.int64))
    tokens = tokens[: (len(tokens) - 1) // 32 * 32 + 1]
    inputs, targets = tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)
    with torch.no_grad():
        logits = run.load_model().double()(inputs)
    scored = targets != prepare(run_config).bos_id
    nll = torch.nn.functional.cross_entropy(logits[scored], targets[scored])
    assert run.manifest.loss == pytest.approx(float(nll), abs=1e-5)


def test_a_refused_run_leaves_nothing_behind(config, tmp_path):
    refuses(r"scheme\.bsae", train, config("+scheme.bsae=1"))
    refuses("context", train, config("train.context_length=100000"))
    refuses(r"this machine has \d+ GPUs.*set train\.device=auto or cpu", train, config("train.device=cuda:99"))
    assert not (tmp_path / "runs").exists()
