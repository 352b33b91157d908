"""Pre-train models: `train(config)` starts, resumes, or returns the finished run that `config` names."""

from posbench.training.loop import train
from posbench.training.step import Died

__all__ = ["Died", "train"]
