"""Define what the protocols ask of a model: the losses of a window, and a few facts about its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ScoredModel(Protocol):
    """A model that protocols score: posbench's decoder, or a model of transformers (`posbench.huggingface`)."""

    piece: int | None  # longer windows are read in pieces of this many tokens; None means whole

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of the activations."""

    @property
    def vocab_size(self) -> int:
        """Return the rows of the embedding table."""

    @property
    def num_heads(self) -> int:
        """Return the query heads of a layer."""

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        offset: int = 0,
        last: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the `last` targets of each window, [B, last] float32 in nats; None means all."""
