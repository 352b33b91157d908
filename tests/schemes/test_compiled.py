"""Compiled blocks have the gradients of blocks that are not compiled, however a batch gets its positions."""

import pytest
import torch

from posbench.system.torch_internals import share_no_row_buffers
from posbench.verify import certificate_config
from posbench.verify.gradients import gradients_of
from posbench.verify.random_model import RandomModel

pytestmark = pytest.mark.slow

# Of each way to act inside a block; each takes about eight seconds. `posbench verify --compiled` takes any scheme.
SCHEMES = (
    "alibi",
    "canon_qk_rope",
    "cope",
    "dape",
    "fire",
    "fope",
    "fox",
    "grape_ap",
    "mla",
    "path",
    "pope",
    "qkvo_rope",
    "repo",
    "selective_rope",
    "shaw",
    "ssmax",
    "t5",
    "transformer_xl",
)
CASES = [
    *((name, "documents", torch.float32) for name in SCHEMES),
    *((name, "positions", torch.float32) for name in ("decay_vo_rope", "gdn", "grape_ap", "kda", "linear_qk_rope")),
    ("fox", "text", torch.float32),
    ("grape_ap", "documents", torch.bfloat16),
]


@pytest.mark.parametrize("name, setting, dtype", CASES)
def test_compiled_gradients_are_those_of_code_that_is_not_compiled(name, setting, dtype):
    random_model = RandomModel.build(certificate_config(name, ["model.num_layers=1"]))
    model, parameters = random_model.narrow, dict(random_model.narrow.named_parameters())
    model.compute_dtype = dtype
    expected = gradients_of(model, random_model, parameters, setting)
    torch.compiler.reset()
    model.compile_blocks()
    compiled = gradients_of(model, random_model, parameters, setting)
    sizes = {key: float(gradient.norm()) / gradient.numel() ** 0.5 for key, gradient in expected.items()}
    typical = sum(sizes.values()) / len(sizes)  # a gradient that is 0 but for roundings is held to it
    errors = {
        key: float((compiled[key] - gradient).norm()) / gradient.numel() ** 0.5 / max(sizes[key], typical)
        for key, gradient in expected.items()
    }
    limit = 1e-4 if dtype == torch.float32 else 0.1
    assert {key: error for key, error in errors.items() if not error < limit} == {}


def centred(x, p, c):
    """Subtract each row's sum from a transposed tensor with a slice written in place."""
    y = (x.mT + p) * c
    y[:, :4] -= y[:, 4:]
    return y - y.sum(-1, keepdim=True)


def test_rows_of_a_vectorised_loop_share_no_buffer(monkeypatch):
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode as Fused

    torch.manual_seed(0)
    tensors = torch.randn(8, 32), torch.randn(32, 8), torch.randn(32, 1)

    def error():
        torch.compiler.reset()
        return float((torch.compile(centred)(*tensors) - centred(*tensors)).abs().max())

    share_no_row_buffers()
    assert error() < 1e-5
    original = Fused.check_outer_fusion_loop_level_attr.__wrapped__
    monkeypatch.setattr(Fused, "check_outer_fusion_loop_level_attr", original)
    # torch's own patch: pytest's would delete the setting at the end instead of restoring it
    with torch.compiler.config.patch(cache_key_tag="row buffers"):
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert error() > 1  # if torch has mended this, share_no_row_buffers can go
