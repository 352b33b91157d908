"""Choose the device and number format of a run, and measure its speed and memory."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from torch import device as TorchDevice
from torch import dtype as DType

from posbench.config import ConfigError, TrainConfig
from posbench.system.matmul import cpu_info, product

# Dense bf16 rates from the makers' datasheets, FLOP/s, for SXM parts (an H100 for PCIe has 756e12). MFU is usually
# quoted against these.
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
COMPILE_PAYS_FROM_TOKENS = 1_000_000  # on a CPU; compiling takes 10 to 20 s there (docs/internals/decisions.md)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3) in glibc


@dataclass(frozen=True)
class Device:
    """The device of a run, its dtype of activations, and whether blocks are compiled."""

    torch: TorchDevice
    dtype: DType
    compiled: bool
    processes: int = 1
    is_stacked: bool = False  # whether the run trains as one with others (`posbench.training.stack`)

    @property
    def is_cuda(self) -> bool:
        """Return whether the device is an NVIDIA or ROCm GPU."""
        return self.torch.type == "cuda"

    def describe(self) -> dict[str, Any]:
        """Return the device's type, name, dtype and settings, for the run's manifest."""
        name = torch.cuda.get_device_name(self.torch) if self.is_cuda else _cpu_name()
        settings = {
            "type": self.torch.type,
            "name": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compiled": self.compiled,
            "threads": torch.get_num_threads(),
            "processes": self.processes,
        }
        if self.is_stacked:
            settings["stacked"] = True
        return settings

    def send(self, rows: NDArray[Any]) -> Tensor:
        """Return `rows` as a tensor on the device. A GPU copies it while the host continues."""
        tensor = torch.from_numpy(rows)
        if not self.is_cuda:
            return tensor
        return tensor.pin_memory().to(self.torch, non_blocking=True)

    def seed(self, number: int) -> None:
        """Seed torch's random numbers on the host and on this device."""
        # Not `torch.manual_seed`, which also notes the stack of calls for each kind of device that is not there, in 0.5
        # ms.
        torch.default_generator.manual_seed(number)
        if self.is_cuda:
            torch.cuda.manual_seed(number)
        elif self.torch.type != "cpu":
            torch.manual_seed(number)

    def wait(self) -> None:
        """Wait until the device has finished its work, so that time can be measured."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory since `reset_peak_memory`, bytes: allocated on a GPU, resident set on a CPU."""
        if self.is_cuda:
            return int(torch.cuda.max_memory_allocated(self.torch))
        status = Path("/proc/self/status")
        if status.is_file() and (line := re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)):
            return int(line[1]) * 1024
        # macOS, or no /proc: the peak cannot be reset, so it counts from the start of the process.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """Reset `peak_memory_bytes`, because one process may train or evaluate many runs."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set


