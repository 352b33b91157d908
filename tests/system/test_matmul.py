"""Products by weights through oneDNN against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from posbench.system import matmul


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "out"), [(24, 10), (10, 24)])
def test_onednn_gives_the_same_products(compiled: bool, width: int, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN_IS_FASTER", True)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in ((3, 7, width), (out, width), (out,), (3, 7, out))]
    x, weight, bias, above = (
        given[0].transpose(0, 1).requires_grad_(),
        *(t.requires_grad_() for t in given[1:3]),
        given[3],
    )
    linear = torch.compile(matmul.linear, dynamic=False) if compiled else matmul.linear
    expected = F.linear(x.double(), weight.double(), bias.double())
    found = linear(x, weight, bias)
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)
    above = given[3].transpose(0, 1)
    gradients = torch.autograd.grad(found, (x, weight, bias), above)
    for got, wanted in zip(gradients, torch.autograd.grad(expected, (x, weight, bias), above.double()), strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-5)
