"""Describe how each layer of a model uses position: as a printed table, as a paragraph, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from posbench.attention.gdn import GatedDeltaRule
from posbench.attention.linear import NonSoftmax
from posbench.config import ConfigError
from posbench.config.units import short_length
from posbench.model.decoder import Decoder
from posbench.model.layers import Block
from posbench.schemes import Layers, Scheme
from posbench.schemes.rescaling import LENGTH, Rescaling
from posbench.schemes.rotary import Rotary
from posbench.system.console import plain_table

# What the tokens of a layer see: all earlier ones, those of a window or chunk, a few that the layer chooses, those that
# a convolution spans, a state that sums up all earlier ones, or none.
ALL, WINDOW, CHUNK, CHOSEN, CONVOLUTION, STATE, NOTHING = (
    "all",
    "window",
    "chunk",
    "chosen",
    "convolution",
    "state",
    "nothing",
)
_COLUMNS = ("sees", "turns", "base", "rescale", "first", "last", "also")
_SEEN = {  # in a paragraph
    ALL: "see all tokens",
    WINDOW: "see a window of {:,} tokens",
    CHUNK: "see chunks of {:,} tokens",
    CHOSEN: "see the {:,} tokens that they choose",
    CONVOLUTION: "have a convolution over {:,} tokens",
    STATE: "have a state instead of attention",
    NOTHING: "mix no tokens",
}


@dataclass(frozen=True)
class Rotation:
    """The rotation of a layer: its settings in words, and its frequencies in radians per token."""

    base: float
    method: str  # `none`, a rescaling of posbench, or a `rope_type` of transformers
    factor: float
    temperature: float  # of the scores, from the rescaling
    frequencies: Tensor  # [channel pairs], the fastest first
    sites: str = "qk"  # what is rotated
    rescaling: Mapping[str, Any] = field(default_factory=dict)  # as transformers' `rope_parameters`; {}: none

    @property
    def turning(self) -> Tensor:
        """Return the frequencies above 0, of which there is at least one."""
        return self.frequencies[self.frequencies > 0]

    @property
    def channels(self) -> int:
        """Return how many channels of a head are rotated."""
        return 2 * len(self.turning)


@dataclass(frozen=True)
class QueryScale:
    """A factor of the queries that grows with position p: 1 + beta ln(1 + floor((p + shift) / length))."""

    beta: float
    length: int  # tokens
    shift: int

    def at(self, positions: Tensor) -> Tensor:
        """Return the factors at `positions`."""
        return 1 + self.beta * torch.log1p(((positions + self.shift) / self.length).floor())


@dataclass(frozen=True)
class LayerPositions:
    """The positions that one layer uses, and the tokens that it sees."""

    sees: str = ALL
    width: int | None = None  # tokens of a window, a chunk or a convolution
    rotation: Rotation | None = None
    channels: int = 0  # of a head
    other: str = ""  # the name of another position scheme, such as ALiBi
    has_state: bool = False  # beside attention
    has_sink: bool = False
    cap: float | None = None  # of the scores
    query_scale: QueryScale | None = None

    @property
    def cells(self) -> dict[str, str]:
        """Return {column: text} of the printed table."""
        turn = self.rotation
        sees = self.sees if self.width is None else f"{self.sees} {self.width:,}"
        cells = {"sees": f"{sees} + state" if self.has_state else sees, "turns": "", "base": "", "rescale": ""}
        if turn is not None:
            sites = "" if turn.sites == "qk" else f" of {turn.sites}"
            cells["turns"] = f"{turn.channels} of {self.channels}{sites}"
            cells["base"] = f"{turn.base:g}"
            cells["rescale"] = turn.method if turn.factor == 1 else f"{turn.method} {turn.factor:g}"
            cells["first"], cells["last"] = (f"{float(turn.turning[n]):.3g}" for n in (0, -1))
        cells["also"] = ", ".join(self._others())
        return cells

    def _others(self) -> list[str]:
        others = [self.other] if self.other else []
        if self.has_sink:
            others.append("sink")
        if self.cap is not None:
            others.append(f"cap {self.cap:g}")
        if self.query_scale is not None:
            others.append("query scale")
        return others

    @property
    def sentence(self) -> str:
        """Return what the layer does, such as `see all tokens and have no position`."""
        seen = _SEEN[self.sees].format(self.width)
        if self.has_state:
            seen += " beside a state"
        if self.sees in (CONVOLUTION, STATE, NOTHING):
            return seen
        turn, parts = self.rotation, []
        if turn is not None:
            what = f"{turn.channels} of {self.channels} channels of each head"
            if turn.channels == self.channels:
                what = "whole heads"
            sites = "" if turn.sites == "qk" else f" of {', '.join(turn.sites)}"
            parts.append(f"rotate {what}{sites} with base {turn.base:,.0f}")
            if turn.method != "none":
                factor = f" with factor {turn.factor:g}" if turn.factor != 1 else ""
                temperature = f", temperature {turn.temperature:.3g}" if turn.temperature != 1 else ""
                parts[-1] += f" ({turn.method}{factor}{temperature})"
        if self.other:
            parts.append(f"use {self.other}")
        if not parts:
            parts.append("have no position")
        if self.has_sink:
            parts.append("have a sink")
        if self.cap is not None:
            parts.append(f"cap scores at {self.cap:g}")
        if (scale := self.query_scale) is not None:
            position = "(p + 1)" if scale.shift else "p"
            parts.append(f"multiply queries by 1 + {scale.beta:g} ln(1 + floor({position} / {scale.length:,}))")
        return ", ".join([seen, *parts[:-1]]) + f" and {parts[-1]}"


@dataclass(frozen=True)
class ModelPositions:
    """The positions that a model uses: at its embeddings, and in each layer."""

    layers: Sequence[LayerPositions]
    embedding: str = ""  # what is added to the embeddings: `learned`, `sinusoidal`, or a scheme's name
    longest: int | None = None  # tokens that it can read; None: no limit
    trained: int | None = None  # the training length, tokens

    def groups(self) -> list[tuple[list[int], LayerPositions]]:
        """Return the numbers of the layers that do the same, and what they do."""
        alike: dict[Any, list[int]] = {}
        for number, layer in enumerate(self.layers):
            frequencies = () if layer.rotation is None else tuple(layer.rotation.frequencies.tolist())
            alike.setdefault((layer.sentence, frequencies), []).append(number)
        return [(numbers, self.layers[numbers[0]]) for numbers in alike.values()]

    @property
    def paragraph(self) -> str:
        """Return the table in plain English."""
        sentences = []
        if self.embedding:
            sentences.append(f"Positions are added to the embeddings ({self.embedding})")
        period = _period([layer.sentence for layer in self.layers])
        for numbers, layer in self.groups():
            # If the layers repeat, count within one period (3 of 4 layers); otherwise count all layers.
            count, sentence = len([n for n in numbers if n < period]), layer.sentence
            repeats = 2 * period <= len(self.layers)
            if self.embedding:
                sentence = sentence.replace("have no position", "have no other")
            if len(numbers) == len(self.layers):
                sentences.append(f"All layers {sentence}")
            elif len(numbers) == 1:
                sentences.append(f"Layer {numbers[0]} {_singular(sentence)}")
            elif repeats and count == 1:
                sentences.append(f"Every {_ordinal(period)} layer (from {numbers[0]}) {_singular(sentence)}")
            else:
                whose = f"{count} of {period}" if repeats else str(len(numbers))
                sentences.append(f"{whose} layers {sentence}")
        if self.trained:
            sentences.append(f"Trained on {self.trained:,} tokens")
        if self.longest:
            sentences.append(f"It reads at most {self.longest:,} tokens")
        return ". ".join(sentences) + "."

    def as_data(self) -> dict[str, Any]:
        """Return the table for scripts, with the layers that do the same in one entry."""
        entries = []
        for numbers, layer in self.groups():
            entry = asdict(layer) | {"layers": numbers}
            if layer.rotation is not None:
                entry["rotation"]["frequencies"] = layer.rotation.frequencies.tolist()
            entries.append(entry)
        return {
            "embedding": self.embedding,
            "longest": self.longest,
            "trained": self.trained,
            "layers": entries,
            "paragraph": self.paragraph,
        }


def row_of(positions: ModelPositions) -> dict[str, Any]:
    """Return the scheme with the same positions, as in `conf/scheme/*.yaml`. Raises: ConfigError if there is none."""
    if positions.embedding:
        raise ConfigError(f"{positions.embedding} positions at the embeddings")
    rows = [_row(layer) for layer in positions.layers]
    period = _period(rows)
    return rows[0] if period == 1 else {"name": "interleaved", "kind": "interleaved", "layers": rows[:period]}


def _row(layer: LayerPositions) -> dict[str, Any]:
    unknown = layer.sees not in (ALL, WINDOW, CHUNK) or layer.has_state or layer.cap is not None
    turn, scale = layer.rotation, layer.query_scale
    if unknown or layer.other not in ("", "ALiBi") or (turn is not None and scale is not None):
        raise ConfigError(f"layers that {layer.sentence}")
    row: dict[str, Any] = {"name": "nope", "kind": "nope"}
    if layer.other:
        row = {"name": "alibi", "kind": "alibi"}
    elif scale is not None:
        row = {"name": "growing", "kind": "log_growth", "tokens": scale.length, "slope": scale.beta}
    elif turn is not None:
        row = _rotary_row(turn, layer.channels)
    if layer.sees == CHUNK:
        chunks = {"name": "chunks", "kind": "chunked", "chunk": layer.width}
        row = {"name": "chunked_rotary", "kind": "combined", "of": [row, chunks]}
    elif layer.sees == WINDOW:
        row["window"] = layer.width
    return row | {"attention": {"kind": "softmax", "sink": True}} if layer.has_sink else row


def _rotary_row(turn: Rotation, channels: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": "rotary", "kind": "rotary", "sites": ["q", "k"], "base": turn.base}
    pairs = len(turn.frequencies)
    if 2 * pairs < channels:
        row |= {"name": "partial_rotary", "kind": "partial_rotary", "fraction": 2 * pairs / channels}
    elif turn.channels < channels:
        row |= {"name": "p_rope", "kind": "p_rope", "fraction": turn.channels / channels}
    if turn.rescaling:
        row["rescale"] = dict(Rescaling.of(turn.rescaling, None, turn.rescaling.get(LENGTH, 1)).parameters)
    return row


def _period(words: Sequence[Any]) -> int:
    # The shortest period in which the layers repeat.
    return next((n for n in range(1, len(words)) if words[n:] == words[:-n]), len(words))


def _ordinal(number: int) -> str:
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def _singular(sentence: str) -> str:
    words = {"see": "sees", "rotate": "rotates", "have": "has", "mix": "mixes", "use": "uses", "cap": "caps"}
    words["multiply"] = "multiplies"
    return " ".join(words.get(word, word) for word in sentence.replace("that they choose", "that it chooses").split())


def numbers_of(layers: Sequence[int]) -> str:
    """Return the numbers of layers as text: `0-2, 4-6 ... (24)`."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > 3:
        texts = [f"{', '.join(texts[:2])} ... {texts[-1]}"]
    return f"{', '.join(texts)} ({len(layers)})"


