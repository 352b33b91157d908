"""The learning rate of each step."""

from __future__ import annotations

import math

from posbench.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of step `step` (0-based): linear warm-up, then cosine, constant or wsd.

    `cosine` falls to `lr_end_ratio * lr` (Loshchilov and Hutter 2017); `wsd` stays at the peak and falls to the same
    rate over the last `decay_ratio` of the steps (Hu et al. 2024, arXiv 2404.06395).
    """
    # A branch, which starts from a longer run's checkpoint, has the longer run's warm-up.
    total, warmup = config.num_steps, config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    end = config.lr_end_ratio * config.lr
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        return end + (config.lr - end) * (1 + math.cos(math.pi * progress)) / 2
    decay_begins = config.decay_begins if config.schedule == "wsd" else total  # a constant rate never decays
    if step < decay_begins:
        return config.lr
    return config.lr + (end - config.lr) * (step - decay_begins + 1) / (total - decay_begins)
