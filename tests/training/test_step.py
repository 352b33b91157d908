"""There is one training step: the loop, `posbench bench` and the benchmarks call it and add nothing."""

import pytest
import torch

from posbench import build_model
from posbench.data import prepare
from posbench.system.device import choose_device
from posbench.training import train
from posbench.training.step import TrainingStep


@pytest.mark.parametrize(("flags", "dtype"), [("avx512_bf16", torch.float32), ("amx_bf16 amx_tile", torch.bfloat16)])
def test_a_cpu_computes_in_bfloat16_where_it_has_amx(flags, dtype, config, monkeypatch):
    monkeypatch.setattr("posbench.system.device.cpu_info", lambda: f"flags : {flags}")
    assert choose_device(config("train.dtype=auto", "train.device=cpu").train).dtype == dtype


def test_the_step_on_the_same_batches_ends_with_the_weights_of_the_run(config):
    run_config = config("train.accumulation=2")
    run = train(run_config)
    batches = prepare(run_config).batches(run_config.train, run_config.seed)
    step = TrainingStep(run_config, build_model(run_config, 257), choose_device(run_config.train))
    for n in range(run_config.train.num_steps):
        step(n, batches.batch(n).each(torch.from_numpy))
    trained = dict(run.load_model().named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in step.model.named_parameters())
