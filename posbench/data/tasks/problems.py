"""Draw the problems of a task, to train and to score on instead of text.

Batch n of a run depends only on (seed, n), and the problems scored at a length are the same for every scheme and seed.
Positions of a batch (`data.positions`):

    window      from 0, as in text
    shifted     in training, from an offset drawn for each problem, so that all positions of the longest problem allowed
                in tests are trained (SHAPE, Kiyono et al. 2021, arXiv 2109.05644); in tests from 0
    subset      always a random ascending subset of these positions (Ruoss et al. 2023, arXiv 2305.16843)

Shapes: B problems, W tokens of the widest one, T = W - 1 tokens that are read.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from posbench.config import ConfigError, TaskConfig, TrainConfig
from posbench.data.dataset import Batch, Dataset
from posbench.data.tasks import build_task
from posbench.data.text.corpus import SPLITS
from posbench.data.text.tokenizer import fingerprint

# A hash of its tokens decides the split of a problem, so train, validation and test never share one.
_RESIDUES = {"test": (0,), "validation": (1,), "train": tuple(range(2, 8))}  # first byte of the SHA-256, modulo 8
_PROBLEMS_AT_ONCE = 64
_BATCHES_AT_ONCE = 32
_TRAINED, _SCORED = 0, 1  # keys of the streams of random numbers


class Problems(Dataset):
    """A dataset of the problems of a task, which are drawn when they are needed."""

    unit: ClassVar[str] = "answer"

    def __init__(self, config: TaskConfig) -> None:
        self.config, self.task = config, build_task(config)
        cls = type(self.task)
        identity = json.dumps([cls.__name__, cls.version, config.options])
        super().__init__(
            splits={name: ProblemSplit(name, self) for name in SPLITS},
            fingerprint=sha256(identity.encode()).hexdigest(),
            tokenizer_fingerprint=fingerprint(self.tokenizer),
            vocab_size=len(self.task.tokens),
            bos_id=None,  # there are no documents
            overlap={"splits": {}},  # splits never share a problem
        )

    def batches(self, train: TrainConfig, seed: int) -> ProblemBatches:
        return ProblemBatches(self, train.batch_size, seed)

    def with_options(self, config: TaskConfig) -> Problems:
        changed = Problems(config)
        if list(changed.task.tokens) != list(self.task.tokens):
            raise ConfigError(
                f"these options of data={config.task} change its tokens, which the run has not learnt: keep them as "
                "trained"
            )
        # The results belong to the run, whose fingerprint is that of its own problems.
        changed.fingerprint = self.fingerprint
        return changed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer whose words, separated by spaces, are the task's tokens."""
        vocabulary = {token: number for number, token in enumerate(self.task.tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer

    def window(self, length: int) -> int:
        """Return T, the number of tokens read of a problem of `length` items."""
        return self.task.width(length) - 1

    def at_trained_lengths(self, number: int, split: str, rng: np.random.Generator) -> Batch:
        """Return a batch of `number` random problems, of lengths drawn evenly from the trained ones."""
        shortest, longest = self.config.lengths
        return self.of_lengths(rng.integers(shortest, longest + 1, size=number), longest, split, rng)

    def of_lengths(self, lengths: NDArray[np.int64], longest: int, split: str, rng: np.random.Generator) -> Batch:
        """Return a batch with a random problem for each of `lengths`, padded on the right to `longest` items."""
        number, width = len(lengths), self.task.width(longest)
        tokens, answers = np.zeros((number, width), np.int64), np.full((number, width - 1), -1)
        read = np.empty(number, np.int64)  # tokens that are read of each problem
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            drawn, is_answer = self._draw(length, len(rows), split, rng)
            end = drawn.shape[1]
            tokens[rows, :end] = drawn
            read[rows] = end - 1  # the last token is only predicted
            answers[rows, : end - 1] = np.where(is_answer[:, 1:], drawn[:, 1:], -1)
        return Batch(tokens, answers, self._positions(read, width - 1, rng, split == "train"))

    def _draw(
        self, length: int, number: int, split: str, rng: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Draw `number` problems of a split, of `length` items; a larger `number` begins with the same ones.

        Returns: tokens [number, W], and a mask of answers [number, W]. Raises: ConfigError if too few problems belong
        to the split.
        """
        selected, answers = [], []
        # An eighth or more of different problems belong to each split, so that a few tries are usual.
        for _ in range(16 + number):
            # Always the same number at once, whatever is asked for: so a larger `number` begins with the same problems.
            tokens, is_answer = self.task.problems(length, _PROBLEMS_AT_ONCE, rng)
            tokens = np.ascontiguousarray(tokens, np.int32)
            in_split = [sha256(row).digest()[0] % 8 in _RESIDUES[split] for row in tokens]
            selected.append(tokens[in_split])
            answers.append(np.broadcast_to(is_answer, tokens.shape)[in_split])
            if sum(map(len, selected)) >= number:
                return np.concatenate(selected)[:number], np.concatenate(answers)[:number]
        raise ConfigError(
            f"of {(16 + number) * _PROBLEMS_AT_ONCE:,} problems of data={self.config.task} at length {length} fewer "
            f"than {number:,} belong to the {split} split: there are too few different ones, so give it longer ones "
            "(data.lengths) or other options"
        )

    def _positions(
        self, read: NDArray[np.int64], width: int, rng: np.random.Generator, is_training: bool
    ) -> NDArray[np.int64] | None:
        """Return the positions of the tokens that are read, [B, width], or None for 0, 1, 2, ...

        Arguments: read, how many tokens of each problem are read, [B]; the others, up to `width`, are padding.
        """
        columns = np.arange(width)
        num_positions = self.config.window
        assert num_positions is not None
        # Positions go up to the length of the longest problem allowed in tests; padding has the last one.
        if self.config.positions == "subset":
            chosen = rng.random((len(read), num_positions)).argsort(axis=1)[:, :width]
            return np.sort(np.where(columns < read[:, None], chosen, num_positions - 1), axis=1)
        if self.config.positions == "shifted" and is_training:
            offsets = rng.integers(num_positions - read + 1)
            return np.minimum(offsets[:, None] + columns, num_positions - 1)
        return None


class ProblemSplit:
    """The problems of one split that models are scored on, the same for all schemes and seeds."""

    num_tokens: ClassVar[None] = None  # problems never end

    def __init__(self, name: str, problems: Problems) -> None:
        self.name, self.problems = name, problems
        self.at_trained_lengths = lru_cache(maxsize=1)(self._at_trained_lengths)  # every validation reads the same

    def at_length(self, length: int, number: int) -> Batch:
        """Return `number` problems of `length` items. Raises: ConfigError beyond `data.longest`."""
        config = self.problems.config
        assert config.longest is not None
        if length > config.longest:
            raise ConfigError(
                f"length {length} is beyond data.longest={config.longest} items, the longest that data={config.name} "
                "may be tested at: ask for a shorter one, or train with a larger data.longest"
            )
        return self.problems.of_lengths(
            np.full(number, length), length, self.name, _generator(_SCORED, SPLITS.index(self.name), length)
        )

    def _at_trained_lengths(self, number: int) -> Batch:
        return self.problems.at_trained_lengths(number, self.name, _generator(_SCORED, SPLITS.index(self.name)))


class ProblemBatches:
    """The training batches of a task, with lengths drawn evenly from the trained lengths."""

    def __init__(self, problems: Problems, batch_size: int, seed: int) -> None:
        self.problems, self.batch_size, self.seed = problems, batch_size, seed
        # Neighbouring batches are drawn together, which is many times faster than one by one.
        self._drawn = lru_cache(maxsize=1)(self._draw)

    def batch(self, n: int) -> Batch:
        """Return batch `n` of the run, B problems."""
        group, index = divmod(n, _BATCHES_AT_ONCE)
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self._drawn(group).each(lambda part: part[rows])

    def _draw(self, group: int) -> Batch:
        return self.problems.at_trained_lengths(
            _BATCHES_AT_ONCE * self.batch_size, "train", _generator(self.seed, _TRAINED, group)
        )


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
