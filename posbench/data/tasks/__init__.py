"""Find tasks by name: each class in a file of this folder (`copy` is `Copy`), or a user's own, `my_task.py:Sums`.

A task draws problems with exact answers by a random generator, at a length in items:

    problems(length, number, rng) -> tokens, is_answer

A model reads all tokens of a problem and is scored on each answer, given the true tokens before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from posbench.catalogue.classes import check_options, class_named, classes_in, with_packages
from posbench.catalogue.own_files import load, parse_class_path
from posbench.config import ConfigError, TaskConfig

__all__ = ["Task", "alphabet", "build_task", "tasks"]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def alphabet(size: int) -> tuple[str, ...]:
    """Return the first `size` letters. Raises: ValueError unless `size` is a whole number from 1 to 26."""
    if not isinstance(size, int) or not 1 <= size <= len(LETTERS):
        raise ValueError(f"letters must be a whole number from 1 to {len(LETTERS)}")
    return LETTERS[:size]


class Task(ABC):
    """Base class of tasks: a subclass names its tokens and draws problems; its options are keyword arguments.

    A class that changes what it draws must raise its `version`, so that old and new results are never compared.
    """

    version: ClassVar[int] = 1
    tokens: Sequence[str]  # the vocabulary, in the order of the token ids
    learnt: ClassVar[float] = 0.95  # accuracy at the longest trained length from which a run has learnt the task

    @abstractmethod
    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        """Draw `number` random problems of `length` items each, and return their tokens and answers.

        Returns: tokens, int [number, W], with a W that depends only on the length; and a mask of the answers, bool
        [number, W], or [W] if all problems have the same. The first token is never an answer.
        """

    @abstractmethod
    def chance(self, length: int) -> float:
        """Return the accuracy, from 0 to 1, of always giving the most common answer at this length."""

    def width(self, length: int) -> int:
        """Return W, the number of tokens of a problem of `length` items."""
        return int(np.shape(self.problems(length, 1, np.random.default_rng(0))[0])[1])


@cache
def tasks() -> dict[str, type[Task]]:
    """Return {name: class} of all tasks of this folder."""
    return classes_in("posbench.data.tasks", Task)  # type: ignore[type-abstract]


def build_task(config: TaskConfig) -> Task:
    """Return an instance of the task class that `config` names, made with its options.

    Raises: ConfigError for an unknown task or option, and for a class without tokens or with wrong problems.
    """
    is_ours = parse_class_path(config.task) is None
    base: type = Task
    cls = (
        class_named(config.task, with_packages(tasks(), "posbench.tasks"), "data.task", base)
        if is_ours
        else load(config.task, base)
    )
    check_options("data", config.task, cls.__init__, config.options)
    try:
        task = cls(**config.options)
    except (TypeError, ValueError) as error:
        options = ", ".join(f"data.{key}={value}" for key, value in config.options.items())
        raise ConfigError(f"data={config.task} refuses {options}: {error}") from error
    if not hasattr(task, "tokens"):
        raise ConfigError(f"the class of data={config.task} has no tokens")
    # A user's own class may draw anything, so look at two problems of each kind of length before training.
    for length in (*config.lengths, config.longest):
        try:
            tokens, answers = map(np.asarray, task.problems(length, 2, np.random.default_rng(0)))
        except ValueError as error:
            raise ConfigError(f"data={config.task} cannot draw problems of length {length}: {error}") from error
        # A mask of answers for each problem, or one for all.
        is_valid = tokens.ndim == 2 and len(tokens) == 2 and answers.shape in (tokens.shape, tokens.shape[1:])
        is_valid = is_valid and bool(answers.any(axis=-1).all()) and not answers[..., 0].any()
        if not is_valid or tokens.min() < 0 or tokens.max() >= len(task.tokens):
            raise ConfigError(
                f"problems of data={config.task} must be tokens from 0 to {len(task.tokens) - 1}, one row per problem, "
                f"and a mask of answers: at least one per problem, never the first token; two of length {length} were "
                f"{tokens.tolist()} and {answers.tolist()}"
            )
    return task
