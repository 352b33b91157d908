"""The loss of tasks: the sum over the answers of a whole batch divided by their number, however it is cut."""

import pytest
import torch
import torch.nn.functional as F

from posbench import build_model, compose
from posbench.data import Batch
from posbench.system.device import choose_device
from posbench.training.step import TrainingStep

WORDS = ["model=tiny", "scheme=qk_rope", "train.batch_size=8", "train.context_length=12", "train.steps=3"]


def config(*words):
    return compose([*WORDS, "train.dtype=float32", "train.device=cpu", "train.compile=false", *words])


def uneven():
    """Return a batch whose row n has n % 3 answers, so some parts have many and some rows none."""
    tokens = torch.randint(20, (8, 13), generator=torch.Generator().manual_seed(0))
    answers = tokens[:, 1:].clone()
    for n in range(8):
        answers[n, n % 3 :] = -1
    return Batch(tokens, answers)


def trained(batch, *words):
    """Return the losses of three steps, and the weights after them, in float64: AdamW makes much of rounding."""
    run_config = config(*words)
    step = TrainingStep(run_config, build_model(run_config, 20).double(), choose_device(run_config.train))
    step.model.compute_dtype = torch.float64
    losses = torch.stack([step(n, batch)[0] for n in range(3)])
    return losses, [p.detach() for p in step.model.parameters()]


def test_it_is_the_mean_over_the_answers_alone():
    batch, run_config = uneven(), config()
    model = build_model(run_config, 20)
    logits = model(batch.inputs).flatten(0, 1)
    expected = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=-1)
    assert torch.allclose(trained(batch)[0][0].float(), expected, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches_train_the_model_that_one_batch_trains(parts):
    losses, weights = trained(uneven())
    in_parts, by_parts = trained(uneven(), f"train.accumulation={parts}")
    assert torch.allclose(losses, in_parts, rtol=0, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(weights, by_parts, strict=True))
