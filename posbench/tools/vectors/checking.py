"""Compare a port's values with ours, and name the mistake that gives the same wrong values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from posbench.config import ConfigError
from posbench.config.rules import nearest
from posbench.reference.definition import Array
from posbench.system.console import plain_table
from posbench.tools.vectors.conventions import Entry, Inputs, Values
from posbench.tools.vectors.entries import MISTAKES
from posbench.tools.vectors.publishing import ROUNDING, Sizes, chosen, distance, is_close, tolerance, wrong_values

_INPUTS = ("q", "k", "v", "positions", "sinks", "distances")


class Verdict(NamedTuple):
    """The verdict on a port's values of one entry."""

    entry: str
    tensors: str  # names of the compared ones
    distance: float  # the largest; inf for another shape
    where: str  # the tensor and position with the largest distance
    is_right: bool
    explanation: str


def check(path: Path, sizes: Sizes, console: Console, names: Sequence[str] = (), rounding: float = ROUNDING) -> bool:
    """Print a table of the entries in a port's file. Return whether all are right.

    Arguments: path, of safetensors, with tensors named ENTRY.TENSOR; sizes, of the inputs; rounding, the relative error
    that a right port may have.
    Raises: ConfigError if the file cannot be read or has no known entry.
    """
    inputs, port = sizes.inputs(), _read(path)
    candidates = [(entry, entry.values(inputs)) for entry in chosen(names, sizes.head_dim)]
    known: set[str] = set()
    for entry, values in candidates:
        known.update(f"{entry.name}.{name}" for name in values)
    _check_names(path, port, known, names)
    verdicts = []
    for entry, values in candidates:
        port_inputs = {name: port[f"{entry.name}.{name}"] for name in values if f"{entry.name}.{name}" in port}
        if port_inputs:
            verdicts.append(judge(entry, port_inputs, values, inputs, rounding))
    console.print(_table(verdicts))
    for verdict in verdicts:
        if not verdict.is_right:
            console.out(f"{verdict.entry}: {verdict.explanation}")
    right = sum(verdict.is_right for verdict in verdicts)
    console.out(f"{right} of {len(verdicts)} entries are right; {len(candidates) - len(verdicts)} are not in {path}")
    return right == len(verdicts)


def judge(entry: Entry, port: Values, right: Values, inputs: Inputs, rounding: float = ROUNDING) -> Verdict:
    """Return what the tensors `port` of an entry are: right, a known mistake, or wrong in another way."""
    tensors = " ".join(port)
    for name, array in port.items():
        if array.shape != right[name].shape:
            shapes = f"{name} has shape {list(array.shape)} and must have {list(right[name].shape)}"
            return Verdict(entry.name, tensors, np.inf, name, False, f"{shapes}: give --heads, --head-dim, ... as used")
    largest, worst_place = _largest(port, right, inputs)
    limits = tolerance(entry, right, inputs, rounding)
    if is_close(port, right, limits):
        return Verdict(entry.name, tensors, largest, worst_place, True, "right")
    wrong = wrong_values(entry, right, inputs)
    matching = [mistake for mistake, values in wrong.items() if is_close(port, values, limits)]
    if matching:
        summaries = {mistake.name: mistake.summary for mistake in MISTAKES}
        explanation = "looks like " + ", or ".join(f"{name} ({summaries[name]})" for name in matching)
    else:
        explanation = f"no known mistake; wrong from {_first_wrong(port, right, limits, inputs)} on"
    return Verdict(entry.name, tensors, largest, worst_place, False, explanation)


def _largest(port: Values, right: Values, inputs: Inputs) -> tuple[float, str]:
    """Return the largest distance of a port's tensors from the right ones, and its place; NaN counts as infinite."""
    largest_of = {}  # place -> distance
    for name, array in port.items():
        distances = np.nan_to_num(distance(array, right[name]), nan=np.inf, posinf=np.inf)
        largest_of[_place(name, distances, int(distances.argmax()), inputs)] = float(distances.max())
    where = max(largest_of, key=lambda place: largest_of[place])
    return largest_of[where], where


def _first_wrong(port: Values, right: Values, limits: Values, inputs: Inputs) -> str:
    """Return the first place at which a tensor is farther from the right one than its limit, or ""."""
    for name, array in port.items():
        distances = distance(array, right[name])
        # `not <=`, so that NaN counts as wrong.
        [wrong] = np.nonzero(~(distances <= limits[name]))
        if len(wrong):
            return _place(name, distances, int(wrong[0]), inputs)
    return ""


def _place(name: str, distances: Array, index: int, inputs: Inputs) -> str:
    return name if len(distances) == 1 else f"{name} at {inputs.positions[index]:,}"


def _check_names(path: Path, port: Mapping[str, Array], known: set[str], names: Sequence[str]) -> None:
    """Raise ConfigError if no tensor of a port is known, or, without chosen `names`, if one is not."""
    if not known & port.keys():
        raise ConfigError(
            f"{path} has no tensor of the entries, only {', '.join(sorted(port)[:5]) or 'none'}: name tensors "
            "ENTRY.TENSOR, such as default.q"
        )
    unknown = [name for name in sorted(port) if name not in known and name not in _INPUTS]
    if unknown and not names:
        raise ConfigError(f"{path} has a tensor {unknown[0]!r} that no entry has{nearest(unknown[0], known)}")


def _read(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # NumPy has no bfloat16

    if not path.is_file():
        raise ConfigError(f"--check {path} is no file: give the safetensors file of your port's values")
    try:
        tensors = {name: tensor.double().numpy() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise ConfigError(f"--check {path} is not safetensors ({error}): save your values in that format") from error
    for name, array in tensors.items():
        if name.endswith(".scores") and array.ndim == 3:
            tensors[name] = np.tril(array)  # ports may mask later keys, or not
    return tensors


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = plain_table("entry", "tensors", "distance", "where")
    table.add_column("verdict", overflow="fold")
    for verdict in verdicts:
        mistake = verdict.explanation.partition(" (")[0].partition(";")[0]
        style = "" if verdict.is_right else "red"
        cells = (verdict.entry, verdict.tensors, f"{verdict.distance:.1e}", verdict.where, mistake)
        table.add_row(*cells, style=style)
    return table
