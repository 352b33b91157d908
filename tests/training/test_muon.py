"""Muon updates each matrix by its orthogonalised momentum, whatever it is packed with, and leaves the rest to AdamW."""

import copy
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from posbench.composition.compose import compose
from posbench.model.decoder import build_model
from posbench.reporting.report import report
from posbench.runs.fingerprints import identity
from posbench.training import train
from posbench.training.optimizers import AdamW, Muon, optimizer_class
from posbench.training.optimizers.muon import orthogonal
from posbench.training.optimizers.optimizer import learning_rate
from posbench.verify import certificate_config
from tests.refusals import refuses

DEVICE = {"type": "cpu", "dtype": "float32", "compiled": False}


def polynomial(gradient, steps=5):
    """Return U p(S / |G|) V' from a singular value decomposition in float64."""
    u, s, v = np.linalg.svd(gradient.astype(float), full_matrices=False)
    s = s / np.linalg.norm(gradient)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (24, 64)])
def test_orthogonalised_is_the_polynomial_of_the_singular_values(shape):
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, matrix in zip(orthogonal(matrices.float(), 5), matrices, strict=True):
        np.testing.assert_allclose(ours, polynomial(matrix.numpy()), atol=1e-5)
    spread = torch.linalg.svdvals(orthogonal(matrices, 5))
    assert spread.min() > 0.6 and spread.max() < 1.3
    assert orthogonal(torch.zeros(1, *shape), 5).eq(0).all(), "a gradient of 0 is no direction"


@pytest.mark.parametrize("steps", [5, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 8), (40, 60)])
def test_a_matrix_of_any_size_has_a_finite_update(shape, dtype, steps):
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    line = torch.ones(1, *shape)  # its one singular value is its norm
    for exponent in range(-44, 20, 4):
        for direction in (matrix, line):
            update = orthogonal((10.0**exponent * direction).to(dtype), steps)
            assert update.isfinite().all() and update.norm() < 2 * math.sqrt(min(shape)), exponent


def test_without_steps_only_the_size_is_that_of_an_orthogonal_matrix():
    matrices = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    scaled = orthogonal(matrices, 0)
    torch.testing.assert_close(scaled.norm(dim=(1, 2)), torch.full((2,), math.sqrt(24)))
    ratios = scaled / matrices
    torch.testing.assert_close(ratios, ratios[:, :1, :1].expand_as(ratios))


def model_and_config(*words):
    config = compose(
        ["model=tiny", "train.optimizer=muon", "train.steps=20", "train.lr=0.05", "train.grad_clip=0.5", *words]
    )
    return build_model(config, 300), config


def loss_of(model, t):
    tokens = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(t))
    return model.loss(tokens[:, :-1], tokens[:, 1:])


def take_step(model, optimizer, t, change=lambda: None):
    optimizer.zero_grad()
    loss = loss_of(model, t)
    loss.backward()
    change()
    optimizer.set_rate(t)
    optimizer.step(healthy=loss.isfinite())


def test_a_step_is_moonlights_update_of_each_part():
    """Clipping, momentum, Nesterov, orthogonalisation of q, k and v by themselves, size and decay, by hand."""
    model, config = model_and_config("model.num_kv_heads=1")
    optimizer = Muon(model.double(), config.train)
    blocks = model.blocks[0]
    width, kv = config.model.num_heads * config.model.head_width, config.model.head_width
    packed = {
        "blocks.0.attention.qkv.weight": [width, kv, kv],
        "blocks.0.ffn.gate_up.weight": 2 * [config.model.ffn_width],
        "blocks.0.ffn.down.weight": [config.model.d_model],
    }
    weights = dict(model.named_parameters())
    expected = {name: weights[name].detach().double().numpy() for name in packed}
    momentum = {name: np.zeros_like(value) for name, value in expected.items()}
    for t in range(3):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        gradients = {name: p.grad.double().numpy() for name, p in weights.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        rate = learning_rate(t, config.train)
        for name, rows in packed.items():
            gradient = gradients[name] / max(1.0, norm / 0.5)
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
            direction = 0.05 * gradient + 0.95 * momentum[name]
            parts = np.split(direction, np.cumsum(rows)[:-1])
            update = [0.2 * math.sqrt(max(part.shape)) * polynomial(part) for part in parts]
            expected[name] = (1 - rate * config.train.weight_decay) * expected[name] - rate * np.concatenate(update)
        optimizer.set_rate(t)
        optimizer.step(healthy=torch.tensor(True))
    assert blocks.attention.qkv.weight.shape[0] == width + 2 * kv
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name].detach(), value, atol=1e-9, err_msg=name)


