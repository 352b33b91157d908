"""Pre-train models: `train(config)` starts, resumes or, if finished, returns the run that `config` names."""

from posbench.training.step import Died
from posbench.training.train import train

__all__ = ["Died", "train"]
