"""Three candidates for a loop (docs/loops.md): one that wins, the baseline under another name, and one that loses."""

import torch

from posbench.schemes import Scheme, Turn, turn


class Forgetting(Scheme):
    """Each token forgets by itself: add the sum of ln sigmoid(w_h . x_l + 4) from the key to the query."""

    per_layer = True

    def __init__(self, shape):
        super().__init__(shape)
        self.w = self.normal(shape.num_heads, shape.d_model)

    def gate(self, x, pos):
        return torch.nn.functional.logsigmoid(x.to(self.w.dtype) @ self.w.t() + 4).transpose(1, 2)[..., None]

    def bias(self, q, k, gates, at):
        until_query, until_key = gates.sum_at_query[..., 0], gates.sum_at_key[..., 0]  # [B, H, rows]
        return lambda b, h, i, j: until_query[b, h, i] - until_key[b, h, j]


class Renamed(Scheme):
    """RoPE on q and k: the baseline under another name."""

    def prepare(self, pos, length):
        half = torch.arange(0, self.shape.head_dim, 2, device=pos.device) / self.shape.head_dim
        angles = pos[..., None] * 10000.0 ** -half.double()
        return Turn(angles.cos(), angles.sin())

    def q(self, x, pos):
        return turn(x, pos)

    def k(self, x, pos):
        return turn(x, pos)


class Distant(Scheme):
    """Add distance / 8 to every score: the farther, the better."""

    def bias(self, q, k, gates, at):
        return at.look_up((at.distances(q) / 8.0).expand(self.shape.num_heads, -1))