def test_it_agrees_with_torchs_muon_within_bfloat16():
    """PyTorch's class orthogonalises in bfloat16, one matrix at a time."""
    model, config = model_and_config("train.grad_clip=0", "train.weight_decay=0.1", "train.schedule=constant")
    name = "blocks.0.ffn.down.weight"
    initial = dict(model.named_parameters())[name].detach().clone()
    theirs = torch.nn.Parameter(initial.clone())
    reference = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon(model, config.train)
    for t in range(2, 5):
        take_step(model, optimizer, t)
        theirs.grad = dict(model.named_parameters())[name].grad.clone()
        for group in reference.param_groups:
            group["lr"] = learning_rate(t, config.train)
        reference.step()
    ours = dict(model.named_parameters())[name].detach()
    difference = (ours - theirs.detach()).norm() / (ours - initial).norm()
    assert 0 < difference < 0.04


@pytest.mark.parametrize("scheme", ["qk_rope", "path", "canon_nope", "gdn"])
def test_all_that_is_no_matrix_of_the_layers_is_trained_as_by_adamw(scheme):
    steps = {}
    for name, cls in (("muon", Muon), ("adamw", AdamW)):
        model, config = model_and_config(f"scheme={scheme}")
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        take_step(model, cls(model, config.train), 3)
        steps[name] = {key: p.detach() - before[key] for key, p in model.named_parameters()}
    same = {key for key in steps["muon"] if torch.equal(steps["muon"][key], steps["adamw"][key])}
    ends = ("attention.qkv.weight", "attention.out.weight", "ffn.gate_up.weight", "ffn.down.weight")
    assert same == {key for key in steps["muon"] if not key.endswith(ends)}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("poisoned", ["gradient", "loss"])
@pytest.mark.parametrize("cls", [Muon, AdamW])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_momentum(cls, poison, poisoned):
    model, config = model_and_config()
    optimizer = cls(model, config.train)
    take_step(model, optimizer, 0)
    saved = copy.deepcopy([p.detach() for p in model.parameters()]), copy.deepcopy(optimizer.state())
    loss_of(model, 1).backward()
    if poisoned == "gradient":
        model.blocks[0].ffn.down.weight.grad[0, 0] = poison
    optimizer.set_rate(1)
    optimizer.step(healthy=torch.tensor(poisoned == "gradient"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved[0], strict=True))
    assert saved[1].keys() == optimizer.state().keys()
    assert all(torch.equal(value, saved[1][key]) for key, value in optimizer.state().items())


def test_the_factor_is_on_the_rate_of_the_layers_matrices_with_either_optimizer():
    for cls in (Muon, AdamW):
        model, config = model_and_config("train.matrix_lr_factor=0.5")
        optimizer = cls(model, config.train)
        optimizer.set_rate(2)
        assert optimizer.rates["blocks.0.ffn.down.weight"] == pytest.approx(optimizer.rates["embedding.weight"] / 2)
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        take_step(model, optimizer, 2)
        whole, whole_config = model_and_config()
        take_step(whole, cls(whole, whole_config.train), 2)
        for key, p in whole.named_parameters():
            share = 0.5 if key.startswith("blocks.") and "norm" not in key else 1.0
            half = dict(model.named_parameters())[key] - before[key]
            torch.testing.assert_close(half, share * (p.detach() - before[key]), rtol=1e-4, atol=1e-7)


def test_settings_are_recorded_only_if_they_differ_from_adamw():
    plain, muon = (identity(compose([f"train.optimizer={name}"]), DEVICE) for name in ("adamw", "muon"))
    assert not {"train.optimizer", "train.momentum", "train.ns_steps", "train.matrix_lr_factor"} & plain.keys()
    added = {"train.optimizer": "muon", "train.momentum": 0.95, "train.ns_steps": 5}
    assert muon == plain | added


def test_an_unknown_optimizer_is_refused():
    refuses(r"train\.optimizer='moun' is not known; did you mean 'muon'", compose, ["train.optimizer=moun"])


