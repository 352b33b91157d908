"""The pre-training loop: `train(config)` makes, resumes or finds the run that a configuration names."""

from posbench.training.loop import Died, train

__all__ = ["Died", "train"]
