"""How fast the machine multiplies matrices: what a rate of model FLOPs is measured against."""

from __future__ import annotations

import time

import torch

from posbench.machine.device import Device


def matmul_rate(device: Device, repeats: int = 3) -> float:
    """FLOP/s of a large square product in the device's number format: the best of a few."""
    size, products = (8192, 20) if device.is_cuda else (2048, 1)  # a GPU needs a queue, and time to clock up
    a = torch.randn(size, size, device=device.torch, dtype=device.dtype)
    best = 0.0
    for _ in range(repeats):
        device.wait()
        began = time.perf_counter()
        for _ in range(products):
            a @ a
        device.wait()
        best = max(best, products * 2 * size**3 / (time.perf_counter() - began))
    return best
