"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024), with the size of AdamW's updates.

For the gradient G of one matrix [r, c], with momentum m, rate e and weight decay w:

    M <- m M + (1 - m) G        U = orthogonal((1 - m) G + m M)        W <- (1 - e w) W - e 0.2 sqrt(max(r, c)) U

The update is Moonlight's (arXiv 2502.16982): its root mean square is about AdamW's, so both take the same rates. AdamW
trains all but the matrices of attention and SwiGLU: embeddings, gains, biases, and all of a scheme or a kind of
attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import TrainConfig
from posbench.model.layers import layer_matrices
from posbench.training.optimizers.adamw import AdamW
from posbench.training.optimizers.optimizer import Optimizer, decayed_parameters

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at 0, and near 1 after five applications
# Least norm to divide by. In float32 the squares of entries below 1e-19 underflow, and the norm may come out as 0.
# Divided by less than its true norm, a matrix has singular values above 1, where the polynomial explodes.
_TINY = 1e-15
_TABLES = ("embedding.weight", "unembedding.weight")
_RMS = 0.2  # root mean square of an update in units of the rate, as of AdamW (Moonlight, section 2.2)


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """Return U p(S / |M|) V' for each matrix M = U S V' of [N, r, c]; p is `steps` applications of the polynomial."""
    rows, columns = matrices.shape[-2:]
    norms = matrices.norm(dim=(-2, -1), keepdim=True)
    x = matrices / norms.clamp(min=_TINY)
    # A control: it has only the size of an orthogonal update.
    if steps == 0:
        return x * math.sqrt(min(rows, columns))
    # Newton and Schulz: all singular values become roughly 1.
    a, b, c = _COEFFICIENTS
    x = x.mT if rows > columns else x  # x x' is then the smaller product
    for _ in range(steps):
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.mT if rows > columns else x


def orthogonal_updates(
    directions: Mapping[str, Tensor], rows: Mapping[str, Sequence[int]], steps: int, dtype: torch.dtype | None
) -> dict[str, list[Tensor]]:
    """Return {parameter: updates for a rate of 1}, one per matrix, with the size of AdamW's updates.

    Arguments: directions, {parameter: [..., rows, columns]}, each with the matrices `rows` one below the other; dtype,
    of the orthogonalisation, None for that of the directions.
    """
    parts: dict[torch.Size, list[Tensor]] = {}  # the matrices to orthogonalise, by shape
    places: dict[str, list[tuple[torch.Size, int]]] = {}  # parameter -> shape and number of each of its parts
    # A packed projection is several matrices: q, k and v, or gate and up, are orthogonalised each by itself.
    for name, direction in directions.items():
        for part in direction.to(dtype or direction.dtype).split(list(rows[name]), dim=-2):
            of_shape = parts.setdefault(part.shape, [])
            places.setdefault(name, []).append((part.shape, len(of_shape)))
            of_shape.append(part)
    # All matrices of one shape at once.
    updates_of_shape = {}
    for shape, of_shape in parts.items():
        size = _RMS * math.sqrt(max(shape[-2:]))
        matrices = torch.stack(of_shape)
        updates = orthogonal(matrices.flatten(0, -3), steps).view_as(matrices)
        updates_of_shape[shape] = updates.to(directions[next(iter(directions))].dtype) * size
    updates_of = {}
    for name in directions:
        updates_of[name] = [updates_of_shape[shape][number] for shape, number in places[name]]
    return updates_of


def flops_per_step(model: nn.Module, steps: int) -> int:
    """Return the FLOPs of orthogonalising all matrices of `model`, also on the meta device, once."""
    flops = 0
    parameters = dict(model.named_parameters())
    for name, rows in layer_matrices(model).items():
        columns = parameters[name].shape[1]
        for part in rows:
            short, long = sorted((part, columns))
            # Two products of [short, long] and one of [short, short], per step.
            flops += steps * (4 * short**2 * long + 2 * short**3)
    return flops


class Muon(Optimizer):
    """Muon for the layers' matrices, AdamW for the rest."""

    def __init__(self, model: nn.Module, config: TrainConfig, scheme_lr_factor: float = 1.0, /) -> None:
        super().__init__(model, config, scheme_lr_factor)
        self.rows = layer_matrices(model)
        # Of the position scheme or the kind of attention: like all matrices they have weight decay, but by AdamW.
        decayed = decayed_parameters(model) - {*self.rows, *_TABLES}
        self.own_matrices = [name for name in self.weights if name in decayed]
        self.dtype = getattr(model, "compute_dtype", None)  # of the orthogonalisation; None means the weights'
        rest = [name for name in self.weights if name not in self.rows]
        self.adamw = AdamW(model, config, scheme_lr_factor, rest)
        self.moments = {name: self.adamw.moments[name] for name in rest}
        self.moments |= {name: {"momentum": torch.zeros_like(self.weights[name])} for name in self.rows}

    @property
    def record(self) -> dict[str, Any]:
        """Return the share of parameters that Muon trains, its number format, and the size of other matrices."""
        sizes = {name: p.numel() for name, p in self.weights.items()}
        dtype = self.dtype or next(iter(self.weights.values())).dtype
        return {
            "muon_share": round(sum(sizes[name] for name in self.rows) / sum(sizes.values()), 4),
            "own_matrices": sum(sizes[name] for name in self.own_matrices),
            "dtype": str(dtype).removeprefix("torch."),
        }

    @staticmethod
    def described(record: Mapping[str, Any]) -> str:
        share, dtype = record["muon_share"], record["dtype"]
        return f"{share:.0%} of the parameters, the matrices of attention and SwiGLU, in {dtype}; AdamW trains the rest"

    def update(self, divisor: Tensor, healthy: Tensor) -> None:
        self.adamw.rates = self.rates
        self.adamw.update(divisor, healthy)
        # In a step that must change nothing, gradients are set to 0, and all changes below are multiplied by 0.
        one_if_healthy, divisor = healthy.to(divisor.dtype), torch.where(healthy, divisor, 1.0)
        directions = {name: self._direction(name, divisor, healthy, one_if_healthy) for name in self.rows}
        updates = orthogonal_updates(directions, self.rows, self.config.ns_steps, self.dtype)
        for name, rows in self.rows.items():
            weight, rate = self.weights[name], self.rates[name]
            weight.mul_(1 - rate * self.decays[name] * one_if_healthy)
            for part, update in zip(weight.split(rows), updates[name], strict=True):
                part.addcmul_(update, one_if_healthy, value=-rate)

    def _direction(self, name: str, divisor: Tensor, healthy: Tensor, one_if_healthy: Tensor) -> Tensor:
        # Nesterov: the gradient is averaged with its momentum, which is updated.
        momentum, share = self.moments[name]["momentum"], self.config.momentum
        gradient = self.weights[name].grad
        assert gradient is not None
        gradient = torch.where(healthy, gradient, 0.0).div_(divisor)
        momentum.lerp_(gradient, (1 - share) * one_if_healthy)
        return gradient.lerp_(momentum, share)
