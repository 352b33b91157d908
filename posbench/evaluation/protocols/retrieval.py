"""Probe retrieval: is a passage easier if it was read `gap` tokens before, and is its order what helps?

    again      [ passage               | filler text, gap tokens | the passage ]
    shuffled   [ its tokens, shuffled  | the same filler         | the passage ]
    control    [ another passage       | the same filler         | the passage ]

The three sequences end with the same tokens at the same positions. Two scores, losses in nats per token:

    drop       control - again     the benefit of repetition; a model can get it by just expecting the same words again
    by_order   shuffled - again    the part that needs the order of the passage, since both have the same words before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.evaluation.protocols.protocol import CONTEXT, Advance, EvalProtocol, Score
from posbench.evaluation.protocols.section import ComparedRuns, Section, by_distance
from posbench.evaluation.windows import choose_evenly, losses_of

if TYPE_CHECKING:
    from posbench.data import Corpus, Split
    from posbench.model.scored import ScoredModel

LOSSES = ("second_nll", "control_nll", "shuffled_nll")  # columns of again, control and shuffled


class Retrieval(EvalProtocol):
    """Evaluation protocol for retrieval: how much a passage's loss drops if the model has read the passage before.

    The drop is the loss on the passage after another passage and a filler, less the loss after the passage itself and
    the same filler. The length is of the whole sequence: two passages and a filler.
    """

    name = "retrieval"
    rank = 4
    groups: ClassVar[tuple[str, ...]] = ("gap",)
    scores: ClassVar[tuple[Score, ...]] = (
        Score("drop", "control_nll", minus="second_nll"),
        Score("by_order", "shuffled_nll", minus="second_nll"),
    )
    text_column: ClassVar[str] = "start"  # each trial counts as one text
    figure_names: ClassVar[tuple[str, ...]] = ("drop",)
    headline: ClassVar[str] = "benefit of repetition, nats/token,"
    headline_key: ClassVar[str] = "drop"

    def check(self, config: Config) -> None:
        super().check(config)
        if config.data.document_mask:
            raise ConfigError(
                "protocol retrieval repeats a passage after other documents, from which data.document_mask=true hides "
                "it: take another protocol, such as fixed"
            )

    def score(
        self,
        model: ScoredModel,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        rows = probe(model, split, length, settings, advance)
        sums = rows[["targets", *LOSSES]].sum()
        return rows, {
            "windows": len(rows),
            "documents": int(rows["document"].nunique()),
            "targets_total": int(sums["targets"]),
            "gap": int(rows["gap"].iloc[0]),
            "nll_mean": float(sums["second_nll"] / sums["targets"]),
            **{score.name: float(score.of(sums)) for score in self.scores},
        }

    def check_length(self, split: Split, length: int, settings: EvaluationConfig) -> None:
        trial_starts(split, length, settings)

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 3 * settings.windows * length  # again, control and shuffled

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        cells, holes = compared.at(self.name, metric="drop"), compared.holes.get((self.name, ""), [])
        if cells.empty:
            return [Section(CONTEXT, holes)] if holes else []
        table = by_distance(cells, compared.schemes, "repeat after {}")
        note = "Repeat: how much lower the loss of a passage is when it was read that many tokens before."
        latex = ("context", "Fall of the loss of a passage that was read before, nats/token.")
        return [Section(CONTEXT, holes, table=table, note=note, latex=latex)]


def trial_starts(split: Split, length: int, settings: EvaluationConfig) -> list[tuple[int, int, int]]:
    """Return the token indices at which each trial's passage, filler and control passage start.

    A trial is a passage, a filler and the passage again; in the control another passage comes first. Starts are equal
    for every scheme. Trials are spread evenly over all documents that have room for a passage. The filler begins a
    third of the split further on, the control passage two thirds, so neither overlaps the passage. Passages never cross
    the beginning of a document.
    Raises: ConfigError if the length is too short for two passages, or too long for the text.
    """
    passage = settings.passage
    gap = length + 1 - 2 * passage
    if gap < 0:
        raise ConfigError(
            f"length {length} has no room for two passages of evaluation.passage={passage} tokens: ask for "
            f"{2 * passage} or more"
        )
    total = split.num_tokens
    third = total // 3
    if gap + 2 * passage > third:
        raise ConfigError(
            f"length {length} is too long for the retrieval probe: the {split.name} split has {total} tokens, "
            "and a third of it must hold the text between the passages"
        )
    trials: list[tuple[int, int, int]] = []
    counts = np.maximum(np.diff(split.starts) - 1, 0) // passage
    begins = [begin + 1 + passage * np.arange(count) for begin, count in zip(split.starts[:-1], counts, strict=True)]
    for start in np.concatenate(begins)[choose_evenly(counts, settings.windows)]:
        first, control = (_inside_document(split, (int(start) + n * third) % total, passage) for n in (0, 2))
        filler = min((int(start) + third) % total, total - gap)
        if first is not None and control is not None and not (first < filler + gap and filler < first + passage):
            trials.append((first, filler, control))
    if not trials:
        raise ConfigError(
            f"the {split.name} split holds no place for the retrieval probe at length {length}: give longer "
            "text or ask for a shorter length"
        )
    return trials


def _inside_document(split: Split, start: int, size: int) -> int | None:
    """Return the first index, `start` or later, from which `size` tokens belong to one document, or None.

    BOS is not among these tokens.
    """
    document = int(split.document_of(start))
    while document < split.num_documents:
        begin, end = int(split.starts[document]) + 1, int(split.starts[document + 1])
        start = max(start, begin)
        if start + size <= end:
            return start
        document += 1
        start = end
    return None


def probe(
    model: ScoredModel,
    split: Split,
    length: int,
    settings: EvaluationConfig,
    advance: Advance = lambda tokens: None,
) -> pd.DataFrame:
    """Return a table, a row per trial: document, start, gap (tokens), targets, and the passage's summed losses in nats.

    A trial reads something, then `gap` tokens of filler, then the passage, in all `length` tokens. What was read first:
    in second_nll the passage, in control_nll another one, in shuffled_nll the passage's tokens in a random order (seed:
    `start`). The passage's first token is not a target, since no context predicts it.
    Arguments: settings, of the group `evaluation`, with the numbers of trials and of the passage's tokens; advance,
    called after each forward pass with its number of tokens.
    """
    passage, gap = settings.passage, length + 1 - 2 * settings.passage
    trials = trial_starts(split, length, settings)
    sequences = _sequences(split, trials, passage, gap)
    losses = [losses_of(model, rows, passage - 1, settings.batch_tokens, advance) for rows in sequences]
    starts = np.array([start for start, _, _ in trials])
    rows = {"document": split.document_of(starts), "start": starts, "gap": gap, "targets": passage - 1}
    sums = {name: nll.sum(1, dtype=float) for name, nll in zip(LOSSES, losses, strict=True)}
    return pd.DataFrame(rows | sums)


def _sequences(split: Split, trials: Sequence[tuple[int, int, int]], passage: int, gap: int) -> list[np.ndarray]:
    """Return the token ids of three sequences per trial, [trials, 2 * passage + gap] each: again, control and shuffled.

    They end with the passage, after `gap` tokens of filler. They begin with the passage, with another one, or with the
    passage's tokens in random order.
    Arguments: trials, the starts of passage, filler and control passage; passage, its tokens.
    """
    parts = []
    for starts in trials:
        ends = np.add(starts, (passage, gap, passage))
        parts.append([np.asarray(split.tokens[start:end]) for start, end in zip(starts, ends, strict=True)])
    orders = [np.random.default_rng(start).permutation(passage) for start, _, _ in trials]
    again = np.stack([np.concatenate((p, filler, p)) for p, filler, _ in parts])
    control = np.stack([np.concatenate((c, filler, p)) for p, filler, c in parts])
    shuffled = np.stack([np.concatenate((p[o], filler, p)) for o, (p, filler, _) in zip(orders, parts, strict=True)])
    return [again, control, shuffled]
