"""NVIDIA's Multi-Process Service, through which processes use one GPU at the same time and not in turn.

Source: NVIDIA, "Multi-Process Service" (docs.nvidia.com/deploy/mps), appendix on nvidia-cuda-mps-control.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
TIMEOUT = 20.0  # seconds that starting and ending it may take


class NoService(RuntimeError):
    """The service is not installed, or does not start."""


@contextmanager
def service() -> Iterator[dict[str, str]]:
    """Run the service. Yields the environment of its users; a process without it uses the GPU as before.

    Raises: NoService, with what was said.
    """
    if not shutil.which(CONTROL):
        raise NoService(f"{CONTROL} is not installed")
    # Sockets lie in these folders, and the name of a socket may have 107 bytes: not within the checkout.
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        variables = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            _control(variables, "-d")
            yield variables
        finally:
            _control(variables, said="quit\n", check=False)


def _control(variables: dict[str, str], *options: str, said: str = "", check: bool = True) -> None:
    """Raises: NoService where `check` and it fails."""
    # The daemon inherits the files: read from a pipe, its output would end with the daemon alone.
    with tempfile.TemporaryFile("w+") as output:
        try:
            status = subprocess.run(
                [CONTROL, *options], env=variables, input=said, stdout=output, stderr=output, text=True, timeout=TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        output.seek(0)
        if check and status:
            raise NoService(f"{CONTROL} {' '.join(options)} ended with {status}: {output.read().strip() or 'no word'}")
