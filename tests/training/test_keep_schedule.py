"""A run that goes on from a checkpoint, with its moments and schedule, is the uninterrupted run if nothing changes."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posbench.data import dataset_of
from posbench.training import train
from posbench.training.loop import Training
from tests.refusals import refuses

WSD = ("train.schedule=wsd", "train.decay_ratio=0.5", "train.checkpoint_every=3", "train.keep_checkpoints=9")


def checkpoint_of(run, step):
    return f"train.from_run={run.path}/checkpoints/step={step:08d}"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_a_change_it_ends_with_the_bytes_of_the_uninterrupted_run(config, optimizer):
    words = (*WSD, f"train.optimizer={optimizer}")
    whole = train(config(*words))
    on = train(config(*words, checkpoint_of(whole, 6), "train.keep_schedule=true", "experiment_name=on"))
    assert on.manifest.weights == whole.manifest.weights
    assert on.manifest.fingerprints.batches == whole.manifest.fingerprints.batches
    assert on.manifest.tokens == whole.manifest.tokens and on.manifest.training_flops == whole.manifest.training_flops
    steps = [[row["step"] for row in run.logged if row["kind"] == "train"] for run in (whole, on)]
    assert steps[0] == steps[1], "the log of the first steps is the source's"


def test_killed_and_resumed_it_ends_with_the_same_bytes(config, monkeypatch):
    source = train(config(*WSD))
    words = (*WSD, checkpoint_of(source, 6), "train.keep_schedule=true", "scheme.base=100")
    whole = train(config(*words, "experiment_name=whole"))
    save = Training._save

    def cut(training):
        save(training)
        if training.state.steps_done == 9:
            raise RuntimeError("the power is cut")

    monkeypatch.setattr(Training, "_save", cut)
    with pytest.raises(RuntimeError, match="power"):
        train(config(*words, "experiment_name=cut"))
    monkeypatch.setattr(Training, "_save", save)
    resumed = train(config(*words, "experiment_name=cut"))
    assert resumed.manifest.weights == whole.manifest.weights != source.manifest.weights
    assert resumed.manifest.continued and resumed.manifest.continued["tokens"] == 6 * 128


def test_longer_windows_keep_moments_and_schedule_and_tokens_per_step(config):
    source = train(config(*WSD))
    words = (*WSD, checkpoint_of(source, 6), "train.keep_schedule=true")
    on = train(config(*words, "train.context_length=64", "train.batch_size=2", "experiment_name=long"))
    rows = {row["step"]: row for row in on.logged if row["kind"] == "train"}
    source_rows = {row["step"]: row for row in source.logged if row["kind"] == "train"}
    assert rows[12]["lr"] == source_rows[12]["lr"] and rows[12]["tokens"] == source_rows[12]["tokens"] == 12 * 128
    moments = [load_file(run.path / "checkpoints/step=00000012/optimizer.safetensors") for run in (on, source)]
    assert moments[0]["norm.weight/step"] == moments[1]["norm.weight/step"] == 12
    assert not torch.equal(moments[0]["norm.weight/exp_avg"], moments[1]["norm.weight/exp_avg"])
    identity = on.manifest.identity
    assert identity["train.context_length"] == 32 and identity["scheme.continued.context_length"] == 64


def test_cut_windows_have_the_targets_of_the_longer_ones_in_the_same_order(config):
    long = config("train.context_length=64", "train.batch_size=2")
    cut = config("train.drawn_length=64", "train.batch_size=4")
    corpus = dataset_of(long, lambda text: None)
    for n in range(3):
        whole, pieces = (corpus.batches(c.train, c.seed).batch(n) for c in (long, cut))
        assert pieces.tokens.shape == (4, 33)
        assert np.array_equal(pieces.targets.reshape(2, 64), whole.targets)
        assert np.array_equal(pieces.inputs.reshape(2, 64), whole.inputs)
    assert "train.drawn_length" not in train(config("experiment_name=plain")).manifest.identity
    refuses(r"train\.drawn_length=48 must be a multiple of train\.context_length=32", config, "train.drawn_length=48")


def test_what_cannot_go_on_is_refused(config):
    source = train(config(*WSD))
    words = (*WSD, checkpoint_of(source, 6), "train.keep_schedule=true", "experiment_name=on")
    refuses(r"needs steps of 128 tokens.*is 256", train, config(*words, "train.context_length=64"))
    refuses(r"keeps the moments of adamw: take train\.optimizer=adamw", train, config(*words, "train.optimizer=muon"))
    refuses(r"has taken 6 steps, and this run has 5: raise train\.tokens", train, config(*words, "train.steps=5"))
    refuses(r"keep_schedule=true goes on from a checkpoint: name it", config, "train.keep_schedule=true")
