"""Compile every scheme for an H200 (sm_90) on a machine without one, forward, backward and evaluation.

    python -m benchmarks.compile_for_gpu --setup                         # once: 5 GB
    python -m benchmarks.compile_for_gpu --output sm90.jsonl --jobs 2    # hours; given again, it resumes
    python -m benchmarks.compile_for_gpu --output sm90.jsonl --table     # the table of docs/performance.md
    python -m benchmarks.compile_for_gpu --output one.jsonl --schemes t5 --models 25m --dtypes bfloat16 --lengths 1024

Inductor, Triton and ptxas do what they do beside a GPU, with fake tensors: broken graphs, kernels that ask for more
shared memory than there is, score functions that are not supported and missing gradients are found; numbers and speed
are not. Each cell runs in a process of its own, and its result is a line of the output. The status is 1 where a cell
failed. `--default-kernels` takes the kernel options of biased attention away: learned biases must then fail.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.compile_for_gpu import environment
from benchmarks.compile_for_gpu.cells import Cell, add, cells, results
from benchmarks.compile_for_gpu.table import summary, tabulate
from posbench.composition import choices, compose
from posbench.model import shape_of
from posbench.runs.fingerprints import code_fingerprint
from posbench.schemes import build_scheme

PATIENCE_SECONDS = 1800.0  # for one cell


def compile_cells(wanted: list[Cell], output: Path, jobs: int, words: list[str]) -> list[Cell]:
    """Compile the cells that have no result by today's code, several at a time. Returns: those that failed."""
    code, have = code_fingerprint(), results(output)
    missing = [cell for cell in wanted if have.get(cell, {}).get("code") != code]
    print(f"{len(wanted)} cells, {len(missing)} to compile", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(compile_one, cell, words): cell for cell in missing}
        for done in as_completed(started):
            cell, row = started[done], done.result()
            add(output, cell, {"code": code, **row})
            print(f"{cell}: {summary(row)}", flush=True)
    return [cell for cell in wanted if has_failed(results(output)[cell])]


def is_defined(cell: Cell) -> bool:
    """Whether the scheme reaches as far as the windows."""
    config = compose([f"scheme={cell.scheme}", f"model={cell.model}", f"train.context_length={cell.length}"])
    longest = build_scheme(config.scheme, shape_of(config)).longest
    return longest is None or longest >= cell.length


def compile_one(cell: Cell, words: list[str]) -> dict[str, Any]:
    """The result of one cell, from a process of its own; `error` where that process gave none."""
    command = environment.command(
        "benchmarks.compile_for_gpu.compilation", cell.scheme, cell.model, cell.dtype, str(cell.length), *words
    )
    options: dict[str, Any] = {"cwd": environment.CHECKOUT, "env": environment.variables()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {PATIENCE_SECONDS:.0f} seconds"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": " ".join((done.stderr.strip().splitlines() or ["no output"])[-3:])[:500]}
    return dict(json.loads(lines[-1]))


def has_failed(row: dict[str, Any]) -> bool:
    """Whether a part of a cell, or all of it, was not compiled."""
    return "error" in row or any("error" in row[part] for part in ("training", "evaluation"))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environment, or what it lacks")
    parser.add_argument("--output", type=Path, help="results, a line each")
    parser.add_argument("--table", action="store_true", help="compile nothing, print the results")
    parser.add_argument("--schemes", default=",".join(choices("scheme")))
    parser.add_argument("--models", default="25m,1b")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--lengths", default="1024,32768")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--default-kernels", action="store_true", help="without our kernel options: a break to see")
    given, words = parser.parse_known_args()
    if given.setup:
        environment.set_up()
    if given.output is None:
        raise SystemExit(0 if given.setup else "give --output FILE")
    if given.table:
        print(tabulate(results(given.output)))
        return
    if not environment.is_set_up():
        raise SystemExit(f"{environment.home()} holds no environment: give --setup first (5 GB)")
    lists = (getattr(given, name).split(",") for name in ("schemes", "models", "dtypes"))
    every = cells(*lists, (int(length) for length in given.lengths.split(",")))
    wanted = [cell for cell in every if is_defined(cell)]
    for cell in set(every) - set(wanted):
        print(f"{cell}: left out, the scheme is not defined at this length")
    failed = compile_cells(wanted, given.output, given.jobs, words + ["--default-kernels"] * given.default_kernels)
    sys.exit(f"{len(failed)} of {len(wanted)} failed: {', '.join(map(str, failed))}" if failed else 0)


if __name__ == "__main__":
    main()
