"""Pre-train models: `train(config)` starts, resumes, or returns the finished run that `config` names."""

from posbench.training.step import Died
from posbench.training.train import train

__all__ = ["Died", "train"]
