"""Turn the factors of an experiment into setups: run k of a scheme has the k-th combination of the factors' levels.

    experiment:
      setups:
        optimizer: [[train.optimizer=adamw], [train.optimizer=muon]]
        head_shape: [[model.num_heads=6], [model.num_heads=2, model.head_dim=48]]

Setup k has seed k for all schemes, so it gives one gap that is paired in weights and batches. Further seeds, counted on
from the number of setups, replicate them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from posbench.catalogue.choices import choices, settings_in
from posbench.config import ConfigError

MOST_FACTORS = 7
# Columns of a Hadamard matrix of 16 rows that have an odd number of bits. A product of two has an even number, so no
# effect of a factor is the effect of two others together (resolution IV).
_COLUMNS, _BLOCK = (1, 2, 4, 8, 7, 11, 13), 14

Levels = Sequence[Sequence[str]]  # overrides of the first and of the second level


def design(factors: int) -> NDArray[np.bool_]:
    """Return which level each setup has, [setups, factors]: False is the first level, True the second.

    Up to three factors have all combinations. More have 16 setups of resolution IV, of which the first eight are a
    block of resolution III. Raises: ConfigError for no factor, or more than seven.
    """
    if not 1 <= factors <= MOST_FACTORS:
        nearest = min(max(factors, 1), MOST_FACTORS)
        raise ConfigError(f"experiment.setups has {factors} factors: give 1 to {MOST_FACTORS}, such as {nearest}")
    if factors <= 3:
        return np.array(list(itertools.product([False, True], repeat=factors)))
    rows = sorted(range(16), key=lambda row: _is_odd(row & _BLOCK))
    levels = [_is_odd(row & column) for row, column in itertools.product(rows, _COLUMNS[:factors])]
    return np.reshape(levels, (len(rows), factors))


def aliases(factors: int) -> str:
    """Return what the design of so many factors cannot tell apart, in a sentence."""
    setups = f"{len(design(factors))} setups of {factors} factors"
    if factors <= 4:
        return f"{setups}, all combinations"
    block = "setups 0 to 7 alone do not tell a factor's effect from pairs of others"
    return f"{setups}, resolution IV: pairs of factors are confounded with other pairs; {block}"


def _is_odd(number: int) -> bool:
    return bool(number.bit_count() % 2)


def setup_words(setups: Mapping[str, Levels], seed: int) -> list[str]:
    """Return the overrides of the setup that this seed has. Raises: ConfigError for factors without two levels."""
    for name, levels in setups.items():
        if len(levels) != 2 or not all(isinstance(level, Sequence) and not isinstance(level, str) for level in levels):
            raise ConfigError(f"experiment.setups.{name} must have two levels, lists of overrides: [[a=1], [a=2]]")
    table = design(len(setups))
    is_second = table[seed % len(table)]
    chosen = [levels[int(second)] for levels, second in zip(setups.values(), is_second, strict=True)]
    return list(itertools.chain.from_iterable(chosen))


def with_setup(words: Sequence[str], setups: Mapping[str, Levels]) -> list[str]:
    """Return a run's words with the overrides of its setup. Raises: ConfigError if a word sets such a key otherwise."""
    values = dict(word.lstrip("+").partition("=")[::2] for word in words)
    if not setups:
        return [*words]
    try:
        seed = int(values.get("seed", "0").strip("'\""))
    except ValueError:
        return [*words]  # Hydra says what is wrong with such a seed
    added = setup_words(setups, seed)
    for word in added:
        key, _, value = word.partition("=")
        if values.get(key, value) != value:
            raise ConfigError(f"{key}={values[key]} is given, and a factor of experiment.setups sets it: leave it out")
    return [*words, *(word for word in added if word not in words)]


def setups_named(words: Sequence[str], *folders: Path) -> Mapping[str, Levels]:
    """Return the factors of the experiment that words such as `experiment=setups` name; {} if it has none.

    Arguments: folders, the user's configuration folders.
    """
    names = [word.partition("=")[2] for word in words if word.startswith("experiment=")]
    file = choices("experiment", *folders).get("".join(names[-1:]))
    if file is None:
        return {}
    experiment = settings_in(file).get("experiment")
    return (experiment.get("setups") or {}) if isinstance(experiment, dict) else {}