def show_positions(tables: Sequence[tuple[str, ModelPositions]], length: int, console: Console) -> None:
    """Print a table of what layers do in inputs of `length` tokens, each under a heading."""
    rows = [
        (heading, numbers_of(numbers), layer.cells) for heading, table in tables for numbers, layer in table.groups()
    ]
    title = f"at {short_length(length)} tokens"
    # Columns without any entry are left out, and so is the heading of a single table.
    columns = [column for column in _COLUMNS if any(cells.get(column) for _, _, cells in rows)]
    first = [title, "layers"] if len(tables) > 1 else ["layers"]
    printed = plain_table(*first, *columns)
    for heading, numbers, cells in rows:
        words = [heading, numbers] if len(tables) > 1 else [numbers]
        printed.add_row(*words, *(cells.get(column, "") for column in columns))
    if len(tables) == 1:
        console.out(f"{tables[0][0]} {title}:")
    console.print(printed)
    if "first" in columns:
        console.out("first, last: frequencies of the fastest and the slowest channel pair, radians per token")


def is_rescaled(layers: Layers) -> bool:
    """Return whether the frequencies of any layer's rotation are rescaled."""
    return any(isinstance(part, Rotary) and part.rescaling is not None for part in layers.modules())


def positions_of(model: Decoder, length: int) -> ModelPositions:
    """Return what a decoder's layers do, in inputs of `length` tokens."""
    layers = []
    for block, scheme in zip(model.blocks, model.scheme, strict=True):
        kind = cast(Block, block).attention.kind
        has_state = isinstance(kind, (NonSoftmax, GatedDeltaRule))
        layer = _layer(scheme, has_state, model.config.head_width, length)
        layers.append(replace(layer, has_sink=getattr(kind, "sink", None) is not None))
    embedded = "embed" in model.scheme.acts_on
    embedding = model.scheme.entries[0].name if embedded else ""
    return ModelPositions(layers, embedding, model.scheme.longest, None)


