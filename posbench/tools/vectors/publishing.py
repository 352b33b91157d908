"""Write the values of all entries as safetensors, and what they are as JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from posbench.config import ConfigError
from posbench.config.rules import nearest
from posbench.reference.definition import Array
from posbench.system.files import write_bytes, write_text
from posbench.tools.vectors.conventions import Entry, Inputs, Values
from posbench.tools.vectors.entries import MISTAKES, entries, in_float32, with_mistakes

EDITION = 1  # of the values; published ones never change, so new values need a new number
NAME = f"positions-{EDITION}"  # of the files, without suffix
ROUNDING = 1e-5  # relative error that a right port in float32 may have
_LEAST, _MOST = 1e-9, 1e6  # smaller distances are written as 0, larger ones as _MOST
_LARGEST = float(np.finfo(np.float32).max)  # of a port in float32, whose larger values are infinite
_DISTANCES = [*range(0, 40), 63, 64, 90, 91, 127, 128, 255, 4095, 131071]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the inputs. Raises: ConfigError for sizes without which an entry cannot be computed."""

    heads: int = 4  # H, of queries
    kv_heads: int = 2  # G, of keys and values
    head_dim: int = 64  # D
    positions: tuple[int, ...] = (0, 1, 255, 4095, 131071)

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}: each key head serves equally "
                "many query heads"
            )
        if self.head_dim < 16 or self.head_dim % 16:
            raise ConfigError(
                f"--head-dim {self.head_dim} must be a multiple of 16: one entry rotates an eighth of the channels, in "
                "pairs"
            )
        if not self.positions or self.positions[0] < 0 or list(self.positions) != sorted(set(self.positions)):
            raise ConfigError(
                f"--positions {','.join(map(str, self.positions))} must be different whole numbers from 0 on, in "
                "ascending order, such as 0,1,255"
            )

    def inputs(self) -> Inputs:
        """Return the inputs: multiples of 1/64 from -2 to 2, the same on every machine."""
        random = np.random.RandomState(0)  # NumPy promises that this class draws the same integers for ever

        def draw(*shape: int) -> Array:
            return np.asarray(random.randint(-128, 129, size=shape) / 64)

        T, D = len(self.positions), self.head_dim
        q = draw(self.heads, T, D)
        k, v = draw(self.kv_heads, T, D), draw(self.kv_heads, T, D)
        return Inputs(q, k, v, list(self.positions), draw(self.heads), _DISTANCES)


def positions_named(text: str) -> tuple[int, ...]:
    """Return the positions in `text`, such as `0,1,255`. Raises: ConfigError if they are not whole numbers."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--positions {text!r} must be whole numbers, such as 0,1,255") from error


def chosen(names: Sequence[str], head_dim: int) -> list[Entry]:
    """Return the entries with these names, or all. Raises: ConfigError for an unknown name."""
    known = {entry.name: entry for entry in entries(head_dim)}
    for name in names:
        if name not in known:
            raise ConfigError(f"--schemes {name!r} is no entry{nearest(name, known)} (there are {', '.join(known)})")
    return [known[name] for name in names or known]


def distance(values: Array, right: Array) -> Array:
    """Return the root mean square of `values - right` divided by `right`'s, [T] if there are heads, else [1]."""
    axes = (0, 2) if right.ndim == 3 else None
    with np.errstate(all="ignore"):
        error = np.sqrt(np.mean((values - right) ** 2, axis=axes))
        return np.atleast_1d(error / np.sqrt(np.mean(right**2, axis=axes)))


def tolerance(entry: Entry, values: Values, inputs: Inputs, rounding: float = ROUNDING) -> Values:
    """Return the largest distance of a right port, for each tensor and position."""
    # Angles in float32 err in proportion to the position.
    rounded = in_float32(entry).values(inputs)
    return {name: np.maximum(rounding, 4 * distance(rounded[name], right)) for name, right in values.items()}


