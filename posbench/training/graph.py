"""The whole training step as one CUDA graph: the host starts it once a step, and not each of its hundreds of kernels.

Small models are bound by that: 500 launches of 5 microseconds are more than the arithmetic of 25M parameters takes.
Never run on a GPU so far: what is here follows PyTorch's notes on CUDA graphs, and the first replay is held to a plain
step before it is believed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from posbench.config import ConfigError

PLAIN_STEPS = 3  # taken as they are before the graph is recorded: they compile, and make what libraries keep
AGREEMENT = 0.02  # relative, of the first replay's loss and gradient norm with a plain step's: bf16 sums by atomics


class Recorder:
    """PyTorch's CUDA graphs: what a test replaces. One a process and device (`recorder_of`).

    Its graphs share one pool of memory and one stream. They run one after another, and none reads what another left, so
    the activations of several models that are trained by turns (`posbench bench`) need the room of one.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def aside(self, job: Callable[[], Tensor]) -> Tensor:
        """The job on a stream of its own, as recording wants it before; later work waits for it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = job()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, job: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """The job's result, which each call of what comes beside it fills; recording itself computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a checkpoint that is written) may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = job()
        return result, graph.replay


@functools.cache
def recorder_of(device: torch.device) -> Recorder:
    """The recorder of a device."""
    return Recorder(device)


class GraphedStep:
    """A step of static shapes: a few times as it is, then recorded, then replayed.

    Arguments: take, the step, from tokens [B, T + 1] to a tensor on the device, which does the same kernels whenever it
    is called; measure, the same numbers of a step that changes no weight, for the check.
    """

    def __init__(
        self, take: Callable[[Tensor], Tensor], measure: Callable[[Tensor], Tensor], recorder: Recorder
    ) -> None:
        self._take, self._measure, self._recorder = take, measure, recorder
        self._plain_steps_left: float = PLAIN_STEPS
        self._tokens: Tensor | None = None  # what the graph reads
        self._result: Tensor
        self._replay: Callable[[], object]

    def __call__(self, tokens: Tensor) -> Tensor:
        """One step. Raises: ConfigError where the first replay is another step than a plain one."""
        if self._plain_steps_left > 0:
            self._plain_steps_left -= 1
            return self._recorder.aside(lambda: self._take(tokens))
        if self._tokens is None:
            return self._recorded(tokens)
        self._tokens.copy_(tokens)
        self._replay()
        return self._result.clone()  # the next replay fills it anew

    def _recorded(self, tokens: Tensor) -> Tensor:
        """The first replay, held to what a plain step measures."""
        static = tokens.clone()
        expected = self._recorder.aside(lambda: self._measure(static))
        try:
            self._result, self._replay = self._recorder.record(lambda: self._take(static))
        except RuntimeError as error:
            message = f"the training step cannot be recorded as a CUDA graph, so plain steps are taken: {error}"
            warnings.warn(message, stacklevel=2)
            self._plain_steps_left = math.inf
            return self(tokens)
        self._tokens = static
        self._replay()
        found = self._result.clone()
        if not torch.allclose(found, expected, rtol=AGREEMENT, atol=0.0, equal_nan=True):
            raise ConfigError(
                f"the CUDA graph of a training step gives loss and gradient norm {found.tolist()} where the plain step "
                f"gives {expected.tolist()}: set train.cuda_graph=false, and please report it"
            )
        return found
