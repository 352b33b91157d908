"""Choose the optimizer that `train.optimizer` names: a class in a file here, a package's, or `my_optimizer.py:Lion`."""

from __future__ import annotations

from functools import cache

from posbench.catalogue.classes import check_options, class_named, classes_in, with_packages
from posbench.catalogue.own_files import load, parse_class_path
from posbench.config import TrainConfig
from posbench.training.optimizers.adamw import AdamW
from posbench.training.optimizers.muon import Muon
from posbench.training.optimizers.optimizer import Optimizer

__all__ = ["AdamW", "Muon", "Optimizer", "optimizer_class"]


@cache
def _ours() -> dict[str, type[Optimizer]]:
    classes = classes_in("posbench.training.optimizers", Optimizer)  # type: ignore[type-abstract]
    return {cls.__name__.lower(): cls for cls in classes.values()}


def optimizer_class(train: TrainConfig) -> type[Optimizer]:
    """Return the class of the optimizer that `train` names.

    Raises: ConfigError if there is none, or if it lacks one of `train.optimizer_options`.
    """
    base: type = Optimizer
    cls: type[Optimizer]
    if parse_class_path(train.optimizer) is not None:
        cls = load(train.optimizer, base)
    else:
        cls = class_named(train.optimizer, with_packages(_ours(), "posbench.optimizers"), "train.optimizer", base)
    check_options("train.optimizer_options", train.optimizer, cls, train.optimizer_options)
    return cls
