"""Compute one cell of a table of tasks by a plain PyTorch loop; only the model, settings and problems are posbench's.

    python benchmarks/plain_task.py data=copy scheme=alibi seed=3 train.lr=3e-3

It trains like `posbench train` with the same overrides, and prints accuracy by length on the problems that `posbench
eval` scores. Sums are in another order, so the figures differ as they would for another seed.
"""

from __future__ import annotations

import math
import sys

import torch
from torch.nn.functional import cross_entropy

from posbench import build_model, compose
from posbench.data import Batch, Problems
from posbench.evaluation.protocols.accuracy import Accuracy
from posbench.training.optimizers.optimizer import decayed_parameters


def main(overrides: list[str]) -> None:
    """Train and test the run that the overrides describe."""
    config = compose(overrides)
    problems, train = Problems(config.data), config.train
    batches, model = problems.batches(train, config.seed), build_model(config, problems.vocab_size)
    decayed = decayed_parameters(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) == decays], "weight_decay": weight}
        for decays, weight in ((True, train.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2))
    steps, warmup, end = train.num_steps, train.warmup_ratio * train.num_steps, train.lr_end_ratio

    def rate(n: int) -> float:
        """Return the learning rate at step `n` relative to its peak: linear warm-up, then a cosine."""
        cosine = (1 + math.cos(math.pi * (n - warmup) / (steps - 1 - warmup))) / 2
        return (n + 1) / warmup if n < warmup else end + (1 - end) * cosine

    def answered(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits before each answer, and the answers."""
        batch = batch.each(torch.from_numpy)
        return model(batch.inputs, positions=batch.positions)[batch.answers >= 0], batch.answers[batch.answers >= 0]

    for n in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * rate(n)
        loss = cross_entropy(*answered(batches.batch(n)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        if (n + 1) % (steps // 10) == 0:
            print(f"step {n + 1}: loss {loss.item():.4f}", file=sys.stderr, flush=True)
    for length in Accuracy().default_lengths(config.data.lengths[1], problems.splits["test"]):
        with torch.no_grad():
            logits, answers = answered(problems.splits["test"].at_length(length, config.evaluation.problems))
        print(f"{length:5} items: accuracy {(logits.argmax(-1) == answers).float().mean():.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
