"""Schemes of one's own, for tests to name as `trials.py:Class`: each a trial of the seam in a few lines."""

from pathlib import Path

import torch
from torch import nn

from posbench.config import SchemeConfig
from posbench.schemes import Scheme


def trial(name, *, attention=None, **options):
    """Return the configuration of a scheme class of this file."""
    return SchemeConfig(name.lower(), f"{Path(__file__)}:{name}", options, attention or {})


class BackTooFar(Scheme):
    """Reads two rows back and promises one, which is refused."""

    looks_back = 1

    def k(self, x, pos, earlier):
        return earlier(2)


class BackFirst(Scheme):
    """The arguments of its hook are in another order, which is refused."""

    looks_back = 1

    def k(self, x, earlier, pos):
        return earlier(1)


class OfQueries(Scheme):
    """Gates of all heads that turn only queries."""

    def gate(self, x, pos):
        return x.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)[..., :1]

    def locate(self, pos, gates):
        return gates.sum_at_query

    def q(self, x, pos):
        return x * pos.sigmoid()


class OfKeysToo(OfQueries):
    """Gates of all heads that turn keys too, which are fewer, so it is refused."""

    def k(self, x, pos):
        return x * pos.sigmoid()


class RoundsAngles(Scheme):
    """Its angles are computed in float32 from the hidden states, and are large."""

    is_relative = keeps_norms = False
    reads_earlier_gates = False

    def __init__(self, shape):
        super().__init__(shape)
        self.w = self.normal(1, shape.d_model)

    def gate(self, x, pos):
        return 1e4 * (x.to(self.w.dtype) @ self.w.mT)[:, None]

    def locate(self, pos, gates):
        return gates.at_query

    def q(self, x, pos):
        return x * pos.cos().to(x.dtype)


class OfOneFormat(RoundsAngles):
    """Its weights are multiplied by hidden states of another format, which torch refuses."""

    def gate(self, x, pos):
        return (x @ self.w.mT)[:, None]


class Misshapen(Scheme):
    """A gate without heads, which is refused."""

    def gate(self, x, pos):
        return x


class FromTheEnd(Scheme):
    """A hook with a wrong signature, which is refused."""

    def bias(self, q, gate, at):
        return None


class Common(Scheme):
    """Two tensors that all layers share."""

    instances = 0  # constructed so far, subclasses included

    def __init__(self, shape):
        super().__init__(shape)
        Common.instances += 1
        self.own, self.common = self.normal(3, 5), self.normal(3, 5)


class Several(Common):
    """Two tensors, one shared by all layers and one of each layer."""

    per_layer = ("own",)


class Single(Common):
    """Three tensors of each layer, one of which its constructor draws."""

    per_layer = True

    def __init__(self, shape):
        super().__init__(shape)
        self.table = nn.Parameter(torch.randn(3, 5))


class Kinked(Scheme):
    """Triangle waves of the learned slope times the distance: linear between many kinks.

    Options: `scale`, of its gradient, which is right at 1.
    """

    def __init__(self, shape, scale=1.0):
        super().__init__(shape)
        self.scale, self.slope = scale, self.normal(shape.num_heads)

    def bias(self, q, k, gates, at):
        slope = self.scale * self.slope + (1 - self.scale) * self.slope.detach()
        waves = slope[:, None, None] * at.distances(q)[:, None] + torch.arange(64.0).sin()
        return at.look_up((waves - waves.round()).abs().mean(-1))


class Gentle(Scheme):
    """A bias that is no constant decay."""

    def bias(self, q, k, gates, at):
        return lambda b, h, i, j: -0.3 * at.distance(b, i, j).clamp(min=0).double().sqrt()


class Rising(Scheme):
    """A bias of the key's position, past what exp can hold in float32; weights over their sum do not feel it."""

    def bias(self, q, k, gates, at):
        return lambda b, h, i, j: 2.0 * (j + at.first_key)


class KeyBias(Scheme):
    """BLOOM's ALiBi: a bias that grows with the key's index, relative because a softmax drops what a row shares.

    Relative in exact arithmetic, that is: a million tokens out, float32 has no room left for the scores beside it.
    """

    def bias(self, q, k, gates, at):
        return lambda b, h, i, j: 0.01 * (j + at.first_key).double()


class LooksAhead(Scheme):
    """Every token's key is its successor's."""

    def k(self, x, pos):
        return x.roll(-1, dims=2)


class Boastful(Scheme):
    """Promises to be relative but is not. (A bias linear in the key would be, up to a term that softmax drops.)."""

    def bias(self, q, k, gates, at):
        return lambda b, h, i, j: -0.001 * (i + at.first_query) * (j + at.first_key)


class Modest(Scheme):
    """Promises to be absolute with nothing that is."""

    is_relative = False


class Deaf(Scheme):
    """Pass nothing to attention: a test of causality would not notice such a broken forward pass."""

    def embed(self, x, pos):
        return x * 0


class Ends(Scheme):
    """A scheme that ends at position 99, whatever length it is trained at."""

    longest = 100

    def prepare(self, pos, length):
        assert int(pos.max()) < 100
        return pos


class Swallows(Scheme):
    """Passes its arguments on, as a first draft may."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Other(Single):
    """A second class with the same parameters as Single."""


class Stretched(Scheme):
    """Outputs have more channels than the values, which is refused."""

    def o(self, x, pos):
        return x.repeat(1, 1, 1, 2)


class BiasOfHeads(Scheme):
    """The bias has no rows, which is refused."""

    def bias(self, q, k, gates, at):
        tensor = torch.zeros(1, self.shape.num_heads, q.shape[2], k.shape[2])
        return lambda b, h, i, j: tensor[b, h]


class BiasOfTruths(Scheme):
    """The bias is boolean, like a mask, which is refused."""

    def bias(self, q, k, gates, at):
        return lambda b, h, i, j: at.distance(b, i, j) < 9


class Bump(Scheme):
    """A natural first scheme, which takes positions as [T] only."""

    is_relative = False

    def embed(self, x, pos):
        return x + torch.sin(pos[:, None] * 0.001 * torch.arange(x.shape[-1])).to(x.dtype)


class BumpByQuery(Scheme):
    """Add a bump in attention, with positions taken as [T] only."""

    is_relative = keeps_norms = False

    def q(self, x, pos):
        return x + (pos[: x.shape[2], None] * 0.001).sin().to(x.dtype)


class Rounds(Scheme):
    """Its bias rounds a parameter to float32."""

    def __init__(self, shape):
        super().__init__(shape)
        self.log_a = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q, k, gates, at):
        slope = self.log_a.float().exp()
        return at.look_up(-slope[:, None] * at.distances(q))


class RoundsQueries(Scheme):
    """Its queries have fewer digits than its keys, so that attention cannot multiply them."""

    def q(self, x, pos):
        return x.float()


class RootOfNegative(Scheme):
    """Its bias is NaN."""

    def bias(self, q, k, gates, at):
        return at.look_up((-at.distances(q).to(q.dtype)).sqrt().expand(self.shape.num_heads, -1))
