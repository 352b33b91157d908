"""Pre-training: `train(config)` makes, resumes or finds the run that a configuration names."""

from posbench.training.loop import Died
from posbench.training.run import train

__all__ = ["Died", "train"]
