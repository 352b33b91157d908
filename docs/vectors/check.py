"""Check a port against positions-1.safetensors: python check.py MINE.safetensors. It needs NumPy and nothing else."""

import json
import struct
import sys
from pathlib import Path

import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def read(path):  # safetensors: the header's length in 8 bytes, the header in JSON, and the numbers, row by row
    try:
        data = Path(path).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        ends = [start + about["data_offsets"][1] for about in header.values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        sys.exit(f"{path} cannot be read as safetensors ({error}): save your port's values in that format")
    if max(ends, default=start) > len(data):
        sys.exit(f"{path} is cut off: it has {len(data)} bytes of {max(ends, default=start)}")
    return data[start:], header


def tensor(file, name, expected):
    data, header = file
    about = header[name]
    if about["dtype"] not in TYPES:
        sys.exit(
            f"{name} has the type {about['dtype']}: save it as F32 or F64, or I32 for buckets, with shape {expected}"
        )
    if about["shape"] != expected:
        sys.exit(f"{name} has the shape {about['shape']}: it must be {expected}")
    begin, end = about["data_offsets"]
    array = np.frombuffer(data[begin:end], TYPES[about["dtype"]]).reshape(expected).astype(float)
    return np.tril(array) if name.endswith(".scores") else array


def distance(mine, right):  # one number for each position, or one for slopes and buckets; at most 1e6
    axes = (0, 2) if right.ndim == 3 else None
    with np.errstate(over="ignore"):
        off = np.sqrt(((mine - right) ** 2).mean(axes) / (right**2).mean(axes))
    return np.minimum(np.atleast_1d(off), 1e6)


def matches(off, listed, tolerance):  # a tensor that a mistake does not list is right
    expected = {tensor: np.array(listed.get(tensor, 0.0)) for tensor in off}
    return all((abs(off[t] - expected[t]) <= np.array(tolerance[t]) + 0.01 * expected[t]).all() for t in off)


if len(sys.argv) != 2:
    sys.exit(__doc__)
folder, mine, status, checked = Path(__file__).parent, read(sys.argv[1]), 0, 0
right, about = read(folder / "positions-1.safetensors"), json.loads((folder / "positions-1.json").read_text())
if unknown := sorted(mine[1].keys() - right[1].keys()):
    sys.exit(f"{unknown} are no names of entries: call a tensor ENTRY.TENSOR, such as default.q")
for entry, says in about["entries"].items():
    off = {}
    for part in says["tolerance"]:
        name = f"{entry}.{part}"
        if name in mine[1]:
            shape = right[1][name]["shape"]
            off[part] = distance(tensor(mine, name, shape), tensor(right, name, shape))
    known = [mistake for mistake, listed in says["mistakes"].items() if matches(off, listed, says["tolerance"])]
    checked += len(off)
    if off and matches(off, {}, says["tolerance"]):
        print(entry, "is right to", f"{max(distances.max() for distances in off.values()):.0e}")
    elif off:
        status = 1
        numbers = "; ".join(
            f"{part} off by {' '.join(f'{d:.2g}' for d in distances)}" for part, distances in off.items()
        )
        print(entry, "looks like", " or ".join(known) or f"no known mistake: {numbers}")
if not checked:
    sys.exit("nothing was checked: call a tensor ENTRY.TENSOR, such as default.q")
sys.exit(status)
