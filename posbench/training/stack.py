"""Take the training steps of several runs as one: runs that differ in seed, rates and other numbers only.

A step of a small model is many small kernels, and a GPU waits for their launches. Stacked, R copies of the model share
each launch: `torch.func.vmap` turns products into batched products. The copies' own parameters and moments are views
into the stacked tensors, so validation, checkpoints and resume work as for a run alone.

Shapes: R copies, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from posbench.config import Config, TrainConfig
from posbench.data import Batch, vocab_size
from posbench.model.decoder import build_model
from posbench.system.plain import plain_code
from posbench.training.optimizers import AdamW, Muon, optimizer_class
from posbench.training.optimizers.muon import orthogonal_updates
from posbench.training.optimizers.optimizer import learning_rate
from posbench.training.processes import Loss
from posbench.training.step import TrainingStep

_WARMUP = 3  # steps of a stack before its graph is recorded
# Settings in which the runs of a stack may differ, besides seed and names.
_NUMBERS = ("lr", "lr_of", "matrix_lr_factor", "momentum", "weight_decay", "beta1", "beta2", "eps", "grad_clip")
_NAMES = ("experiment_name", "runs_dir", "seed", "tracking")


def stack_key(config: Config) -> str | None:
    """Return a text that is equal for runs that can train as one, or None for a run that must train alone."""
    # Only these optimizers have stacked code. Runs that continue a model, or mask documents, train alone.
    if optimizer_class(config.train) not in (AdamW, Muon) or config.train.from_run or config.data.document_mask:
        return None
    # All other settings must be equal.
    mapping = config.to_mapping()
    settings = {key: value for key, value in mapping.items() if key not in _NAMES}
    settings["train"] = {key: value for key, value in mapping["train"].items() if key not in _NUMBERS}
    settings["scheme"] = {key: value for key, value in mapping["scheme"].items() if key not in ("lr", "lr_factor")}
    return repr(sorted(settings.items()))


def refusal_to_stack(config: Config) -> str | None:
    """Return why torch cannot stack runs of `config`, or None if it can."""
    entries = vocab_size(config)
    model = build_model(config, entries)
    loss = Loss(model)
    # Two copies and one short batch are enough to find out.
    weights = {name: torch.stack([p.detach()] * 2) for name, p in model.named_parameters()}
    tokens = torch.zeros(2, 1, config.train.context_length, dtype=torch.int64)

    def loss_of(weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        return _called(loss, weights, tokens, tokens)

    try:
        with plain_code():
            vmap(grad_and_value(loss_of))(weights, tokens)
    # torch.func raises these for operations it cannot transform, in a user's scheme too.
    except (RuntimeError, ValueError, TypeError) as error:
        return " ".join(str(error).split())[:200]
    return None


class Stack:
    """The training steps of R runs, taken as one. It owns the memory of their weights and moments."""

    def __init__(self, steps: Sequence[TrainingStep], configs: Sequence[Config]) -> None:
        """Stack weights, buffers and moments, [R, ...], of `steps` with one `stack_key`; their own become views."""
        self.steps, self.device = list(steps), steps[0].device
        self.accumulation = steps[0].accumulation
        self.trains: list[TrainConfig] = [config.train for config in configs]
        self.loss = Loss(steps[0].model)
        models = [step.model for step in steps]
        self.weights = _stacked([dict(model.named_parameters()) for model in models])
        self.buffers = _stacked([dict(model.named_buffers()) for model in models])
        self.names_of_muon = set[str]()
        optimizer = steps[0].optimizer
        if isinstance(optimizer, Muon):
            self.names_of_muon = set(optimizer.rows)
        self.moments = {}
        for name in self.weights:
            self.moments[name] = _stacked([self._moments(step, name) for step in steps])
        # One number per copy, [R] each, of settings in which the copies may differ.
        self.factors = self._numbers(lambda step, name: step.optimizer.factors[name])
        self.decays = self._numbers(lambda step, name: step.optimizer.decays[name])
        self.beta1 = self._column([train.beta1 for train in self.trains])
        self.beta2 = self._column([train.beta2 for train in self.trains])
        self.eps = self._column([train.eps for train in self.trains])
        self.momentum = self._column([train.momentum for train in self.trains])
        # Without clipping the limit is infinite, and nothing is divided.
        self.clip = self._column([train.grad_clip or torch.inf for train in self.trains])
        self.gradients: Callable[..., Any] = vmap(grad_and_value(self._loss_of))
        self.step: Callable[..., Tensor] = self._step  # later the compiled one
        self.graph: Any = None  # of the whole step, on a GPU
        self.taken = 0

    def __call__(self, numbers: Sequence[int], batches: Sequence[Batch]) -> Tensor:
        """Take a step of each run. Return [R, 2] on the device: loss in nats, and gradient norm before clipping.

        Arguments: numbers, of each run's step (0-based); batches, one per run, on the host. A run whose loss or norm is
        not finite keeps its weights and moments.
        """
        rates = [learning_rate(number, train) for number, train in zip(numbers, self.trains, strict=True)]
        rows = {
            name: self.device.send(np.stack(parts))
            for name, *parts in zip(Batch._fields, *batches, strict=True)
            # Text has no answers and no positions.
            if parts[0] is not None
        }
        rates_of_copies = self._column(rates)
        if self.device.compiled and self.taken == 0:
            self.step = self._compiled(rates_of_copies, rows)
        self.taken += 1
        if not self.device.is_cuda:
            return self.step(*self.state, rates_of_copies, rows)
        return self._step_by_graph(rates_of_copies, rows)

    @property
    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return weights, buffers and moments by the name of the parameter, [R, ...]."""
        return self.weights, self.buffers, self.moments

    def _compiled(self, rates: Tensor, rows: dict[str, Tensor]) -> Callable[..., Tensor]:
        def step(*arguments: Any) -> Tensor:  # make_fx takes no methods
            return self._step(*arguments)

        # Trace the whole step to one list of operations, which `torch.compile` fuses. Tracing takes a step, hence the
        # copies.
        operations = make_fx(step)(*tree_map(torch.clone, self.state), rates, rows)
        return torch.compile(operations, fullgraph=True)

    def _step_by_graph(self, rates: Tensor, rows: dict[str, Tensor]) -> Tensor:
        # Take a step by replaying a CUDA graph of it, which is recorded after _WARMUP ordinary steps.
        if self.graph is None and self.taken <= _WARMUP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # recording needs a stream that is not the default one, and warm libraries
                result = self.step(*self.state, rates, rows)
            torch.cuda.current_stream().wait_stream(side)
            return result
        if self.graph is None:
            self.rates, self.rows = rates.clone(), {name: x.clone() for name, x in rows.items()}
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.step(*self.state, self.rates, self.rows)
        # A graph reads fixed buffers.
        self.rates.copy_(rates)
        for name, x in rows.items():
            self.rows[name].copy_(x)
        self.graph.replay()
        return self.result.clone()  # the next replay writes into it

    def _step(
        self,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        moments: dict[str, dict[str, Tensor]],
        rates: Tensor,
        rows: dict[str, Tensor],
    ) -> Tensor:
        # Take one step, and return losses and norms [R, 2]. Arguments: rates [R]; rows, batches' fields [R, B, .].
        fixed = {}  # the same for all micro-batches
        # Only tasks have answers. The mean number of them per micro-batch divides each micro-batch's summed loss.
        if "answers" in rows:
            fixed["divisor"] = (rows["answers"] >= 0).sum((1, 2)) / self.accumulation
        losses = torch.zeros(len(rates), device=self.device.torch)
        summed: dict[str, Tensor] = {}
        # Forward and backward over micro-batches, whose gradients are added.
        for number in range(self.accumulation):
            part = {name: x.chunk(self.accumulation, dim=1)[number] for name, x in rows.items()}
            with plain_code():
                gradients, loss = self.gradients(weights, buffers, part | fixed)
            losses = losses + loss.detach()
            for name, gradient in gradients.items():
                summed[name] = gradient if name not in summed else summed[name] + gradient
        # Clip each copy by its own norm.
        squared_norms = [gradient.reshape(len(gradient), -1).square().sum(1) for gradient in summed.values()]
        norms = torch.stack(squared_norms).sum(0).sqrt()
        healthy = losses.isfinite() & norms.isfinite()
        divisor = (norms / self.clip).clamp(min=1.0)
        clipped = {name: gradient / _beside(divisor, gradient) for name, gradient in summed.items()}
        self._update(weights, moments, clipped, rates, healthy)
        return torch.stack((losses, norms.to(losses.dtype)), dim=1)

    def _loss_of(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
    ) -> Tensor:
        # The loss of one copy on a micro-batch; `vmap` gives it tensors without the dimension R.
        tokens = rows["tokens"]
        targets = rows.get("answers", tokens[:, 1:])
        state = {**weights, **buffers}
        loss = _called(self.loss, state, tokens[:, :-1], targets, rows.get("positions"), rows.get("divisor"))
        return loss / self.accumulation

    @torch.no_grad()
    def _update(
        self,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, dict[str, Tensor]],
        gradients: Mapping[str, Tensor],
        rates: Tensor,
        healthy: Tensor,
    ) -> None:
        # Update the weights and moments of the copies that are `healthy`, bool [R]; the others stay as they are.
        of_muon = {name: gradient for name, gradient in gradients.items() if name in self.names_of_muon}
        of_adamw = {name: gradient for name, gradient in gradients.items() if name not in self.names_of_muon}
        updates = self._adamw(of_adamw, moments, healthy) | self._muon(of_muon, moments, healthy)
        for name, update in updates.items():
            weight = weights[name]
            rate = _beside(rates * self.factors[name], weight)
            changed = weight * (1 - rate * _beside(self.decays[name], weight)) - rate * update
            # In place, because the copies' own parameters are views of these tensors.
            weight.copy_(torch.where(_beside(healthy, weight), changed, weight))

    def _adamw(
        self, gradients: Mapping[str, Tensor], moments: Mapping[str, dict[str, Tensor]], healthy: Tensor
    ) -> dict[str, Tensor]:
        """Return AdamW's updates of unit rate, and update the moments (Loshchilov and Hutter 2019, algorithm 2)."""
        updates = {}
        for name, gradient in gradients.items():
            own_moments = moments[name]
            step = own_moments["step"] + 1
            first = own_moments["exp_avg"].lerp(gradient, _beside(1 - self.beta1, gradient))
            second = own_moments["exp_avg_sq"].lerp(gradient.square(), _beside(1 - self.beta2, gradient))
            # In float64: 1 - beta ** step loses digits in float32.
            correction1 = 1 - self.beta1.to(torch.float64) ** step
            correction2 = 1 - self.beta2.to(torch.float64) ** step
            root = (second / _beside(correction2.to(second.dtype), second)).sqrt()
            mean = first / _beside(correction1.to(first.dtype), first)
            updates[name] = mean / (root + _beside(self.eps, root))
            for key, value in (("step", step), ("exp_avg", first), ("exp_avg_sq", second)):
                own_moments[key].copy_(torch.where(_beside(healthy, value), value, own_moments[key]))
        return updates

    def _muon(
        self, gradients: Mapping[str, Tensor], moments: Mapping[str, dict[str, Tensor]], healthy: Tensor
    ) -> dict[str, Tensor]:
        # Return Muon's updates of unit rate, and update the momentum (see `posbench.training.optimizers.muon`).
        directions = {}
        for name, gradient in gradients.items():
            momentum = moments[name]["momentum"]
            share = _beside(self.momentum, gradient)
            averaged = gradient.lerp(momentum, share)
            momentum.copy_(torch.where(_beside(healthy, momentum), averaged, momentum))
            # Nesterov: the gradient is averaged with the new momentum once more.
            directions[name] = gradient.lerp(averaged, share)
        optimizer = self.steps[0].optimizer
        if not isinstance(optimizer, Muon):
            return {}
        updates = orthogonal_updates(directions, optimizer.rows, self.trains[0].ns_steps, optimizer.dtype)
        return {name: torch.cat(parts, dim=-2) for name, parts in updates.items()}

    def _moments(self, step: TrainingStep, name: str) -> dict[str, Tensor]:
        moments = step.optimizer.moments[name]
        # PyTorch's AdamW makes its moments in the run's first step, and they must exist to be stacked.
        if not moments:
            weight = step.optimizer.weights[name]
            moments["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return moments

    def _numbers(self, number_of: Callable[[TrainingStep, str], float]) -> dict[str, Tensor]:
        columns = {}
        for name in self.weights:
            columns[name] = self._column([number_of(step, name) for step in self.steps])
        return columns

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=next(iter(self.weights.values())).dtype).to(self.device.torch)


