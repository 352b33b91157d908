"""AdamW with decay on matrices only, clipping folded into the step, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import TrainConfig
from posbench.runs.checkpoint import put_together, shard_like, shard_of
from posbench.schemes import Scheme


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step` (0-based): linear warm-up, then cosine, constant, or constant with a decay.

    `cosine` falls to `lr_end_ratio * lr` (Loshchilov and Hutter 2017); `wsd` stays at the peak and falls there over
    the last `decay_ratio` of the steps (Hu et al. 2024, arXiv 2404.06395). Warm-up is `warmup_ratio` of the steps, in
    a family of runs of the trunk's.
    """
    total, warmup = config.num_steps, config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    end = config.lr_end_ratio * config.lr
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        return end + (config.lr - end) * (1 + math.cos(math.pi * progress)) / 2
    begins = config.decay_begins if config.schedule == "wsd" else total
    if step < begins:
        return config.lr
    return config.lr + (end - config.lr) * (step - begins + 1) / (total - begins)


def global_norm(parameters: Iterable[Tensor], sharded: bool) -> Tensor:
    """The norm of all gradients together, 0-d; of shards, over the processes that hold them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if not sharded:
        return norm
    squares = norm.square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay shrinks: matrices, of a position scheme only those in its `decayed`."""
    schemes = {name: module for name, module in model.named_modules() if isinstance(module, Scheme)}
    named = {f"{name}.{own}" for name, scheme in schemes.items() for own in scheme.decayed}
    theirs = {f"{name}.{own}" for name, scheme in schemes.items() for own, _ in scheme.named_parameters()}
    return named | {name for name, p in model.named_parameters() if p.ndim >= 2 and name not in theirs}


class AdamW:
    """PyTorch's fused AdamW (Loshchilov and Hutter 2019), which clips and refuses bad gradients in the same pass.

    `step` divides the gradients by `max(1, norm / grad_clip)` inside the kernel, and leaves weights and moments as they
    were where the norm is not finite: without a word to the host, so that a GPU is never waited for.

    `scheme_lr_factor` times the learning rate holds for parameters of the scheme's own.

    The update is element by element, so of sharded parameters (FSDP2) every process updates its own shards.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, scheme_lr_factor: float = 1.0) -> None:
        self.config = config
        self.parameters = dict(model.named_parameters())
        self.shards = {name: shard_of(p) for name, p in self.parameters.items()}
        decayed = decayed_parameters(model)
        groups: dict[tuple[float, float], list[Tensor]] = {}  # (factor of the rate, weight decay) -> parameters
        for name, shard in self.shards.items():
            factor = scheme_lr_factor if name.startswith("scheme.") else 1.0
            groups.setdefault((factor, config.weight_decay if name in decayed else 0.0), []).append(shard)
        self.torch = torch.optim.AdamW(
            [{"params": of, "factor": factor, "weight_decay": decay} for (factor, decay), of in groups.items()],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def set_rate(self, step: int) -> None:
        """Set the learning rate of step `step` (0-based)."""
        for group in self.torch.param_groups:
            group["lr"] = group["factor"] * learning_rate(step, self.config)

    def norm(self) -> Tensor:
        """The global norm of the gradients at hand, 0-d."""
        for name, p in self.parameters.items():
            if self.shards[name] is not p and p.grad is not None:
                self.shards[name].grad = p.grad.to_local()  # type: ignore[attr-defined]
        return global_norm(
            self.shards.values(), sharded=any(self.shards[name] is not p for name, p in self.parameters.items())
        )

    def step(self, healthy: Tensor) -> Tensor:
        """One update with the gradients at hand. Returns their global norm, before clipping, a 0-d tensor.

        Arguments: healthy, 0-d bool, false where the loss was not finite.
        """
        norm = self.norm()
        good = healthy & norm.isfinite()
        clip = self.config.grad_clip
        # Read by PyTorch's fused kernel (its gradient scaler sets them); not declared in the class.
        fused: Any = self.torch
        fused.grad_scale = ((norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)).to(torch.float32)
        fused.found_inf = (~good).to(torch.float32)
        self.torch.step()
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.torch.zero_grad(set_to_none=True)
        for p in self.parameters.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """The moments and step counts by parameter name, `name/exp_avg` and so on."""
        return {
            f"{name}/{key}": value if key == "step" else put_together(value, p)
            for name, p in self.parameters.items()
            for key, value in self.torch.state.get(self.shards[name], {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for place, value in state.items():
            name, _, key = place.rpartition("/")
            p = self.parameters[name]
            moments = self.torch.state[self.shards[name]]
            moments[key] = (value if key == "step" else shard_like(value, p)).to(p.device)
