"""Which device and number format a run gets, whether it is compiled, and how its memory is laid out."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import posbench
from posbench.composition.compose import compose
from posbench.evaluation import evaluate
from posbench.system.device import choose_device, flushed_denormals
from posbench.training import train


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


def in_a_process(code):
    """Return what Python prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def denormal():
    """Return a number of 2e-39, or 0 if such numbers count as 0."""
    return float(torch.tensor(2e-38) * 0.1)


def test_numbers_that_processors_multiply_slowly_are_0_in_training_on_every_thread_and_not_after_it():
    code = """
import torch
from posbench.system.device import flushed_denormals
torch.set_num_threads(2)
with flushed_denormals():
    print((torch.full((1 << 22,), 2e-38) * 0.1).count_nonzero().item())
"""
    assert in_a_process(code) == "0"
    with flushed_denormals(), flushed_denormals():
        pass
    assert denormal() > 0


def test_training_and_scoring_flush_such_numbers(config, monkeypatch):
    seen = []
    run = train(config("train.steps=2"), observe=lambda *_: seen.append(denormal()))
    trained, score = len(seen), evaluate.score_split
    monkeypatch.setattr(evaluate, "score_split", lambda *given: (seen.append(denormal()), score(*given))[1])
    posbench.evaluate(run, lengths=[96], quiet=True)
    assert 0 < trained < len(seen) and set(seen) == {0.0} and denormal() > 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="huge pages are Linux's")
def test_tensors_lie_in_huge_pages_once_memory_is_kept():
    code = """
import re, torch
from pathlib import Path
from posbench.system.device import keep_freed_memory
keep_freed_memory()
held = [torch.ones(1 << 18) for _ in range(64)]
areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
def holds(area, address):
    first, end = (int(x, 16) for x in area.split()[0].split("-"))
    return first <= address < end
flags = [re.search("VmFlags: (.*)", area)[1].split() for area in areas[1:] if holds(area, held[-1].data_ptr())]
print("hg" in flags[0])
"""
    assert in_a_process(code) == "True"