def choose_device(config: TrainConfig, local_rank: int = 0, processes: int = 1) -> Device:
    """Return the device and number format that `config` asks for, or the best ones of this machine.

    Arguments: local_rank, of this process on this machine, which is its GPU if a run has several `processes`.
    Raises: ConfigError if `config` asks for a GPU that this machine does not have.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = gpu_of_process(count) if device.index is None else device.index
        if processes > 1:
            index = local_rank
        device = torch.device("cuda", index)
        if device.index >= count:
            raise ConfigError(
                f"train.device={config.device}: this machine has {count} GPUs that torch can use; set "
                "train.device=auto or cpu"
            )
        torch.cuda.init()  # memory statistics need it before the first allocation
    if config.dtype == "auto":
        if device.type == "cuda":
            is_fast = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere, the first with bf16 units
        else:
            # bf16 products take a tenth of the time with AMX, more than half without, eight times as long on old CPUs.
            # The flag decides and not a trial, so that runs to be compared or resumed have one format.
            is_fast = "amx_bf16" in cpu_info()
        dtype = torch.bfloat16 if is_fast else torch.float32
    else:
        dtype = getattr(torch, config.dtype)
    compiled = config.compile
    if compiled is None:
        # A branch computes as its trunk does.
        pays = device.type == "cuda" or config.trunk_steps * config.tokens_per_step >= COMPILE_PAYS_FROM_TOKENS
        # Inductor's code for CPUs needs a C++ compiler, and Triton on a GPU a C compiler; without one, nothing is
        # compiled.
        compilers = ("gcc", "clang", "cc") if device.type == "cuda" else ("g++", "clang++", "c++")
        compiled = pays and any(shutil.which(name) for name in compilers)
    return Device(device, dtype, compiled, processes)


_held: dict[int, FileLock] = {}  # GPU of this worker -> its lock, held until the worker ends


def gpu_of_process(count: int) -> int:
    """Return the index of this process's GPU, of `count`. A worker takes one that no other worker holds.

    Other processes get 0.
    """
    # The process that starts a sweep asks too, for stacks, and must not hold a worker's GPU.
    if multiprocessing.parent_process() is None or count < 2:
        return 0
    candidates = 0 if _held else count  # a worker keeps its GPU
    for gpu in range(candidates):
        lock = FileLock(Path(tempfile.gettempdir()) / f"posbench-{os.getuid()}-gpu-{gpu}.lock")
        with suppress(Timeout):
            lock.acquire(blocking=False)
            _held[gpu] = lock
            break
    # If all GPUs are held, workers share them.
    return next(iter(_held), os.getpid() % count)


def _cpu_name() -> str:
    for line in cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def datasheet_rate(name: str) -> float | None:
    """Return the datasheet rate of the device with this name, FLOP/s, or None if unknown."""
    rates = (rate for key, rate in DATASHEET.items() if key in name)
    return next(rates, None)


def matmul_rate(device: Device) -> float:
    """Return the FLOP/s of a large square matrix product in the device's number format."""
    size, products = (8192, 20) if device.is_cuda else (2048, 1)  # a GPU needs a queue, and time to clock up
    a = torch.randn(size, size, device=device.torch, dtype=device.dtype)
    best = 0.0
    for _ in range(3):
        device.wait()
        began = time.perf_counter()
        for _ in range(products):
            product(a, a)
        device.wait()
        best = max(best, products * 2 * size**3 / (time.perf_counter() - began))
    return best


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Count numbers below 1e-38 as 0 in the context, in this thread and in those that begin there."""
    # Intel's processors multiply slowly by such numbers, and far keys under ALiBi have such weights. Other code in the
    # process may rely on them, so the setting does not stay.
    was_set = float(torch.tensor(2e-38) * 0.1) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)


def keep_freed_memory() -> None:
    """Tell glibc, if there is one, to take all blocks from one heap and never to return it; ask for huge pages."""
    # Each step allocates and frees the same activations. By default glibc maps and unmaps them, and the kernel clears
    # every page again. docs/lists/measurements.md says what this and huge pages gain.
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)
        # Addresses are limited, or count as memory before they are used.
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        is_strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        if is_strict or limits != [resource.RLIM_INFINITY] * 2:
            return
        # The heap grows without memory, which comes with each page's first use.
        libc.malloc.restype = ctypes.c_void_p
        size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        block = libc.malloc(ctypes.c_size_t(size))
        if block is not None:
            first_page = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
            libc.madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(size - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
            libc.free(ctypes.c_void_p(block))


@contextmanager
def exhaustion_explained(device: Device, advice: str) -> Iterator[None]:
    """Turn a failed allocation within the context into a ConfigError with the bytes asked for and the advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises a RuntimeError on CPUs, and for CUDA's own errors, so only its text tells. A user's own error may
        # say "out of memory" too.
        phrases = ("cuda error: out of memory", "can't allocate memory", "not enough memory: you tried", "bad_alloc")
        is_of_torch = any(phrase in str(error).lower() for phrase in phrases)
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not is_of_torch:
            raise
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f" when {request[1]} more were asked for" if request else ""
        peak = f"the peak before was {device.peak_memory_bytes() / 1e9:.2f} GB"
        raise ConfigError(f"out of memory on {device.torch}{more}: {peak}, with {advice}") from error


def training_advice(config: TrainConfig) -> str:
    """Return which settings to change if training runs out of memory, as text."""
    return (
        f"train.batch_size={config.batch_size} windows of train.context_length={config.context_length} tokens "
        f"in train.accumulation={config.accumulation} parts. Raise train.accumulation (the same batch in smaller "
        "parts) or lower train.batch_size; while validating, lower evaluation.batch_tokens"
    )
