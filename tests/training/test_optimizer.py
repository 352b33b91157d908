"""The optimizer is AdamW as published, with clipping; the schedule is what its name says."""

import itertools
import math

import pytest
import torch
from torch import nn

from posbench.composition.compose import compose
from posbench.schemes import Scheme, Shape
from posbench.training.optimizers import AdamW
from posbench.training.optimizers.optimizer import decayed_parameters, learning_rate


def _settings(**changes):
    settings = compose().train
    for key, value in changes.items():
        setattr(settings, key, value)
    return settings


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def _by_hand(network, settings, steps):
    """Compute AdamW (Loshchilov and Hutter 2019, algorithm 2) with global-norm clipping, in plain float64."""
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in network.parameters()}
    for t in range(steps):
        network.zero_grad()
        _loss(network, t).backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in network.parameters()))
        lr = learning_rate(t, settings)
        with torch.no_grad():
            for p, (m, v) in moments.items():
                grad = p.grad / max(1.0, norm / settings.grad_clip)
                m.mul_(settings.beta1).add_((1 - settings.beta1) * grad)
                v.mul_(settings.beta2).add_((1 - settings.beta2) * grad**2)
                m_hat, v_hat = m / (1 - settings.beta1 ** (t + 1)), v / (1 - settings.beta2 ** (t + 1))
                decay = settings.weight_decay if p.ndim >= 2 else 0.0
                p -= lr * (m_hat / (v_hat.sqrt() + settings.eps) + decay * p)


def _loss(network, t):
    x = torch.randn(11, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
    return (network(x) ** 2).sum()  # large gradients, so that clipping bites


def test_a_step_is_adamw_with_clipping_and_decay_on_matrices_only():
    settings = _settings(steps=20, lr=0.05, weight_decay=0.3, grad_clip=0.5)
    ours, theirs = _network(), _network()
    optimizer = AdamW(ours, settings)
    for t in range(5):
        optimizer.zero_grad()
        loss = _loss(ours, t)
        loss.backward()
        optimizer.set_rate(t)
        optimizer.step(healthy=loss.isfinite())
    _by_hand(theirs, settings, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_schemes_own_parameters_learn_by_a_factor_faster():
    factor = compose(["scheme=t5", "scheme.lr_factor=10"]).scheme.lr_factor
    steps = {}
    for name, times in (("plain", 1.0), ("faster", factor)):
        network = nn.ModuleDict({"scheme": _network(), "rest": _network()})
        initial = {key: p.detach().clone() for key, p in network.named_parameters()}
        optimizer = AdamW(network, _settings(steps=20), times)
        (_loss(network["scheme"], 0) + _loss(network["rest"], 1)).backward()
        optimizer.set_rate(3)
        optimizer.step(healthy=torch.tensor(True))
        steps[name] = {key: p.detach() - initial[key] for key, p in network.named_parameters()}
    for key, step in steps["plain"].items():
        torch.testing.assert_close(steps["faster"][key], step * (10 if key.startswith("scheme.") else 1))


def test_the_cosine_warms_up_peaks_and_ends_at_its_ratio():
    settings = _settings(steps=200, lr=1.0, warmup_ratio=0.1, lr_end_ratio=0.1)
    rates = [learning_rate(n, settings) for n in range(200)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == pytest.approx(1.0) and max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[(20 + 199) // 2] == pytest.approx(0.55, abs=0.01)  # halfway down
    assert all(a >= b for a, b in itertools.pairwise(rates[20:]))


def test_wsd_is_flat_and_then_falls_in_a_line():
    settings = _settings(steps=100, lr=1.0, schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2, lr_end_ratio=0.0)
    rates = [learning_rate(n, settings) for n in range(100)]
    assert set(rates[10:80]) == {1.0}
    assert rates[89] == pytest.approx(0.5) and rates[99] == pytest.approx(0.0)


class _Learns(Scheme):
    decayed = frozenset({"matrix.weight"})

    def __init__(self, shape):
        super().__init__(shape)
        self.table, self.matrix = nn.Parameter(torch.zeros(4, 2)), nn.Linear(3, 2)


def test_of_a_scheme_only_the_parameters_that_it_names_are_decayed():
    class Several(Scheme):
        def __init__(self, shape):
            super().__init__(shape)
            self.members, self.scale = nn.ModuleList([_Learns(shape)]), nn.Parameter(torch.zeros(3, 3))

    model = nn.Module()
    model.scheme, model.linear, model.norm = Several(Shape(8, 2, 2, 4)), nn.Linear(3, 2), nn.LayerNorm(3)
    assert decayed_parameters(model) == {"scheme.members.0.matrix.weight", "linear.weight"}
    alone = nn.Module()
    alone.scheme = _Learns(Shape(8, 2, 2, 4))
    assert decayed_parameters(alone) == {"scheme.matrix.weight"}
