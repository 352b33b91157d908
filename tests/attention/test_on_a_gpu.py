"""Which way attention takes on a GPU, asked without one: the choice looks at shapes, not at the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posbench.attention import ways


def bias(b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0.0 * (i - j)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that were taken, with the block of `blocks`."""
    names: list[str] = []
    for name in ("fused", "flex"):
        monkeypatch.setattr(ways, name, lambda *given, name=name: names.append(name))
    monkeypatch.setattr(ways, "_compiled_flex", lambda: lambda *given: names.append("compiled flex"))
    monkeypatch.setattr(ways, "blocks", lambda *given, block=ways.BLOCK: names.append(f"blocks of {block}"))
    return names


@pytest.mark.parametrize(
    "T, keys, D, has_bias, compiles, gradient, way",
    [
        (1024, 1024, 64, False, True, False, "fused"),
        (1024, 1024, 64, True, True, False, "compiled flex"),
        (1000, 1000, 64, True, True, False, "blocks of 1000"),  # compiling does not pay
        (1024, 1024, 8, True, True, False, "blocks of 1024"),  # FlexAttention takes no heads so narrow
        (32768, 32768, 64, True, False, False, "blocks of 512"),
        (1 << 20, 1 << 20, 64, True, False, False, "blocks of 128"),
        (1024, 4096, 64, False, True, False, "blocks of 1024"),  # a piece of a longer window
        (1024, 1024, 64, True, False, True, "blocks of 128"),
        (1024, 1024, 64, True, True, True, "blocks of 128"),
    ],
)
def test_the_way_follows_from_shapes(taken, T, keys, D, has_bias, compiles, gradient, way):
    q, k = torch.empty(1, 8, T, D, device="meta"), torch.empty(1, 8, keys, D, device="meta")
    with torch.set_grad_enabled(gradient):
        ways._attend_on_cuda(q, k, k, bias if has_bias else None, 1.0, True, compiles)
    assert taken == [way]


def test_the_step_s_cross_entropy_on_a_gpu_is_that_of_a_cpu(monkeypatch):
    """Its gradient is a comparison there and an assignment by index here: the same numbers."""
    from posbench.cross_entropy import losses_and_gradient

    logits, targets = torch.randn(7, 30, generator=torch.Generator().manual_seed(0)), torch.arange(7) * 4
    expected = losses_and_gradient(logits, targets)

    class OnGpu(torch.Tensor):
        is_cuda = True

    found = losses_and_gradient(logits.as_subclass(OnGpu), targets)
    assert all(torch.equal(one, other.as_subclass(torch.Tensor)) for one, other in zip(expected, found, strict=True))