def wrong_values(entry: Entry, values: Values, inputs: Inputs) -> dict[str, Values]:
    """Return the values with each mistake that changes the entry by more than rounding does."""
    limits = tolerance(entry, values, inputs)
    result = {}
    for mistake, wrong in with_mistakes(entry):
        changed = wrong.values(inputs)
        if not is_close(changed, values, limits):
            result[mistake.name] = changed
    return result


def is_close(port: Values, values: Values, limits: Values) -> bool:
    """Return whether all tensors of a port are as close to `values` as rounding allows."""
    for name, array in port.items():
        limited, expected = (np.clip(x, -_LARGEST, _LARGEST) for x in (array, values[name]))
        if not (distance(limited, expected) <= limits[name]).all():
            return False
    return True


def describe(entry: Entry, values: Values, inputs: Inputs) -> dict[str, Any]:
    """Return what the JSON file says of an entry."""
    limits = tolerance(entry, values, inputs)
    mistakes: dict[str, dict[str, list[float]]] = {}
    for mistake, changed in wrong_values(entry, values, inputs).items():
        mistakes[mistake] = {}
        for name, array in changed.items():
            distances = distance(array, values[name])
            if (distances > limits[name]).any():
                mistakes[mistake][name] = _rounded(distances)
    return {
        "summary": entry.summary,
        "source": entry.source,
        "settings": entry.settings(),
        "tolerance": {name: _rounded(limit) for name, limit in limits.items()},
        "mistakes": mistakes,
    }


def write(folder: Path, names: Sequence[str], sizes: Sizes) -> list[Path]:
    """Write the entries `names`, by default all, to two files in `folder`, and return their paths."""
    inputs = sizes.inputs()
    tensors: dict[str, Any] = {"positions": np.array(inputs.positions, np.int64)}
    tensors |= {"distances": np.array(inputs.distances, np.int64)}
    tensors |= {name: getattr(inputs, name).astype(np.float32) for name in ("q", "k", "v", "sinks")}
    described = {}
    for entry in chosen(names, sizes.head_dim):
        values = entry.values(inputs)
        described[entry.name] = describe(entry, values, inputs)
        tensors |= {f"{entry.name}.{name}": np.ascontiguousarray(array) for name, array in values.items()}
    content = save(tensors, {"posbench vectors": str(EDITION)})  # safetensors writes two keys in a random order
    used = set(chain.from_iterable(entry["mistakes"] for entry in described.values()))
    about = {
        "edition": EDITION,
        "file": f"{NAME}.safetensors",
        "sha256": hashlib.sha256(content).hexdigest(),
        "positions": inputs.positions,
        "shapes": "q and o [H, T, D]; k and v [G, T, D]; scores [H, T, T], with 0 for later keys; H query heads, "
        "G key heads, T positions, D channels",
        "heads": "query head h reads key head h // (H / G)",
        "distance": "root mean square of the error / root mean square of the right values: one number for each "
        "position, or one for slopes and buckets",
        "tolerance": "the distance that float32 may have: 1e-5, or 4 times that of angles in float32",
        "wrong": "distances of the tensors that a mistake changes; the others are right",
        "mistakes": {mistake.name: mistake.summary for mistake in MISTAKES if mistake.name in used},
        "entries": described,
    }
    paths = [folder / f"{NAME}.safetensors", folder / f"{NAME}.json"]
    write_bytes(paths[0], content)
    write_text(paths[1], _json(about))
    return paths


def _rounded(numbers: Array) -> list[float]:
    # The rounding errors of float64 count as 0.
    rounded: list[float] = []
    for number in numbers:
        digits = f"{min(number, _MOST):.3g}"
        rounded.append(float(digits) if number > _LEAST else 0)
    return rounded


def _json(content: dict[str, Any]) -> str:
    # Lists of numbers, and objects of such lists, take one line each.
    text = json.dumps(content, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    return re.sub(r"\{[^{}]*\]\s*\}", lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n"
