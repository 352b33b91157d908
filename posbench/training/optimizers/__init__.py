"""Choose the optimizer that `train.optimizer` names: `adamw`, `muon`, or a class in a file, `my_optimizer.py:Lion`."""

from __future__ import annotations

from posbench.catalogue.classes import class_named
from posbench.catalogue.own_files import load, parse_class_path
from posbench.training.optimizers.adamw import AdamW
from posbench.training.optimizers.muon import Muon
from posbench.training.optimizers.optimizer import Optimizer

__all__ = ["AdamW", "Muon", "Optimizer", "optimizer_class"]

_OURS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of the optimizer `name`. Raises: ConfigError if there is none."""
    base: type = Optimizer
    if parse_class_path(name) is not None:
        return load(name, base)
    return class_named(name, dict(_OURS), "train.optimizer", base)
