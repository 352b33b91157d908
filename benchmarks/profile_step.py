"""Measure how long each part of a compiled training step takes, and estimate its floor, the least possible time.

    python -m benchmarks.profile_step --shape A --scheme qk_rope

A floor is the number of operations divided by the measured rate of matrix products, or the bytes that must be read and
written once divided by the measured rate of a copy. Parts that stay in the cache can be faster than their floor.
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
PARTS = (  # (part, pattern) on a CPU; the first pattern that matches an operation's name counts
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
KERNELS = (  # (part, pattern) of kernels on a GPU; the names come from the libraries, not from a profile
    ("attention's products", r"flash|fmha|flex_attention|triton_tem_|efficient_attention"),
    ("linear layers' products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("AdamW, norm of gradients", r"(?i)adam|multi_tensor|lpnorm|vector_norm"),
    ("cross-entropy", r"(?i)log_softmax|nll"),
    ("compiled norms, residuals, rotation, SwiGLU", r"^triton_"),
    ("copies, fills", r"(?i)memcpy|memset|copy|fill|direct_copy|CatArray"),
)


def copy_rate(device: Device, size: int = 1 << 28, repeats: int = 5) -> float:
    """Measure the bytes per second that a copy reads and writes."""
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
    """Return the least seconds that each part of a bfloat16 step needs."""
    model, architecture = config.model, build_architecture(config)
    tokens = shape.batch * shape.context
    matrices = num_parameters(architecture, 0)["body"] + shape.vocab * model.d_model
    scores = shape.batch * model.num_heads * shape.context**2 / 2 * model.num_layers
    attention = 12 * tokens * model.num_layers * model.num_heads * model.head_width * shape.context / 2
    wide = 2 * tokens * model.num_layers  # bytes of one number per token and layer
    return {
        "linear layers' products": 6 * tokens * matrices / flops,
        "attention's products": attention / flops,
        "softmax, masks": 5 * 2 * scores / copies,  # scores in and out, probabilities, and the gradients of both
        "SwiGLU": 8 * model.ffn_width * wide / copies,  # gate, up, product; the same with the gradients of all three
        "norms, residuals, rotation": 20 * model.d_model * wide / copies,
        "AdamW, norm of gradients": 32 * sum(num_parameters(architecture, shape.vocab).values()) / copies,
    }


def operations(contender: Ours, tokens: Tensor, device: Device) -> list[tuple[str, float, int]]:
    """Return (name, own seconds, calls) per step for each operation, or each kernel on a GPU, the longest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            contender.step(tokens)
        device.wait()
    events = profiled.key_averages()
    if device.is_cuda:  # skip operations of the host, which count the kernels that they started again
        kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
        times = [(event.key, event.self_device_time_total, event.count) for event in kernels]
    else:
        times = [(event.key, event.self_cpu_time_total, event.count) for event in events]
    return sorted(((key, time / 1e6 / STEPS, count // STEPS) for key, time, count in times), key=lambda row: -row[1])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="A")
    parser.add_argument("--scheme", default="qk_rope")
    parser.add_argument("--operations", action="store_true", help="list each operation with its part")
    args = parser.parse_args()
    keep_freed_memory()
    inductor.cpp.enable_kernel_profile = True  # one entry per kernel, not per compiled graph
    shape = SHAPES[args.shape]
    config = config_of(shape, args.scheme, "bfloat16", True)
    device = choose_device(config.train)
    contender = Ours(shape, args.scheme, "bfloat16", True)
    tokens: Tensor = torch.randint(shape.vocab, (shape.batch, shape.context + 1)).to(device.torch)
    for _ in range(WARMUP_STEPS + 1):
        contender.step(tokens)
    flops, copies = matmul_rate(device), copy_rate(device)
    spent: dict[str, float] = {}
    for name, seconds, count in operations(contender, tokens, device):
        parts = KERNELS if device.is_cuda else PARTS
        part = next((part for part, pattern in parts if re.search(pattern, name)), "other")
        spent[part] = spent.get(part, 0.0) + seconds
        if args.operations and seconds > (1e-6 if device.is_cuda else 1e-4):
            print(f"{1000 * seconds:8.3f} ms {count:5d} {part:28s} {name[:80]}")
    least = floors(shape, config, flops, copies)
    whole = sum(spent.values())
    print(
        f"\nShape {args.shape}, {args.scheme}: {1000 * whole:.0f} ms a step, products {flops / 1e9:,.0f} GFLOP/s, ",
        end="",
    )
    print(f"copies {copies / 1e9:.1f} GB/s\n\n| part | ms | share | floor, ms |\n|---|---:|---:|---:|")
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        floor = f"{1000 * least[part]:.1f}" if part in least else ""
        print(f"| {part} | {1000 * seconds:.1f} | {seconds / whole:.0%} | {floor} |")


if __name__ == "__main__":
    main()
