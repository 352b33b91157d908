"""The problems of a task, in place of text: what training reads, and what is scored.

Problems of train, validation and test never coincide: which of the three one belongs to is a hash of its tokens.
Batch n of a run follows from (seed, n), and what is scored at a length is the same for every scheme and seed. The
problems of a batch are padded on the right to one width.

Positions of a batch (`data.positions`):

window      from 0, as in text
shifted     from an offset drawn for each problem, in training alone, so that all positions of the longest problem that
            may be tested are trained (SHAPE, Kiyono et al. 2021, arXiv 2109.05644)
subset      random positions of those in ascending order, in training and tests (Ruoss et al. 2023, arXiv 2305.16843)

Shapes: B problems, W tokens of the widest one, T = W - 1 tokens that are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posbench.config import ConfigError, TaskConfig
from posbench.data.batches import Batch
from posbench.data.corpus import SPLITS
from posbench.data.tasks import build_task
from posbench.data.tokenizer import fingerprint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Problem = tuple[NDArray[np.int32], NDArray[np.bool_]]  # tokens [W], which of them are answers [W]

_SIDES = {
    "test": (0,),
    "validation": (1,),
    "train": tuple(range(2, 8)),
}  # the first byte of a problem's SHA-256, modulo 8
_MOST_DRAWS = 1000
_TRAINED, _SCORED = 0, 1  # streams of random numbers


class Problems:
    """A task's problems, and what stands for the corpus of text: fingerprints, vocabulary, splits."""

    overlap: Mapping[str, Any] = {"splits": {}}  # nothing that is scored is trained on

    def __init__(self, config: TaskConfig) -> None:
        self.config, self.task = config, build_task(config)
        self.splits = {name: ProblemSplit(name, self) for name in SPLITS}

    @property
    def vocab_size(self) -> int:
        return len(self.task.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Of what decides which problem is drawn at a length."""
        cls = type(self.task)
        return sha256(json.dumps([cls.__name__, cls.version, self.config.options]).encode()).hexdigest()

    def under(self, config: TaskConfig) -> Problems:
        """The task with other options, for an evaluation. It names them, so that the fingerprint stays that of the run.

        Raises: ConfigError where they change the task's tokens.
        """
        changed = Problems(config)
        if list(changed.task.tokens) != list(self.task.tokens):
            raise ConfigError(f"these options of data={config.task} change its tokens, which no run has learnt")
        changed.fingerprint = self.fingerprint
        return changed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The task's tokens as words with spaces between them."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {token: number for number, token in enumerate(self.task.tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer

    @property
    def tokenizer_fingerprint(self) -> str:
        return fingerprint(self.tokenizer)

    def window(self, length: int) -> int:
        """T, tokens that are read of a problem of `length` items."""
        return self.task.width(length) - 1

    def draw(self, length: int, split: str, rng: np.random.Generator) -> Problem:
        """A problem of `length` items of a split. Raises: ConfigError where there is none among very many."""
        for _ in range(_MOST_DRAWS):
            tokens, is_answer = self.task.problem(length, rng)
            tokens = np.ascontiguousarray(tokens, np.int32)
            if sha256(tokens.tobytes()).digest()[0] % 8 in _SIDES[split]:
                return tokens, np.asarray(is_answer, bool)
        raise ConfigError(
            f"none of {_MOST_DRAWS:,} problems of data={self.config.task} at length {length} belongs to the {split} "
            "split: there are too few different ones, so give it longer ones (data.lengths) or other options"
        )

    def at_trained_lengths(self, number: int, split: str, rng: np.random.Generator) -> Batch:
        """Problems of the lengths that are trained, all of them equally often."""
        shortest, longest = self.config.lengths
        lengths = rng.integers(shortest, longest + 1, size=number).tolist()
        return self.padded([self.draw(length, split, rng) for length in lengths], longest, rng, split == "train")

    def padded(self, problems: Sequence[Problem], length: int, rng: np.random.Generator, is_training: bool) -> Batch:
        """Those problems, padded to the width of problems of `length` items, with their positions.

        Raises: ConfigError for one that is wider.
        """
        width = self.task.width(length)
        tokens, answers = np.zeros((len(problems), width), np.int64), np.full((len(problems), width - 1), -1, np.int64)
        for row, (of_problem, is_answer) in enumerate(problems):
            if (end := len(of_problem)) > width:
                raise ConfigError(
                    f"a problem of data={self.config.task} of {length} items has {end} tokens, and width({length}) is "
                    f"{width}: define width(length), the most tokens of a problem"
                )
            tokens[row, :end] = of_problem
            answers[row, : end - 1] = np.where(is_answer[1:], of_problem[1:], -1)
        read = np.array([len(of_problem) - 1 for of_problem, _ in problems])
        return Batch(tokens, answers, self._positions(read, width - 1, rng, is_training))

    def _positions(
        self, read: NDArray[np.int64], width: int, rng: np.random.Generator, is_training: bool
    ) -> NDArray[np.int64] | None:
        """[B, T] int64, all below that of the longest problem that may be tested; None: from 0 on.

        Arguments: read, [B], how many tokens of each problem are read; behind them the last position is repeated.
        """
        reach, columns = self.config.window, np.arange(width)
        assert reach is not None
        if self.config.positions == "subset":
            chosen = rng.random((len(read), reach)).argsort(axis=1)[:, :width]
            return np.sort(np.where(columns < read[:, None], chosen, reach - 1), axis=1)
        if self.config.positions == "shifted" and is_training:
            offsets = rng.integers(reach - read + 1)
            return np.minimum(offsets[:, None] + columns, reach - 1)
        return None


@dataclass(frozen=True)
class ProblemSplit:
    """Problems that are scored: the same whoever asks."""

    name: str
    problems: Problems

    def at_length(self, length: int, number: int) -> Batch:
        """Problems of `length` items. Raises: ConfigError where they may not be so long."""
        config = self.problems.config
        assert config.longest is not None
        if length > config.longest:
            raise ConfigError(
                f"length {length} is beyond data.longest={config.longest} items, the longest that data={config.name} "
                "may be tested at: ask for a shorter one, or train with a larger data.longest"
            )
        rng = _generator(_SCORED, SPLITS.index(self.name), length)
        drawn = [self.problems.draw(length, self.name, rng) for _ in range(number)]
        return self.problems.padded(drawn, length, rng, is_training=False)

    def at_trained_lengths(self, number: int) -> Batch:
        """Problems of the lengths that are trained."""
        return self.problems.at_trained_lengths(number, self.name, _generator(_SCORED, SPLITS.index(self.name)))


class ProblemBatches:
    """What training reads of a task: lengths evenly drawn from those that are trained."""

    def __init__(self, problems: Problems, batch_size: int, seed: int) -> None:
        self.problems, self.batch_size, self.seed = problems, batch_size, seed

    def batch(self, n: int) -> Batch:
        """Batch `n` of the run."""
        rng = _generator(self.seed, _TRAINED, n)
        return self.problems.at_trained_lengths(self.batch_size, "train", rng)


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
