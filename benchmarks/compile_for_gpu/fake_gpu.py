"""Pretend an H200: Inductor, Triton and ptxas compile for sm_90 with fake tensors, and nothing is executed.

To be imported before anything asks for a device, in an environment made by `environment`. `install()` then turns
`torch.compile` to it; what is called under `mode` is compiled for the GPU and followed with fake tensors. What it
cannot tell: numbers, speed, what autotuning would choose, CUDA graphs, NCCL. It patches torch and Triton throughout,
so a process that imports it is good for nothing else.

Raises: what the compilers raise, such as OutOfResources for more shared memory than an H200 gives a block.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import re
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._subclasses.fake_tensor as fake
from torch.fx import Interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

SHARED_BYTES = 232_448  # of shared memory that a block may ask for


@dataclass(frozen=True)
class Graph:
    """What one graph was compiled to."""

    direction: str  # forward | backward
    triton_kernels: int
    other_kernels: int  # of libraries: matrix products, fused attention
    shared_bytes: int  # the most that one of its kernels asks for

    @property
    def kernels(self) -> int:
        return self.triton_kernels + self.other_kernels


graphs: list[Graph] = []
_shared: list[int] = []  # of kernels that were loaded since the last graph


class Properties:
    name, major, minor, total_memory, multi_processor_count = "NVIDIA H200", 9, 0, 150_000_000_000, 132
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block, warp_size = 65536, 2048, 1024, 32
    shared_memory_per_block, shared_memory_per_block_optin = 49152, SHARED_BYTES
    shared_memory_per_multiprocessor = 233_472
    L2_cache_size, clock_rate, memory_clock_rate, memory_bus_width = 60 << 20, 1_980_000, 3_201_000, 6144
    gcnArchName, is_integrated, is_multi_gpu_board, uuid = "", 0, 0, "fake"  # noqa: N815
    pci_bus_id = pci_device_id = pci_domain_id = 0


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Utils:
    """What Triton asks of the driver."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 3_201_000,
            "mem_bus_width": 6144,
        }

    def unload_module(self, module: Any) -> None: ...


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_device_interface = staticmethod(lambda: torch.cuda)
    get_current_device = staticmethod(lambda: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    set_current_device = staticmethod(lambda device: None)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_benchmarker = staticmethod(lambda: lambda function, **kwargs: 1.0)
    get_empty_cache_for_benchmark = staticmethod(lambda: None)

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(kind))


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


properties = Properties()
fake.init_gpu_context = _always(None)
fake.FakeTensorMode.avoid_device_init = property(_always(True))  # type: ignore[assignment]
torch._C._ensureCUDADeviceGuardSet()
ctypes.CDLL(None).fake_gpu_devices(100)  # any index that torch asks about
_CUDA: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    **dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state")),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "mem_get_info": (140_000_000_000, 150_000_000_000),
    "get_device_properties": properties,
    "get_device_capability": (9, 0),
    "get_device_name": properties.name,
    "current_stream": Stream(),
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
}
for _name, _value in _CUDA.items():
    setattr(torch.cuda, _name, _always(_value))
torch.cuda.random.manual_seed_all, torch.cuda.random.get_rng_state = (  # type: ignore[attr-defined]
    torch.cuda.manual_seed_all,
    torch.cuda.get_rng_state,
)
for _name, _value in {
    "_cuda_getCurrentRawStream": 0,
    "_cuda_getDevice": 0,
    "_cuda_setDevice": None,
    "_cuda_exchangeDevice": 0,
    "_cuda_getDeviceProperties": properties,
    "_cuda_getDeviceCount": 1,
    "_cuda_getArchFlags": "sm_90",
}.items():
    setattr(torch._C, _name, _always(_value))

# These take hold of torch.cuda's functions when imported, so they come after.
import torch._inductor.config as inductor  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._inductor import compile_fx  # noqa: E402

for _name, _value in {
    "is_available": True,
    "get_raw_stream": 0,
    "get_compute_capability": 90,
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "exchange_device": 0,
    "maybe_exchange_device": 0,
}.items():
    setattr(CudaInterface, _name, staticmethod(_always(_value)))
for _name, _value in {"get_device_properties": properties, "current_device": 0, "set_device": None}.items():
    setattr(CudaInterface.Worker, _name, staticmethod(_always(_value)))
driver.set_active(Driver())


def _initialised(kernel: Any, before: Any = CompiledKernel._init_handles) -> None:
    _shared.append(kernel.metadata.shared)
    before(kernel)


CompiledKernel._init_handles = _initialised
inductor.compile_threads, inductor.joint_graph_constant_folding, inductor.use_static_cuda_launcher = 1, False, False
inductor.shape_padding = False  # it would time matrix products of two shapes, on the device
if hasattr(inductor, "use_static_triton_launcher"):
    inductor.use_static_triton_launcher = False

mode = fake.FakeTensorMode(allow_non_fake_inputs=True)


_NOT_LAUNCHED = ("empty", "detach", "lift", "_local_scalar_dense", "new_empty", "resize", "set_")


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to start: each operation but views, and the kernels of compiled graphs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:  # else Dynamo would not run what was compiled
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(function, torch._ops.HigherOrderOperator):
            return function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        self.count += not (function.is_view or function.namespace == "prim" or name.startswith(_NOT_LAUNCHED))
        return function(*args, **(kwargs or {}))


_counting: list[Launches] = []


@contextlib.contextmanager
def launches_counted() -> Any:
    """Counts the launches of what is called inside. Yields: the `Launches`."""
    counter = Launches()
    _counting.append(counter)
    try:
        with counter:
            yield counter
    finally:
        _counting.remove(counter)


def _inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
    _shared.clear()
    compiled = compile_fx.compile_fx_inner(copy.deepcopy(graph), inputs, **kwargs)
    source = getattr(compiled, "source_code", "") or ""
    body = source[source.find("def call") :]
    others = len(re.findall(r"extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(", body))
    direction = "backward" if kwargs.get("is_backward") else "forward"
    made = Graph(direction, len(re.findall(r"\.run\(", body)), others, max(_shared, default=0))
    graphs.append(made)

    def call(arguments: Any) -> Any:
        there = next((x.fake_mode for x in arguments if isinstance(x, fake.FakeTensor)), None)
        with _disable_current_modes(), there or contextlib.nullcontext():
            result = Interpreter(graph).run(*arguments)
        for counter in _counting:
            counter.count += made.kernels
        if hasattr(arguments, "clear"):
            arguments.clear()
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def backend(graph: Any, inputs: Any) -> Any:
    """For `torch.compile`: really compiles, then follows the graph with fake tensors."""
    return compile_fx.compile_fx(graph, inputs, inner_compile=_inner)


def install() -> None:
    """Let every `torch.compile` of this process use `backend`, and fail where it would break a graph."""
    real = torch.compile

    def compile_for_gpu(function: Any = None, *, dynamic: bool | None = None, **kwargs: Any) -> Any:
        return real(function, backend=backend, dynamic=dynamic, fullgraph=True)

    torch.compile = compile_for_gpu  # type: ignore[assignment]


def to_fake(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers as empty fake tensors on the pretended device, in place."""
    with mode:
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    empty = torch.empty(p.shape, dtype=p.dtype, device="cuda")
                    part._parameters[name] = torch.nn.Parameter(empty, requires_grad=p.requires_grad)
            for name, b in part._buffers.items():
                if b is not None:
                    part._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device="cuda")
    return module