def _called(loss: Loss, state: Mapping[str, Tensor], *arguments: Tensor | None) -> Tensor:
    named_tensors = {f"model.{name}": x for name, x in state.items()}
    first_names: dict[nn.Parameter, str] = {}
    # A weight that several modules share is given to each. A module that is registered twice, as a scheme of all layers
    # is, is visited once: torch would leave its own tensors in it if it had to find out which weights are tied.
    for path, module in loss.model.named_modules():
        for full_name, weight in module.named_parameters(path, recurse=False):
            named_tensors[f"model.{full_name}"] = state[first_names.setdefault(weight, full_name)]
    value: Tensor = functional_call(loss, named_tensors, arguments, tie_weights=False)
    return value


def _stacked(tensors: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the tensors of each name, [R, ...], and make the given ones views of the result."""
    stacked = {}
    for name in tensors[0]:
        stacked[name] = torch.stack([of_run[name].detach() for of_run in tensors])
        for of_run, view in zip(tensors, stacked[name], strict=True):
            # A parameter stays the same object with other memory; in a dict, such as of moments, the view replaces it.
            if isinstance(of_run[name], nn.Parameter):
                of_run[name].data = view
            else:
                of_run[name] = view
    return stacked


def _beside(numbers: Tensor, x: Tensor) -> Tensor:
    # [R] with further dimensions of size 1, so it is broadcast against x [R, ...].
    return numbers.view(-1, *(1,) * (x.ndim - 1))
