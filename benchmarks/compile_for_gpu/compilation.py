"""One cell compiled, in the environment's Python: prints its result as one line of JSON.

compilation.py SCHEME MODEL DTYPE LENGTH [--default-kernels] [WORDS]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.compile_for_gpu import fake_gpu
from benchmarks.compile_for_gpu.cells import Cell

import torch  # isort: skip
from torch import Tensor

import posbench
from posbench import model as model_module
from posbench.attention import ways
from posbench.model import Decoder

VOCAB = 16384
_SAID = 500  # characters of an error


class Functional:
    """torch.nn.functional, with the attention kernel that an H200 takes named outright: a fake device chooses none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    @staticmethod
    def scaled_dot_product_attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
    ) -> Any:
        if not q.is_cuda or mask is not None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options)
        causal, scale = options["is_causal"], options["scale"]
        if q.dtype == torch.float32:
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]


def fake_model(cell: Cell, words: list[str]) -> Decoder:
    """The decoder of a cell, empty, on the pretended device, compiled as training has it."""
    config = posbench.compose(
        [f"scheme={cell.scheme}", f"model={cell.model}", f"train.context_length={cell.length}", *words]
    )
    initialise, model_module.initialise = model_module.initialise, lambda *args: None  # type: ignore[assignment]
    try:
        model = posbench.build_model(config, vocab_size=VOCAB)
    finally:
        model_module.initialise = initialise
    fake_gpu.to_fake(model)
    model.compute_dtype = torch.bfloat16 if cell.dtype == "bfloat16" else None
    model.compile_blocks()
    return model


def compiled(job: Callable[[], object]) -> dict[str, Any]:
    """What a job was compiled to, and what it launches once it is: the figures of one part of a cell."""
    torch.compiler.reset()
    fake_gpu.graphs.clear()
    began = _cpu_seconds()
    figures: dict[str, Any] = {}
    try:
        job()
        figures["cpu_seconds"] = round(_cpu_seconds() - began, 1)
        with fake_gpu.launches_counted() as launches:
            job()
        figures["launches"] = launches.count
    except Exception as error:
        figures["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID]}"
    graphs = fake_gpu.graphs
    for direction in ("forward", "backward"):
        of = [graph for graph in graphs if graph.direction == direction]
        figures[direction] = {"graphs": len(of), "triton": sum(g.triton_kernels for g in of)}
        figures[direction] |= {"other": sum(g.other_kernels for g in of)}
    figures["shared_bytes"] = max((graph.shared_bytes for graph in graphs), default=0)
    return figures


def _cpu_seconds() -> float:
    """Of this process and of ptxas."""
    return sum(os.times()[:4])


def compile_cell(cell: Cell, words: list[str]) -> dict[str, Any]:
    """Both parts of a cell: training (forward and backward, with gradients for all that is learned) and evaluation."""
    with fake_gpu.mode, torch.autograd.set_multithreading_enabled(False):
        model = fake_model(cell, words)
        tokens = torch.zeros(cell.batch, cell.length + 1, dtype=torch.int64, device="cuda")

        def train() -> None:
            model.zero_grad(set_to_none=True)
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            missing = [name for name, p in model.named_parameters() if p.grad is None]
            if missing:
                raise RuntimeError(f"no gradient for {', '.join(missing)}")

        def evaluate() -> None:
            with torch.no_grad():
                model.nll(tokens[:1, :-1], tokens[:1, 1:])

        return {"training": compiled(train), "evaluation": compiled(evaluate)}


def main() -> None:
    scheme, model, dtype, length, *words = sys.argv[1:]
    if "--default-kernels" in words:
        ways.kernel_options = lambda *args: {}  # type: ignore[assignment]
        words.remove("--default-kernels")
    ways.F = Functional()  # type: ignore[assignment]
    fake_gpu.install()
    result = compile_cell(Cell(scheme, model, dtype, int(length)), words)
    print(json.dumps({"torch": torch.__version__, **result}))


if __name__ == "__main__":
    main()
