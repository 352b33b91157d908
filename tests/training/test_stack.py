"""Runs that train as one have the losses that they have alone, each with its own rate, clipping, health and folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from posbench.catalogue.choices import choices
from posbench.composition.compose import compose
from posbench.data import Batch
from posbench.model.decoder import build_model
from posbench.runs import Run, run_folder
from posbench.system.device import choose_device
from posbench.training import train
from posbench.training.loop import Training
from posbench.training.stack import Stack, refusal_to_stack, stack_key
from posbench.training.stacked_runs import stacks_of, train_stacked
from posbench.training.step import Died, TrainingStep
from tests.refusals import refuses

V = 64
# Rows with layers of several kinds need as many layers as their pattern has.
PATTERNS = {"window_rope_nope": 3, "deepseek_v4": 4, "hype": 4, "hybrid_kda_nope": 4}


def configs_of(scheme, *words):
    """Return three configurations that differ in seed and rate."""
    layers = PATTERNS.get(scheme, 6 if scheme in ("llama_4", "gemma_3", "qwen3_next", "inkling_layers") else 2)
    common = [f"scheme={scheme}", "model=tiny", f"model.num_layers={layers}", "train.context_length=32"]
    common += [
        "train.batch_size=4",
        "train.steps=60",
        "train.device=cpu",
        "train.compile=false",
        "train.dtype=float32",
        *words,
    ]
    return [compose([*common, f"seed={seed}", f"train.lr={rate}"]) for seed, rate in ((0, 1e-3), (1, 4e-3), (2, 2e-3))]


def steps_of(configs, dtype):
    device = replace(choose_device(configs[0].train), dtype=dtype)
    return [TrainingStep(config, build_model(config, V).to(dtype), device) for config in configs]


def batches(number):
    random = np.random.default_rng(number)
    return [Batch(random.integers(0, V, (4, 33))) for _ in range(3)]


def sent(batch):
    return batch.each(torch.from_numpy)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_compiled_stack_takes_the_same_steps(optimizer):
    configs = configs_of("alibi", f"train.optimizer={optimizer}")
    plain = Stack(steps_of(configs, torch.float64), configs)
    copies = steps_of(configs, torch.float64)
    for copy in copies:
        copy.device = replace(copy.device, compiled=True)
    compiled = Stack(copies, configs)
    for n in range(3):
        expected, outcome = (stack([n] * 3, batches(n)) for stack in (plain, compiled))
        torch.testing.assert_close(outcome, expected, rtol=1e-5, atol=0)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, rtol=0, atol=1e-9)
        assert copies[0].optimizer.weights[name].data_ptr() == compiled.weights[name].data_ptr()


ROWS = sorted(choices("scheme"))
FAST = ("qk_rope", "path", "gdn", "t5")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[] if row in FAST else pytest.mark.slow) for row in ROWS])
def test_a_copys_losses_are_those_of_the_run_alone(row):
    """Losses are summed in float32, so they are compared through the weights that they lead to."""
    configs = configs_of(row, "train.grad_clip=0")
    alone, copies = steps_of(configs, torch.float64), steps_of(configs, torch.float64)
    stack = Stack(copies, configs)
    for n in range(3):
        for step, batch in zip(alone, batches(n), strict=True):
            step(n, sent(batch))
        stack([n] * 3, batches(n))
    for step, copy in zip(alone, copies, strict=True):
        for (name, expected), weight in zip(step.model.named_parameters(), copy.model.parameters(), strict=True):
            torch.testing.assert_close(
                weight, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_copy_with_bad_weights_changes_nothing_in_the_others_and_keeps_its_own():
    configs = configs_of("qk_rope", "train.optimizer=muon")
    alone, copies = steps_of(configs, torch.float64), steps_of(configs, torch.float64)
    for step in (alone[1], copies[1]):
        step.model.blocks[0].ffn.down.weight.data[0, 0] = torch.nan
    stack = Stack(copies, configs)
    before = copies[1].model.embedding.weight.clone()
    outcomes = [stack([n] * 3, batches(n)) for n in range(2)]
    assert not outcomes[-1][1].isfinite().all() and outcomes[-1][[0, 2]].isfinite().all()
    assert torch.equal(copies[1].model.embedding.weight, before)
    for n in range(2):
        alone[0](n, sent(batches(n)[0]))
    torch.testing.assert_close(copies[0].model.embedding.weight, alone[0].model.embedding.weight, rtol=0, atol=1e-8)


def test_only_runs_that_differ_in_seed_and_rates_are_stacked(config):
    first = config()
    same = [config("seed=3"), config("train.lr=0.1"), config("scheme.lr=0.1", "train.weight_decay=0", "seed=9")]
    assert {stack_key(first), *map(stack_key, same)} == {stack_key(first)}
    others = [
        config("scheme=nope"),
        config("train.steps=13"),
        config("train.optimizer=muon"),
        config("model.ffn_dim=8"),
    ]
    assert stack_key(first) not in map(stack_key, others)
    sweep = [first, config("scheme=nope"), *same, config("scheme=nope", "seed=4")]
    assert stacks_of(sweep, print) == [], "on a CPU nothing is stacked by default"
    forced = [config(*words, "launch.stack=2") for words in ([], ["scheme=nope"], ["seed=3"], ["seed=4"])]
    assert stacks_of(forced, print) == [[0, 2], [3], [1]]
    refuses(r"launch\.stack='many' is not a number of steps|launch\.stack", config, "launch.stack=many")


def test_a_scheme_that_torch_cannot_stack_trains_alone_and_the_reason_is_said(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from posbench.schemes import Scheme\n\n\n"
        "class Peeks(Scheme):\n"
        "    def q(self, x, pos):\n"
        "        return x if float(x.sum()) > -1e9 else -x\n"
    )
    said = []
    assert stacks_of([config("scheme=mine.py:Peeks", "launch.stack=4")], said.append) == []
    assert "its runs train one by one" in said[0] and "torch cannot stack them" in said[0]
    assert refusal_to_stack(config("scheme=qk_rope")) is None


def logged(run):
    return [{key: row[key] for key in ("step", "kind", "loss")} for row in run.logged if row["kind"] != "order"]


def test_a_stack_with_one_that_dies_one_resumed_and_two_rates(config, monkeypatch):
    """Six runs; one is cut off and resumed, one diverges. All others are as alone, and none waits for the dead one."""
    names = [(seed, rate) for rate in (1e-3, 4e-3) for seed in range(3)]

    def make(seed, rate, *words):
        return config(
            f"seed={seed}", f"scheme.lr={rate}", f"experiment_name=lr={rate}", "train.checkpoint_every=4", *words
        )

    configs = [make(seed, rate) for seed, rate in names]
    validate, victim = Training.validate, run_folder(configs[4])

    def dying(training):
        if training.run.path == victim and training.state.steps_done > 4:
            raise Died("its validation loss is NaN")
        validate(training)

    monkeypatch.setattr(Training, "validate", dying)
    interrupted = make(2, 1e-3, "train.max_skipped_steps=9")
    save = Training._save

    def stopping(training):
        save(training)
        if training.run.path == run_folder(interrupted) and training.state.steps_done == 4:
            raise RuntimeError("the power is cut")

    monkeypatch.setattr(Training, "_save", stopping)
    [failed] = train_stacked([interrupted])
    assert isinstance(failed, RuntimeError)
    monkeypatch.setattr(Training, "_save", save)
    outcomes = train_stacked(configs)
    assert isinstance(outcomes[4], Died) and Run(victim).manifest.status == "died"
    assert sum(isinstance(outcome, Run) for outcome in outcomes) == 5
    monkeypatch.setattr(Training, "validate", validate)
    for number in (2, 5):
        seed, rate = names[number]
        alone = train(make(seed, rate, f"experiment_name=alone-{rate}"))
        stacked = outcomes[number]
        assert isinstance(stacked, Run) and stacked.manifest.device["stacked"] and stacked.manifest.loss
        assert [row["step"] for row in logged(stacked)] == [row["step"] for row in logged(alone)]
        for ours, theirs in zip(logged(stacked), logged(alone), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert stacked.manifest.fingerprints.batches == alone.manifest.fingerprints.batches
        assert stacked.manifest.fingerprints.config == alone.manifest.fingerprints.config, "they may share a table"
    assert [run.manifest.loss for run in train_stacked(configs[:1]) if isinstance(run, Run)] == [
        outcomes[0].manifest.loss
    ]
