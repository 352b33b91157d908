"""Products by weights through oneDNN against torch's own, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from posbench.system import matmul


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "out"), [(24, 10), (10, 24)])
def test_onednn_gives_the_same_products(compiled, width, out, monkeypatch):
    monkeypatch.setattr(matmul, "ONEDNN_IS_FASTER", True)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((3, 7, width), (out, width), (out,), (3, 7, out))]
    x, weight, bias, output_gradient = (
        tensors[0].transpose(0, 1).requires_grad_(),
        *(t.requires_grad_() for t in tensors[1:3]),
        tensors[3],
    )
    linear = torch.compile(matmul.linear, dynamic=False) if compiled else matmul.linear
    expected = F.linear(x.double(), weight.double(), bias.double())
    output = linear(x, weight, bias)
    assert torch.allclose(output.double(), expected, rtol=0, atol=1e-5)
    output_gradient = tensors[3].transpose(0, 1)
    gradients = torch.autograd.grad(output, (x, weight, bias), output_gradient)
    for got, expected_gradient in zip(
        gradients, torch.autograd.grad(expected, (x, weight, bias), output_gradient.double()), strict=True
    ):
        assert torch.allclose(got, expected_gradient, rtol=0, atol=1e-5)
