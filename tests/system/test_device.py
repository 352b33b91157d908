"""Which device and number format a run gets, and whether it is compiled."""

import shutil

import pytest
import torch

from posbench.composition.compose import compose
from posbench.system.device import choose_device


@pytest.mark.parametrize(
    ("device", "compilers", "compiled"),
    [
        ("cuda:0", {"gcc"}, True),  # Triton needs a C compiler only
        ("cuda:0", set(), False),
        ("cpu", {"gcc"}, False),  # Inductor's code for CPUs is C++
        ("cpu", {"gcc", "g++"}, True),
    ],
)
def test_it_is_compiled_if_there_is_the_compiler_that_the_device_needs(device, compilers, compiled, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    for name, value in {"is_available": True, "device_count": 1, "init": None, "get_device_capability": (9, 0)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    config = compose([f"train.device={device}", "train.tokens=1B", "train.compile=null"])
    assert choose_device(config.train).compiled == compiled
