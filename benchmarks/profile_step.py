"""Where one compiled training step spends its time, beside the least that each part could take.

    python -m benchmarks.profile_step --shape A --scheme qk_rope

A floor is operations over the measured rate of matrix products, or bytes read and written once over the measured
rate of a copy. Parts that stay in the cache can fall below theirs.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import WARMUP_STEPS, Ours
from benchmarks.shapes import SHAPES, Shape, config_of
from posbench.model.architecture import build_architecture
from posbench.model.size import num_parameters
from posbench.system.device import Device, choose_device, keep_freed_memory, matmul_rate

STEPS = 5
PARTS = (  # the first that matches an operation's name, on a CPU
    ("linear layers' products", r"^aten::(mm|addmm|matmul|linear)$"),
    ("attention's products", r"^aten::(bmm|baddbmm)$"),
    ("AdamW, norm of gradients", r"adam|foreach|norm$|linalg"),
    ("cross-entropy", r"log_softmax|gather|index_put"),
    ("softmax, masks", r"softmax|masked_fill|amax"),
    ("SwiGLU", r"silu|sigmoid"),
    ("norms, residuals, rotation", r"cpp_fused"),
    ("copies, fills", r"copy_|zero_|fill_|aten::(add_|to|empty|cat|clone|stack)"),
    ("calls of compiled code", r"Compiled|Dynamo|AOTDispatcher|bytecode"),
)
KERNELS = (  # ... and a kernel's on a GPU; written from the names that libraries give them, not from a profile
    ("attention's products", r"flash|fmha|flex_attention|triton_tem_|efficient_attention"),
    ("linear layers' products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("AdamW, norm of gradients", r"(?i)adam|multi_tensor|lpnorm|vector_norm"),
    ("cross-entropy", r"(?i)log_softmax|nll"),
    ("compiled norms, residuals, rotation, SwiGLU", r"^triton_"),
    ("copies, fills", r"(?i)memcpy|memset|copy|fill|direct_copy|CatArray"),
)


def copy_rate(device: Device, size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second read and written by a copy."""
    source, target = (torch.ones(size // 4, device=device.torch) for _ in range(2))
    best = 0.0
    for _ in range(repeats):
        device.wait()
        began = time.perf_counter()
        target.copy_(source)
        device.wait()
        best = max(best, 2 * size / (time.perf_counter() - began))
    return best


def floors(shape: Shape, config: Any, flops: float, copies: float) -> dict[str, float]:
    """Seconds of a step that each part cannot do without, in bfloat16."""
    model, architecture = config.model, build_architecture(config)
    tokens = shape.batch * shape.context
    matrices = num_parameters(architecture, 0)["body"] + shape.vocab * model.d_model
    scores = shape.batch * model.num_heads * shape.context**2 / 2 * model.num_layers
    attention = 12 * tokens * model.num_layers * model.num_heads * model.head_width * shape.context / 2
    wide = 2 * tokens * model.num_layers  # bytes of one number a token and layer
    return {
        "linear layers' products": 6 * tokens * matrices / flops,
        "attention's products": attention / flops,
        "softmax, masks": 5 * 2 * scores / copies,  # in, out; probabilities, their gradient, the scores'
        "SwiGLU": 8 * model.ffn_width * wide / copies,  # gate, up, product; the same with the gradients of all three
        "norms, residuals, rotation": 20 * model.d_model * wide / copies,
        "AdamW, norm of gradients": 32 * sum(num_parameters(architecture, shape.vocab).values()) / copies,
    }


def operations(contender: Ours, tokens: Tensor, device: Device) -> list[tuple[str, float, int]]:
    """(name, seconds of its own, calls) a step of each operation, or on a GPU of each kernel; the longest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            contender.step(tokens)
        device.wait()
    events = profiled.key_averages()
    if device.is_cuda:  # an operation of the host counts the kernels that it started once more
        kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
        found = [(event.key, event.self_device_time_total, event.count) for event in kernels]
    else:
        found = [(event.key, event.self_cpu_time_total, event.count) for event in events]
    return sorted(((key, time / 1e6 / STEPS, count // STEPS) for key, time, count in found), key=lambda row: -row[1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="A")
    parser.add_argument("--scheme", default="qk_rope")
    parser.add_argument("--operations", action="store_true", help="each operation, with its part")
    given = parser.parse_args()
    keep_freed_memory()
    inductor.cpp.enable_kernel_profile = True  # one entry a kernel, not one a compiled graph
    shape = SHAPES[given.shape]
    config = config_of(shape, given.scheme, "bfloat16", True)
    device = choose_device(config.train)
    contender = Ours(shape, given.scheme, "bfloat16", True)
    tokens: Tensor = torch.randint(shape.vocab, (shape.batch, shape.context + 1)).to(device.torch)
    for _ in range(WARMUP_STEPS + 1):
        contender.step(tokens)
    flops, copies = matmul_rate(device), copy_rate(device)
    spent: dict[str, float] = {}
    for name, seconds, count in operations(contender, tokens, device):
        parts = KERNELS if device.is_cuda else PARTS
        part = next((part for part, pattern in parts if re.search(pattern, name)), "other")
        spent[part] = spent.get(part, 0.0) + seconds
        if given.operations and seconds > (1e-6 if device.is_cuda else 1e-4):
            print(f"{1000 * seconds:8.3f} ms {count:5d} {part:28s} {name[:80]}")
    least = floors(shape, config, flops, copies)
    whole = sum(spent.values())
    print(
        f"\nShape {given.shape}, {given.scheme}: {1000 * whole:.0f} ms a step, products {flops / 1e9:,.0f} GFLOP/s, ",
        end="",
    )
    print(f"copies {copies / 1e9:.1f} GB/s\n\n| part | ms | share | floor, ms |\n|---|---:|---:|---:|")
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        floor = f"{1000 * least[part]:.1f}" if part in least else ""
        print(f"| {part} | {1000 * seconds:.1f} | {seconds / whole:.0%} | {floor} |")


if __name__ == "__main__":
    main()
