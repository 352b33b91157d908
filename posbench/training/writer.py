"""Who writes checkpoints: the loop itself, or on a GPU a thread beside it, which then goes on with the next steps.

Hashing a checkpoint and waiting for the disk takes seconds, ten times a run, while a GPU would stand idle. On a CPU the
thread would take the cores that training computes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class Writer:
    """One job at a time; the next waits for it, and raises what it raised.

    Arguments: beside, whether jobs run in a thread.
    """

    def __init__(self, beside: bool = False) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if beside else None
        self._last: Future[object] | None = None

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU where the next steps change them before they are written."""
        if self._pool is None:
            return dict(tensors)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __call__(self, job: Callable[[], object]) -> None:
        """Run the job, or begin it. Raises: what it raises, or what the one before it raised."""
        self.wait()
        if self._pool is None:
            job()
        else:
            self._last = self._pool.submit(job)

    def wait(self) -> None:
        """Until the last job is done. Raises: what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the last job, whatever came of it, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
