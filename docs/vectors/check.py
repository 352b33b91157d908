"""Check a port against positions-1.safetensors: python check.py MINE.safetensors. It needs NumPy and nothing else."""

import json
import struct
import sys
from pathlib import Path

import numpy as np


def read(path):  # safetensors: the header's length in 8 bytes, the header in JSON, and the numbers, row by row
    data, tensors = Path(path).read_bytes(), {}
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            format = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8"}[about["dtype"]]
            array = np.frombuffer(data[start + begin : start + end], format).reshape(about["shape"]).astype(float)
            tensors[name] = np.tril(array) if name.endswith(".scores") else array
    return tensors


def distance(mine, right):  # one number for each position, or one for slopes and buckets
    axes = (0, 2) if right.ndim == 3 else None
    return np.atleast_1d(np.sqrt(((mine - right) ** 2).mean(axes) / (right**2).mean(axes)))


def matches(off, listed, tolerance):  # a tensor that a mistake does not list is right
    expected = {tensor: np.array(listed.get(tensor, 0.0)) for tensor in off}
    return all((abs(off[t] - expected[t]) <= np.array(tolerance[t]) + 0.01 * expected[t]).all() for t in off)


folder, mine, status = Path(__file__).parent, read(sys.argv[1]), 0
right, about = read(folder / "positions-1.safetensors"), json.loads((folder / "positions-1.json").read_text())
if unknown := sorted(mine.keys() - right.keys()):
    sys.exit(f"{unknown} are no names of entries: call a tensor ENTRY.TENSOR, such as default.q")
for entry, says in about["entries"].items():
    names = {tensor: f"{entry}.{tensor}" for tensor in says["tolerance"] if f"{entry}.{tensor}" in mine}
    off = {tensor: distance(mine[name], right[name]) for tensor, name in names.items()}
    known = [mistake for mistake, listed in says["mistakes"].items() if matches(off, listed, says["tolerance"])]
    if off and matches(off, {}, says["tolerance"]):
        print(entry, "is right to", f"{max(distances.max() for distances in off.values()):.0e}")
    elif off:
        status = 1
        print(entry, "looks like", " or ".join(known) or f"no known mistake: {off}")
sys.exit(status)