def _layer(scheme: Scheme, has_state: bool, channels: int, length: int) -> LayerPositions:
    parts = [part for part in scheme.modules() if isinstance(part, Scheme)]
    rotary = next((part for part in parts if isinstance(part, Rotary)), None)
    # Parts that only hold other parts act through them.
    others = [part for part in parts if part.acts_on - {"embed"} and not (part.chunk or [*part.children()])]
    names = [type(part).__name__ for part in others if not isinstance(part, Rotary)]
    sees, width = ALL, scheme.reach
    if width is not None:
        sees = CHUNK if scheme.reach == scheme.chunk else WINDOW
    if has_state:
        sees = STATE
    rotation = None if rotary is None else _rotation(rotary, length)
    return LayerPositions(sees, width, rotation, channels, ", ".join(names))


def _rotation(rotary: Rotary, length: int) -> Rotation:
    method, factor, temperature = "none", 1.0, 1.0
    if rotary.rescaling:
        method, factor = rotary.rescaling.name, rotary.rescaling.factor_at(length)
        temperature = rotary.rescaling.temperature(length)
    # Learned frequencies are on the model's device.
    device = next((parameter.device for parameter in rotary.parameters()), None)
    with torch.no_grad():
        frequencies = rotary.angles(torch.ones(1, device=device), length)[0]  # angles at position 1
    sites = "".join(site for site in "qkvo" if site in rotary.sites)
    return Rotation(rotary.base, method, factor, temperature, frequencies, sites)
