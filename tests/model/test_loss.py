"""The chunked cross-entropy agrees with PyTorch's own on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench import build_model, compose
from posbench.model.loss import losses_and_gradient, mean_cross_entropy


def problem(rows, width, vocab, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(rows)
    x = (scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return x, weight, torch.randint(vocab, (rows,), generator=generator)


def whole(x, weight, targets):
    logits = F.linear(x, weight.to(x.dtype))
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), targets)


@given(
    rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    vocab=st.integers(2, 30),
    output_gradient=st.floats(-4, 4, allow_nan=False),
)
@settings(max_examples=60, deadline=None)
def test_it_is_cross_entropy_and_its_gradient_for_any_chunk(rows, chunk, vocab, output_gradient):
    x, weight, targets = problem(rows, 6, vocab, torch.float64)
    expected = whole(x, weight, targets)
    gradients = torch.autograd.grad(output_gradient * expected, (x, weight))
    loss = mean_cross_entropy(x, weight, targets, rows=chunk)
    assert torch.allclose(loss, expected, rtol=1e-13, atol=0)
    for got, expected_gradient in zip(torch.autograd.grad(output_gradient * loss, (x, weight)), gradients, strict=True):
        assert torch.allclose(got, expected_gradient, rtol=0, atol=1e-13)


def test_a_loss_beyond_what_a_probability_can_hold_is_finite():
    logits = torch.tensor([[0.0, 500.0], [500.0, 0.0]])
    losses, gradient = losses_and_gradient(logits, torch.tensor([0, 0]))
    assert losses.tolist() == [500.0, 0.0] and gradient.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_s_loss_is_the_mean_of_its_nll(tied):
    words = ["model=tiny", "scheme=qkvo_rope", f"model.tied_embeddings={tied}", "tokenizer=bytes"]
    model = build_model(compose(words), 300).double()
    tokens = torch.randint(300, (2, 25), generator=torch.Generator().manual_seed(0))
    losses = []
    for loss in (model.loss(tokens[:, :-1], tokens[:, 1:]), model.nll(tokens[:, :-1], tokens[:, 1:]).mean()):
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    assert all(torch.allclose(ours, plain, rtol=0, atol=1e-13) for ours, plain in zip(*losses, strict=True))
