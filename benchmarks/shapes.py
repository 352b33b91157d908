"""Define the shapes at which steps are measured, and the posbench configuration of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posbench import compose
from posbench.config import Config


@dataclass(frozen=True)
class Shape:
    """The size of a LLaMA-like decoder with untied embeddings, and of its batches."""

    layers: int
    width: int
    heads: int
    context: int  # tokens
    batch: int  # sequences
    vocab: int = 4096
    ffn: int | None = None  # None means 8/3 of the width, as in posbench


SHAPES = {
    "A": Shape(6, 256, 4, 256, 16),
    "B": Shape(8, 512, 8, 512, 8),
    # Experiments that run on a CPU: conf/experiment/demo, headline and ladder_l, and tasks.
    "demo": Shape(2, 64, 4, 128, 8, vocab=512),
    "headline": Shape(3, 96, 6, 256, 4, vocab=512),
    "ladder_l": Shape(4, 128, 8, 256, 4, vocab=512),
    "tasks": Shape(2, 64, 4, 40, 64, vocab=32),
    # Models of conf/model, with batches for a GPU of 80 GB or more.
    "small": Shape(6, 256, 4, 512, 64, vocab=16384),
    "25m": Shape(8, 512, 8, 1024, 64, vocab=16384),
    "125m": Shape(12, 768, 12, 1024, 32, vocab=16384),
    "350m": Shape(24, 1024, 16, 1024, 16, vocab=16384),
    "1b": Shape(16, 2048, 16, 2048, 8, vocab=16384, ffn=8192),
}


def config_of(shape: Shape, scheme: str, dtype: str, compiled: bool, more: Sequence[str] = ()) -> Config:
    """Return the posbench configuration of a shape, with AdamW unless the overrides `more` name another optimizer."""
    overrides = ["train.optimizer=adamw"]
    overrides += [f"scheme={scheme}", f"model.num_layers={shape.layers}", f"model.d_model={shape.width}"]
    overrides += [f"model.num_heads={shape.heads}", f"train.context_length={shape.context}"]
    overrides += [f"train.batch_size={shape.batch}", f"train.dtype={dtype}", f"train.compile={compiled}"]
    return compose([*overrides, *([f"model.ffn_dim={shape.ffn}"] if shape.ffn else []), *more])


def ffn(shape: Shape) -> int:
    """Return the feed-forward width of all LLaMA-like contenders."""
    width = config_of(shape, "nope", "float32", False).model.ffn_width
    assert width is not None
    return int(width)
