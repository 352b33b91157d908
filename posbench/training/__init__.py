"""Pre-train models: `train(config)` starts, resumes or finds the run that a configuration names."""

from posbench.training.step import Died
from posbench.training.train import train

__all__ = ["Died", "train"]
