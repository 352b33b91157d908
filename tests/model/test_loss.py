"""The chunked cross-entropy agrees with PyTorch's own on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posbench import build_model, compose
from posbench.model.loss import losses_and_gradient, mean_cross_entropy


def problem(rows: int, width: int, vocab: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = (scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return x, weight, torch.randint(vocab, (rows,), generator=generator)


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight.to(x.dtype))
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), targets)


@given(
    rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    vocab=st.integers(2, 30),
    output_gradient=st.floats(-4, 4, allow_nan=False),
)
@settings(max_examples=60, deadline=None)
def test_it_is_cross_entropy_and_its_gradient_for_any_chunk(
    rows: int, chunk: int, vocab: int, output_gradient: float
) -> None:
    x, weight, targets = problem(rows, 6, vocab, torch.float64)
    expected = whole(x, weight, targets)
    gradients = torch.autograd.grad(output_gradient * expected, (x, weight))
    loss = mean_cross_entropy(x, weight, targets, rows=chunk)
    assert torch.allclose(loss, expected, rtol=1e-13, atol=0)
    for got, expected_gradient in zip(torch.autograd.grad(output_gradient * loss, (x, weight)), gradients, strict=True):
        assert torch.allclose(got, expected_gradient, rtol=0, atol=1e-13)


def test_numerical_differences_agree() -> None:
    x, weight, targets = problem(7, 3, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: mean_cross_entropy(x, weight, targets, rows=3), (x, weight))


def test_bfloat16_is_as_close_to_float64_as_whole_logits_are() -> None:
    x, weight, targets = problem(256, 32, 100, torch.bfloat16)
    exact = torch.autograd.grad(
        whole(wide := x.detach().double().requires_grad_(), rounded := weight.bfloat16().double(), targets),
        (wide, rounded),
    )

    def distances(loss: Tensor) -> list[float]:
        gradients = torch.autograd.grad(loss, (x, weight))
        return [
            float((got - reference).norm() / reference.norm()) for got, reference in zip(gradients, exact, strict=True)
        ]

    chunked, at_once = distances(mean_cross_entropy(x, weight, targets, rows=64)), distances(whole(x, weight, targets))
    assert all(ours < 1.25 * theirs < 0.02 for ours, theirs in zip(chunked, at_once, strict=True)), (chunked, at_once)


def test_a_loss_beyond_what_a_probability_can_hold_is_finite() -> None:
    logits = torch.tensor([[0.0, 500.0], [500.0, 0.0]])
    losses, gradient = losses_and_gradient(logits, torch.tensor([0, 0]))
    assert losses.tolist() == [500.0, 0.0] and gradient.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_what_is_no_number_stays_none() -> None:
    x, weight, targets = problem(20, 4, 9, torch.float32)
    with torch.no_grad():
        x[13, 2] = float("nan")
    loss = mean_cross_entropy(x, weight, targets, rows=8)
    loss.backward()
    assert loss.isnan() and weight.grad is not None and weight.grad.isnan().any()


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_s_loss_is_the_mean_of_its_nll(tied: bool) -> None:
    words = ["model=tiny", "scheme=qkvo_rope", f"model.tied_embeddings={tied}", "tokenizer=bytes"]
    model = build_model(compose(words), 300).double()
    tokens = torch.randint(300, (2, 25), generator=torch.Generator().manual_seed(0))
    losses = []
    for loss in (model.loss(tokens[:, :-1], tokens[:, 1:]), model.nll(tokens[:, :-1], tokens[:, 1:]).mean()):
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    assert all(torch.allclose(ours, plain, rtol=0, atol=1e-13) for ours, plain in zip(*losses, strict=True))
