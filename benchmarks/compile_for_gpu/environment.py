"""Where compilation for a GPU runs: a Python with the CUDA build of torch, and two small libraries for a driver.

In `$POSBENCH_FAKE_GPU`, by default `~/.cache/posbench-h200`, 5 GB: made once by `set_up`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

TORCH = "torch==2.11.0"  # the oldest that posbench allows; its wheels for Linux are for CUDA
CHECKOUT = Path(__file__).resolve().parents[2]
_NOT_NEEDED = ("torch", "wandb")


def home() -> Path:
    """The folder of the environment."""
    return Path(os.environ.get("POSBENCH_FAKE_GPU", "~/.cache/posbench-h200")).expanduser()


def is_set_up() -> bool:
    """Whether the folder holds an environment."""
    needed = ("venv/bin/python", "lib/libcuda.so.1", "lib/fake_gpu_devices.so")
    return all((home() / name).exists() for name in needed)


def set_up() -> None:
    """Make the environment, or what it lacks. Needs a C compiler, Python 3.11 or later, and PyPI."""
    folder = home()
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    build_stubs()
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        found = shutil.which("python3.12") or sys.executable
        subprocess.run([found, "-m", "venv", folder / "venv"], check=True)
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [line for line in project["dependencies"] if not line.startswith(_NOT_NEEDED)]
    subprocess.run([python, "-m", "pip", "install", "-q", TORCH, *needed], check=True)


def build_stubs() -> None:
    """Compile the two libraries: a driver that does nothing, and one that says how many devices there are."""
    here, lib = Path(__file__).parent, home() / "lib"
    for source, library, more in (
        ("cuda_stub.c", "libcuda.so.1", ["-Wl,-soname,libcuda.so.1"]),
        ("device_count.c", "fake_gpu_devices.so", []),
    ):
        subprocess.run(["cc", "-shared", "-fPIC", "-w", *more, "-o", lib / library, here / source], check=True)


def command(*words: str) -> list[str]:
    """The command line of a module of this package under the environment's Python."""
    return [str(home() / "venv" / "bin" / "python"), "-m", *words]


def variables() -> dict[str, str]:
    """Its environment variables. The checkout is on its path; compiled code is cached in the folder."""
    folder = home()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "LD_PRELOAD": str(folder / "lib" / "fake_gpu_devices.so"),
        "PYTHONPATH": str(CHECKOUT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        "OMP_NUM_THREADS": "1",
    }
