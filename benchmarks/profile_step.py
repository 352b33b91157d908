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
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import SHAPES, VOCAB, Ours, Shape, config_of
from posbench.machine.device import choose_device
from posbench.machine.memory import keep_freed_memory
from posbench.machine.speed import matmul_rate
from posbench.size import num_parameters

STEPS = 5
PARTS = (  # the first that matches an operation's name
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


def copy_rate(size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second read and written by a copy."""
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * size / (time.perf_counter() - began))
    return best


def floors(shape: Shape, config: Any, flops: float, copies: float) -> dict[str, float]:
    """Seconds of a step that each part cannot do without, in bfloat16."""
    model = config.model
    tokens = shape["batch"] * shape["context"]
    matrices = num_parameters(config, 0)["body"] + VOCAB * model.d_model
    scores = shape["batch"] * model.num_heads * shape["context"] ** 2 / 2 * model.num_layers
    attention = 12 * tokens * model.num_layers * model.num_heads * model.head_dim * shape["context"] / 2
    wide = 2 * tokens * model.num_layers  # bytes of one number a token and layer
    return {
        "linear layers' products": 6 * tokens * matrices / flops,
        "attention's products": attention / flops,
        "softmax, masks": 5 * 2 * scores / copies,  # in, out; probabilities, their gradient, the scores'
        "SwiGLU": 8 * model.ffn_dim * wide / copies,  # gate, up, product; the same with the gradients of all three
        "norms, residuals, rotation": 20 * model.d_model * wide / copies,
        "AdamW, norm of gradients": 32 * sum(num_parameters(config, VOCAB).values()) / copies,
    }


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
    tokens: Tensor = torch.randint(VOCAB, (shape["batch"], shape["context"] + 1))
    for _ in range(3):
        contender.step(tokens)
    flops, copies = matmul_rate(device), copy_rate()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            contender.step(tokens)
    spent: dict[str, float] = {}
    operations = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    for event in operations:
        part = next((name for name, pattern in PARTS if re.search(pattern, event.key)), "other")
        seconds = event.self_cpu_time_total / 1e6 / STEPS
        spent[part] = spent.get(part, 0.0) + seconds
        if given.operations and seconds > 1e-4:
            print(f"{1000 * seconds:8.2f} ms {event.count // STEPS:5d} {part:28s} {event.key[:80]}")
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
