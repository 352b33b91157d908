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
    """Return the learning rate of step `step` (0-based): linear warm-up, then the schedule cosine, constant or wsd.

    `cosine` falls to `lr_end_ratio * lr` (Loshchilov and Hutter 2017); `wsd` stays at the peak and falls to the same
    rate over the last `decay_ratio` of the steps (Hu et al. 2024, arXiv 2404.06395). Warm-up takes `warmup_ratio` of
    the steps; a branch, a shorter run that starts from a longer run's checkpoint, uses the longer run's number of
    steps.
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
    """Return the L2 norm of the gradients of all parameters together, 0-d.

    Arguments: sharded, whether each process has only its shards of the gradients; the norm is then over all processes.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if not sharded:
        return norm
    squares = norm.square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: all matrices, but of a scheme only those it names.

    A position scheme lists the names of its parameters with weight decay in its attribute `decayed`.
    """
    schemes = {prefix: module for prefix, module in model.named_modules() if isinstance(module, Scheme)}
    decayed = {f"{prefix}.{name}" for prefix, scheme in schemes.items() for name in scheme.decayed}
    of_schemes = {f"{prefix}.{name}" for prefix, scheme in schemes.items() for name, _ in scheme.named_parameters()}
    return decayed | {name for name, p in model.named_parameters() if p.ndim >= 2 and name not in of_schemes}


class AdamW:
    """PyTorch's fused AdamW (Loshchilov and Hutter 2019) that clips gradients and skips non-finite ones in its kernel.

    `step` divides the gradients by `max(1, norm / grad_clip)` inside the kernel. If the norm is not finite, the kernel
    leaves weights and moments as they were. The host does not read the norm, so it never waits for the GPU.

    Parameters of the scheme have a learning rate of `scheme_lr_factor` times the usual one.

    The update is element by element, so every process updates its own shards of sharded parameters (FSDP2).
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
        self.inner = torch.optim.AdamW(
            [{"params": group, "factor": factor, "weight_decay": decay} for (factor, decay), group in groups.items()],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def set_rate(self, step: int) -> None:
        """Set the optimizer's learning rates for step `step` (0-based)."""
        for group in self.inner.param_groups:
            group["lr"] = group["factor"] * learning_rate(step, self.config)

    def norm(self) -> Tensor:
        """Return the L2 norm of all current gradients together, over all processes, 0-d."""
        for name, p in self.parameters.items():
            if self.shards[name] is not p and p.grad is not None:
                self.shards[name].grad = p.grad.to_local()  # type: ignore[attr-defined]
        return global_norm(
            self.shards.values(), sharded=any(self.shards[name] is not p for name, p in self.parameters.items())
        )

    def step(self, healthy: Tensor) -> Tensor:
        """Update the weights with the current gradients, and return the gradients' norm before clipping, 0-d.

        Arguments: healthy, 0-d bool on the device, False if the loss was not finite; then nothing is updated.
        """
        norm = self.norm()
        good = healthy & norm.isfinite()
        clip = self.config.grad_clip
        # The fused kernel reads these two attributes, which PyTorch's gradient scaler sets. The class does not declare
        # them.
        fused: Any = self.inner
        fused.grad_scale = ((norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)).to(torch.float32)
        fused.found_inf = (~good).to(torch.float32)
        self.inner.step()
        return norm

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self.inner.zero_grad(set_to_none=True)
        for p in self.parameters.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return {name: tensor} of moments and step counts (`<parameter>/exp_avg` and so on), unsharded, on rank 0."""
        return {
            f"{name}/{key}": value if key == "step" else put_together(value, p)
            for name, p in self.parameters.items()
            for key, value in self.inner.state.get(self.shards[name], {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the moments and step counts that the method `state` returned."""
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            p = self.parameters[name]
            moments = self.inner.state[self.shards[name]]
            moments[key] = (value if key == "step" else shard_like(value, p)).to(p.device)
