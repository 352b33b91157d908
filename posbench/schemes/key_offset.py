"""Key offset: take the unrotated part of each key from the previous token (KellerJordan/modded-nanogpt, PR 169)."""

from __future__ import annotations

import torch
from torch import Tensor

from posbench.schemes.earlier import Earlier
from posbench.schemes.partial import PartialRotary
from posbench.schemes.rotary import TemperedTurn, Turn


class KeyOffset(PartialRotary):
    """Key offset: rotate the first channels of q and k, and take the other channels of k_t from k_{t-1}.

    A query can then find a token by the one before it, which otherwise needs two layers (induction). The first token of
    a window or document gets zeros there, unlike in modded-nanogpt.

    Options: those of `PartialRotary`; `fraction` is the rotated part (0.5 in modded-nanogpt).
    """

    looks_back = 1
    keeps_norms = False

    def k(self, x: Tensor, pos: Turn | TemperedTurn, earlier: Earlier) -> Tensor:  # type: ignore[override]
        # modded-nanogpt keeps the first token's own channels, and reads across documents.
        return torch.cat((super().k(x, pos)[..., : self.width], earlier(1)[..., self.width :]), dim=-1)