def test_a_run_that_goes_on_with_another_optimizer_says_so(config, capsys):
    source = train(config())
    run = train(config("train.optimizer=muon", f"train.from_run={source.path}", "experiment_name=on"))
    assert "the optimizer's moments start at zero" in capsys.readouterr().err
    assert run.manifest.identity["scheme.continued.optimizer"] == "muon"
    assert "train.optimizer" not in run.manifest.identity, "its first tokens were trained by AdamW"


def test_an_optimizer_of_ones_own_is_one_class_in_a_file(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import torch\n"
        "from posbench.training.optimizers import Optimizer\n\n\n"
        "class Sign(Optimizer):\n"
        "    def __init__(self, *given, size=1.0, bias=0.0):\n"
        "        super().__init__(*given)\n"
        "        self.size, self.bias = size, bias\n\n"
        "    def update(self, divisor, healthy):\n"
        "        for name, weight in self.weights.items():\n"
        "            step = self.size * self.rates[name] * (weight.grad / divisor + self.bias).sign()\n"
        "            weight.sub_(torch.where(healthy, step, 0.0))\n"
    )
    run = train(config("train.optimizer=mine.py:Sign"))
    assert run.manifest.identity["train.optimizer"] == "mine.py:Sign" and list(run.manifest.scheme_files) == ["mine.py"]
    assert run.manifest.loss < run.logged[0]["loss"]
    refuses(
        r"mine\.py has no Optimizer 'Sing'.*did you mean 'Sign'",
        train,
        config("train.optimizer=mine.py:Sing", "experiment_name=other"),
    )
    still = train(config("train.optimizer=mine.py:Sign", "train.optimizer_options.size=0", "experiment_name=still"))
    assert still.manifest.identity["train.optimizer_options.size"] == 0
    assert still.manifest.loss == pytest.approx(still.logged[0]["loss"], abs=0.1) != run.manifest.loss
    refuses(
        r"optimizer_options\.beta is not an option of .* \(options: size, bias\)",
        train,
        config("train.optimizer=mine.py:Sign", "train.optimizer_options.beta=1", "experiment_name=other"),
    )
    assert optimizer_class(compose(["train.optimizer=adamw"]).train) is AdamW


def test_what_an_own_optimizer_records_is_said_and_stands_in_the_report(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from posbench.training.optimizers import AdamW\n\n\n"
        "class Named(AdamW):\n"
        "    record = {'kind': 'x', 'loss': 7.0, 'shares': [1, 2]}\n"
    )
    run = train(config("train.optimizer=mine.py:Named", "train.steps=2"))
    assert "train.optimizer=mine.py:Named: kind=x, loss=7.0, shares=[1, 2]" in capsys.readouterr().err
    report(run.path.parents[1], output=tmp_path / "report", console=Console(quiet=True))
    rows = pd.read_csv(tmp_path / "report" / "runs.csv")
    assert rows["optimizer.kind"].tolist() == ["x"] and rows["optimizer.loss"].tolist() == [7.0]
    assert rows["loss"].tolist() == [run.manifest.loss]
    columns = pd.read_csv(tmp_path / "report" / "columns.csv")
    assert "optimizer.kind" in columns["column"].tolist()


@pytest.mark.parametrize(("optimizer", "has_momentum"), [("adamw", False), ("muon", True)])
def test_a_report_lists_only_settings_that_the_optimizer_reads(optimizer, has_momentum, config, tmp_path):
    run = train(config(f"train.optimizer={optimizer}", "train.steps=2"))
    report(run.path.parents[1], output=tmp_path / "report", console=Console(quiet=True))
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"optimizer={optimizer}" in text and "matrix_lr_factor" not in text
    assert ("momentum=0.95" in text) == ("ns_steps=5" in text) == has_momentum


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_the_schemes_own_matrices_are_counted_with_and_without_weight_decay(weight_decay):
    config = certificate_config("path", ["train.optimizer=muon", f"train.weight_decay={weight_decay}"])
    model = build_model(config, 64)
    path = model.scheme[0]
    sizes = [matrix.numel() for matrix in (path.A, path.B, path.u)]
    assert Muon(model, config.train).record["own_matrices"] == config.model.num_layers * sum(sizes)
