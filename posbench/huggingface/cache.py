"""What a model keeps of the tokens before, in the form that transformers' `generate` passes around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from posbench.attention import Past
from posbench.model import Decoder

FARTHEST = 1 << 31  # tokens, where a scheme is defined for any length


class GrowingPast(Past):
    """One layer's past of a window whose length nobody knows beforehand: rows are appended."""

    def extended(self, *new: Tensor | None) -> tuple[Tensor | None, ...]:
        self.advance(next(x.shape[2] for x in new if x is not None))
        before = self.tensors or tuple(None if x is None else x[:, :, :0] for x in new)
        self.tensors = tuple(
            None if x is None or kept is None else torch.cat((kept, x), dim=2)
            for kept, x in zip(before, new, strict=True)
        )
        return self.tensors


@dataclass
class Group:
    """Sequences of a batch that begin at one place, behind as much padding."""

    padding: int  # tokens
    rows: Tensor  # their numbers in the batch, ascending, [n]
    pasts: list[Past]  # one a layer


class PosbenchCache:
    """The pasts of a batch: sequences with as much padding before them are read together, the others by themselves."""

    is_compileable = False

    def __init__(self, decoder: Decoder, padding: Tensor) -> None:
        """Arguments: padding, tokens before each sequence, [B]."""
        length = decoder.scheme.longest or FARTHEST
        self.groups = [
            Group(int(number), (padding == number).nonzero()[:, 0], [GrowingPast(length) for _ in decoder.blocks])
            for number in padding.unique()
        ]

    def get_seq_length(self) -> int:
        """Tokens that were read, padding included."""
        group = self.groups[0]
        return group.padding + group.pasts[0].filled if group.pasts[0].filled else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `n` go on from what row `beam_idx[n]` keeps (beam search), both of one group."""
        for group in self.groups:
            chosen = torch.searchsorted(group.rows, beam_idx.to(group.rows.device)[group.rows])
            for past in [each for layer in group.pasts for each in (layer, *layer.gates.values())]:
                past.tensors = tuple(None if x is None else x[chosen] for x in past.tensors)
                past.state = tuple(cast(Tensor, None) if x is None else x[chosen] for x in past.state)
