"""Say whether a scheme of one's own is one that posbench has already (`posbench verify my_scheme.py:Mine`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posbench.attention import Softmax
from posbench.attention.kernels import Scoring, attend
from posbench.catalogue.choices import choices
from posbench.config import Config
from posbench.schemes.base import evaluate_bias
from posbench.verify.certificates import one_thread
from posbench.verify.random_model import RandomModel, certificate_config, set_kernels

SAME = 1e-9  # largest difference of logits of size 1 between schemes that compute the same
NEAR = 0.5  # least correlation of what two schemes add to scores that is worth naming
PROPORTIONAL = 0.9999  # the same, if each head differs by a factor


@one_thread()
@torch.no_grad()
def nearest_scheme(config: Config) -> str:
    """Return a sentence: which scheme of conf/scheme computes the same as that of `config`, or comes nearest.

    Both read the same tokens with the same weights, in float64. A tensor that the other scheme learns is replaced by
    the scheme's own of the same shape, as it is and with the other sign; vectors without one are 0. The nearest has the
    largest correlation of what the two add to the scores of the first layer, mean over heads.
    """
    name, own = config.scheme.name, RandomModel.build(config)
    learnt = [parameter.detach() for parameter in own.wide.scheme.parameters()]
    plain, own_added = _scores(RandomModel.build(certificate_config("nope"))), _scores(own)
    best, nearest = NEAR, "nothing it adds to scores is near to theirs"
    for entry in choices("scheme"):
        other = RandomModel.build(certificate_config(entry))
        for sign in (1, -1) if learnt else (1,):
            _give(other, learnt, sign)
            described = f"{entry}, with the other sign of what is learnt" if sign < 0 else entry
            if other.length != own.length:
                continue
            difference = float((other.wide(other.tokens)[0] - own.logits).abs().max())
            if difference <= SAME:
                return f"{name} equals {described}: logits differ by at most {difference:.0e}"
            added = _scores(other)
            if plain is None or own_added is None or added is None:
                continue
            correlation = float((_unit(own_added - plain) * _unit(added - plain)).sum() / len(plain))
            if correlation > best:
                how = (
                    "in each head a multiple of it" if correlation > PROPORTIONAL else f"correlation {correlation:.2f}"
                )
                best, nearest = correlation, f"what it adds to scores is nearest to {described} ({how})"
    return f"{name} equals no scheme of posbench's; {nearest}"


def _unit(added: Tensor) -> Tensor:
    # Each head with the norm 1, or 0 if nothing is added.
    return (added / added.norm(dim=(1, 2), keepdim=True)).nan_to_num()


def _give(other: RandomModel, learnt: Sequence[Tensor], sign: int) -> None:
    left = list(learnt)
    for parameter in other.wide.scheme.parameters():
        fitting = [n for n, tensor in enumerate(left) if tensor.shape == parameter.shape]
        if fitting:
            parameter.data = sign * left.pop(fitting[0])
        elif parameter.ndim == 1:
            parameter.data = torch.zeros_like(parameter)


def _scores(random_model: RandomModel) -> Tensor | None:
    """Return the scores of the first layer, [H, T, T], each less the mean of its query; None without a softmax."""
    model, scores = random_model.wide, list[Tensor]()
    kinds = model.architecture.kinds

    def watched(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        H, T = q.shape[1:3]
        rows = scoring.scale * (q @ k.repeat_interleave(H // k.shape[1], dim=1).mT)[0]
        if scoring.bias is not None:
            zero = torch.zeros(1, dtype=torch.long)
            h, i, j = torch.meshgrid(torch.arange(H), torch.arange(T), torch.arange(T), indexing="ij")
            rows = rows + evaluate_bias(scoring.bias, zero, h, i, j)
        # A softmax does not see what all keys of a query share.
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        means = rows.where(visible, 0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        scores.append((rows - means).where(visible, 0))
        return attend(q, k, v, scoring)

    if isinstance(kinds[0], Softmax):
        set_kernels(model, [watched, *(None for _ in kinds[1:])])
        model(random_model.tokens)
        set_kernels(model, [None for _ in kinds])
    return scores[0] if scores else None
