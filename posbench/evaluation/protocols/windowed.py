"""Score windows over a split: each protocol here decides which tokens are scored, with how much context before them.

validation      the held-out loss at the training length; the curve during training ends at this number
fixed           the same targets at every length, inside one document: only the context before them grows (the default)
nonoverlapping  cut into windows of the length, every target scored (Press et al. 2022 compare this way)
position        the losses of nonoverlapping by position: how much comes from the start of windows, and at which
                position past the training length the loss rises
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.config.units import DASH, number, perplexity_text, short_length
from posbench.data import Split
from posbench.evaluation.protocols.accuracy import score_problems
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Score
from posbench.evaluation.protocols.section import ComparedRuns, Plot, Section, text_table, with_interval
from posbench.evaluation.windows import (
    Window,
    choose_evenly,
    losses_of,
    scored_targets,
    tabulate_windows,
    too_long,
    window_counts,
)
from posbench.runs.results import MARKS

if TYPE_CHECKING:
    from posbench.model.decoder import Decoder

BUCKETS_AN_OCTAVE = 2  # buckets per doubling of the position
JUST_PAST = (1, 10, 50, 100)  # tokens past the training length, at which the loss of absolute schemes rises


class Windowed(EvalProtocol):
    """Base class of protocols that score windows and store one row per window and document in it."""

    @abstractmethod
    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Return the windows of `length` tokens to score. Raises: ConfigError if the text has none."""

    def check_length(self, split: Split, length: int, settings: EvaluationConfig) -> None:
        self.windows(split, length, settings, length)

    def tabulate(self, losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
        """Return the rows to store, one per window and document. Arguments: losses, [windows, scored] in nats."""
        return tabulate_windows(losses, windows, split, bos_id)

    def score(
        self,
        model: Decoder,
        corpus: Any,
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        windows = self.windows(split, length, settings, anchor)
        read = np.stack([split.tokens[w.start : w.start + length + 1] for w in windows])
        losses = losses_of(model, read, windows[0].scored, settings.batch_tokens, advance)
        rows = self.tabulate(losses, windows, split, corpus.bos_id)
        figures: dict[str, Any] = {"windows": len(windows), "documents": int(rows["document"].nunique())}
        nll, targets = float(rows["nll"].sum()), int(rows["targets"].sum())
        figures |= {"targets_total": targets, "nll_mean": nll / targets}
        if "bytes" in rows:
            figures["bits_per_byte"] = nll / math.log(2) / int(rows["bytes"].sum())
        return rows, figures

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.max_tokens


class ByLength(Windowed):
    """Base class of protocols whose report shows perplexity against length, on the test split."""

    is_by_length: ClassVar[bool] = True

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        """Return a section per text with perplexities by length, and one that compares options at evaluation."""
        sections = []
        texts = {*compared.at(self.name, text=None, under=None)["text"]}
        texts |= {text for protocol, text in compared.holes if protocol == self.name}
        for text in sorted(texts):
            cells, holes = compared.at(self.name, metric="loss", text=text), compared.holes.get((self.name, text), [])
            many = cells["length"].nunique() > 1
            if not many and not holes:
                continue
            title = f"Perplexity by length{f' on {text}' if text else ''}: {self.name}"
            plots = [self._plot(compared, cells)] if many and not text else []
            table = lengths_table(compared, cells, every_length)
            longest = short_length(compared.at(self.name, text=text)["length"].max()) if len(table) else ""
            note = f"{self.caption} Change and gap: differences in loss at {longest}, in nats." if len(table) else ""
            latex = (f"perplexity-{self.name}", f"Perplexity by length ({self.name}).")
            sections.append(Section(title, holes, plots, table if len(table) else None, note, latex))
            if not text:
                sections += self._other_options(compared)
        return sections

    def _plot(self, compared: ComparedRuns, cells: pd.DataFrame) -> Plot:
        are_relative = compared.runs["is_relative"].astype(bool).all()
        dashed = "" if are_relative else "; dashed: scores depend on more than distance"
        caption = f"Perplexity against length, both on log scales{dashed}."
        points = cells.assign(x=cells["length"], y=cells["perplexity"]).dropna(subset="y")
        return Plot(f"perplexity-{self.name}", "lengths", caption, points)

    def _other_options(self, compared: ComparedRuns) -> list[Section]:
        """Return a section with perplexities by option at the longest length scored with one; [] without options."""
        cells = compared.at(self.name, metric="loss", under=None)
        cells = cells[~cells["under"].str.contains(" ") & ~cells["under"].isin(MARKS)]
        length = cells.loc[cells["under"] != "", "length"].max()
        table = options_table(compared, cells[cells["length"] == length])
        if table.empty:
            return []
        note = f"Perplexity at {short_length(length)} tokens; the best of each row is bold."
        return [Section("Other options at evaluation, without training again", table=table, note=note, level=3)]


def lengths_table(compared: ComparedRuns, cells: pd.DataFrame, every_length: bool) -> pd.DataFrame:
    """Return a row per scheme: its perplexity at each length, and its change and gap at the longest length.

    Both are differences in loss, nats: the change from the training length, and the gap to the baseline scheme.

    Arguments: every_length, whether to show lengths that are neither a multiple nor a part of the training length.
    """
    T, lengths = compared.training_length, sorted(set(cells["length"]))
    shown = [n for n in lengths if every_length or n % T == 0 or T % n == 0] or lengths
    rows = []
    for scheme in compared.schemes:
        by_length = cells[cells["scheme"] == scheme].set_index("length")
        if by_length.empty:
            continue
        halves = by_length["change_documents"].to_frame()
        halves["seeds"] = (by_length["change_high"] - by_length["change_low"]) / 2
        least = halves.max(axis=1)
        row = {"scheme": scheme}
        for n in shown:
            half_width = least.get(n, math.nan) if n != T else least.min()
            row[short_length(n) + " (trained)" * (n == T)] = (
                perplexity_text(by_length.loc[n, "perplexity"], half_width) if n in by_length.index else DASH
            )
        last = by_length.reindex([max(lengths)]).iloc[0]
        longest = short_length(max(lengths))
        if T in lengths and max(lengths) > T:
            row[f"change from {short_length(T)}"] = number(last["change"], sign=True)
        rows.append(row | {f"gap at {longest}": "0" if scheme == compared.baseline else number(last["gap"], sign=True)})
    return text_table(rows)


def options_table(compared: ComparedRuns, cells: pd.DataFrame) -> pd.DataFrame:
    """Return a table of perplexities, a row per scheme and a column per changed option; the best of a row is bold."""
    table = cells.pivot(index="scheme", columns="under", values="perplexity")
    rows = []
    for scheme in [s for s in compared.schemes if s in table.index and table.loc[s].notna().sum() > 1]:
        perplexities = table.loc[scheme]
        row = {"scheme": scheme}
        for option, p in perplexities.items():
            text = perplexity_text(p)
            row[str(option).partition("=")[2] or "as trained"] = f"**{text}**" if p == perplexities.min() else text
        rows.append(row)
    return text_table(rows)


class Validation(Windowed):
    """Loss on windows of the training length, `train.validation_tokens` in all, spread over the validation split."""

    name = "validation"
    rank = 2
    split: ClassVar[str] = "validation"
    of_tasks: ClassVar[bool] = True

    def score(
        self,
        model: Decoder,
        corpus: Any,
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Score windows of text or, for a task, answers of problems of trained lengths; return rows and figures."""
        if split.num_tokens is not None:
            return super().score(model, corpus, split, length, settings, anchor, advance)
        batch = split.at_trained_lengths(max(1, settings.max_tokens // length))
        rows = score_problems(model, batch, settings.batch_tokens, advance)
        rows = rows.rename(columns={"problem": "document", "answers": "targets"}).assign(start=0)
        targets, nll, right = int(rows["targets"].sum()), float(rows["nll"].sum()), int(rows["right"].sum())
        return rows, {"targets_total": targets, "nll_mean": nll / targets, "accuracy": right / targets}

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        """Return a section for each text that runs were not trained on, with losses at the training length."""
        texts = {*compared.at(None, text=None, under=None)["text"], *(text for _, text in compared.holes)} - {""}
        sections = []
        for text in sorted(texts):
            cells = compared.at(None, compared.training_length, metric="loss", text=text)
            cells = cells[cells["last"] == 0].drop_duplicates("scheme").set_index("scheme")
            rows = []
            for scheme in (
                cells.loc[[s for s in compared.schemes if s in cells.index]].sort_values("value", kind="stable").index
            ):
                cell = cells.loc[scheme]
                gap = "0" if scheme == compared.baseline else with_interval(cell, "gap", sign=True)
                rows.append(
                    {"scheme": str(scheme), "loss": with_interval(cell, "value"), f"gap to {compared.baseline}": gap}
                )
            note = f"Loss at {compared.training_length} tokens of context on text that the runs were not trained on; "
            note += "not part of the ranking."
            holes = compared.holes.get((self.name, text), [])
            sections.append(Section(f"On {text}", holes, table=text_table(rows) if rows else None, note=note))
        return sections

    def settings(self, config: Config) -> EvaluationConfig:
        """Return settings to read `train.validation_tokens` tokens, and at least one window."""
        tokens = max(config.train.validation_tokens, config.train.context_length)
        return replace(config.evaluation, max_tokens=tokens)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, length, length, settings)

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Split | None = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """Return only the training length, whatever lengths are requested."""
        return [context_length]


class Fixed(ByLength):
    """Perplexity of the same targets at every length, with more context before them at longer lengths.

    There are `evaluation.windows` groups of `evaluation.targets` tokens. At least `anchor` tokens are before the last
    of a group; `anchor` is the longest length of the comparison.
    """

    name = "fixed"
    rank = 0
    caption = "Fixed targets: the same tokens are scored at every length, only the context before them grows."
    shares_windows: ClassVar[tuple[str, ...]] = ("fixed",)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Return a window per group of targets. The groups depend on `anchor` (the longest length), not on `length`.

        Groups are spread evenly over all documents that are long enough. They do not overlap, and no window crosses a
        document boundary.
        """
        targets = targets_within(length, settings)
        assert length <= anchor
        ends = [
            np.arange(begin + anchor, end, targets)  # index of the last target of each group
            for begin, end in zip(split.starts[:-1], split.starts[1:], strict=True)
        ]
        places = np.concatenate(ends)
        if not len(places):
            raise ConfigError(too_long(split, anchor, "in its longest document", _longest_document(split)))
        chosen = places[choose_evenly(np.array([len(of_document) for of_document in ends]), settings.windows)]
        return [Window(int(last) - length, length, targets) for last in chosen]

    def shortest(self, settings: EvaluationConfig) -> int:
        return settings.targets

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.windows * length

    def default_lengths(self, context_length: int, split: Split | None = None) -> list[int]:
        """Return the usual lengths and some just past the training length, up to the longest document."""
        lengths = {*super().default_lengths(context_length), *(context_length + past for past in JUST_PAST)}
        return sorted(length for length in lengths if split is None or length <= _longest_document(split))


def targets_within(length: int, settings: EvaluationConfig) -> int:
    """Return `evaluation.targets`, the number of targets at every length. Raises: ConfigError if `length` is less."""
    if settings.targets > length:
        raise ConfigError(
            f"evaluation.targets={settings.targets} does not fit into length {length}: lower it, or ask for longer "
            "lengths"
        )
    return settings.targets


def _longest_document(split: Split) -> int:
    """Return the number of targets in the longest document: all its tokens but the first."""
    return int(np.diff(split.starts).max()) - 1


class Nonoverlapping(ByLength):
    """Perplexity on windows back to back, in stretches of `anchor` tokens that are the same at every length.

    `anchor` is the longest length of the comparison. Longer windows score better even for a model that ignores the
    additional context, because fewer targets are near a window's start.
    """

    name = "nonoverlapping"
    rank = 1
    caption = (
        "Non-overlapping windows: the text is cut into windows and every token scored. A longer window can gain "
        "already by having fewer tokens near its start."
    )
    shares_windows: ClassVar[tuple[str, ...]] = ("nonoverlapping", "position")

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)


class Position(Windowed):
    """Loss by position: windows of `nonoverlapping`, summed by document and log-spaced bucket of positions."""

    name = "position"
    rank = 5
    shares_windows: ClassVar[tuple[str, ...]] = ("nonoverlapping", "position")
    groups: ClassVar[tuple[str, ...]] = ("bucket_start", "bucket_end")
    scores: ClassVar[tuple[Score, ...]] = (Score("loss", "nll"),)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        cells, holes = compared.at(self.name, metric="loss"), compared.holes.get((self.name, ""), [])
        title = "Loss by position"
        if cells.empty:
            return [Section(title, holes)] if holes else []
        cells = cells[(cells["length"] == cells["length"].max()) & (cells["scheme"] != compared.baseline)]
        cells = cells[cells["last"] > 0]
        plot = Plot(
            self.name,
            "distances",
            f"Gap to {compared.baseline} by position in the longest windows.",
            cells.assign(x=np.sqrt((cells["first"] + 1) * (cells["last"] + 1)), y=cells["gap"]),
            self.name,
            f"gap to {compared.baseline}, nats/token",
        )
        return [Section(title, holes, [plot], note="The numbers are in table.csv.")]

    def tabulate(self, losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
        """Return a table, a row per document and bucket: document, bucket_start, bucket_end, targets, nll (sum, nats).

        Buckets are of positions, and `bucket_end` is exclusive.
        A target's position is the number of tokens before it, less one: the target at position 0 follows one token.
        """
        rows = scored_targets(losses, windows, split, bos_id)
        position = rows["target"] - np.array([w.start + 1 for w in windows])[rows["window"]]
        edges = bucket_edges(windows[0].length)
        bucket = np.searchsorted(edges, position, side="right") - 1
        rows = rows.assign(bucket_start=edges[bucket], bucket_end=edges[bucket + 1])
        buckets = rows.groupby(["document", "bucket_start", "bucket_end"], sort=True)
        return buckets.agg(targets=("nll", "size"), nll=("nll", "sum")).reset_index()


def bucket_edges(length: int) -> np.ndarray:
    """Return log-spaced edges of buckets over positions 0 .. length - 1, int64. The first buckets hold one position.

    No bucket is narrower than the previous one, so the last bucket also takes the remainder.
    """
    octaves = int(np.ceil(np.log2(length)))
    edges = 2.0 ** (np.arange(0, octaves * BUCKETS_AN_OCTAVE + 1) / BUCKETS_AN_OCTAVE) - 1
    edges = np.unique(np.append(edges[edges < length].round().astype(np.int64), length))
    widths = np.diff(edges)
    return np.delete(edges, -2) if len(widths) > 1 and widths[-1] < widths[-2] else edges


def stretches(split: Split, size: int, length: int, settings: EvaluationConfig) -> list[Window]:
    """Return windows of `length` tokens back to back in stretches of `size`. They cross documents; all targets count.

    The whole stream is cut into stretches. Stretches of `max_tokens` in all are read, spread evenly over all documents
    (a stretch belongs to the document of its first target). They do not depend on `length`, so all lengths that divide
    `size` score the same targets. Other lengths leave out the tail of a stretch.
    """
    scorable = split.num_tokens - 1
    if scorable < size:
        raise ConfigError(too_long(split, size, "in all", scorable))
    if settings.max_tokens < size:
        raise ConfigError(
            f"evaluation.max_tokens={settings.max_tokens} is less than one window of length {size}: raise it, or ask "
            "for a shorter length"
        )
    begins = np.arange(0, scorable - size + 1, size)
    chosen = begins[choose_evenly(window_counts(split, begins + 1), settings.max_tokens // size)]
    return [Window(int(begin) + n * length, length, length) for begin in chosen for n in range(size // length)]
