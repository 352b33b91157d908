"""Half an hour on a GPU, in pieces: is it right, is it fast, the reference table.

    python -m benchmarks.acceptance.prepare --train ... --out .acceptance           # before, where there is a network
    python -m benchmarks.acceptance --minutes 9 --out .acceptance/results right     # on the GPU
    python -m benchmarks.acceptance --minutes 9 --out .acceptance/results fast reference
    python -m benchmarks.acceptance.tables .acceptance/results                      # afterwards, anywhere

Stages are lists of items in order of worth, each item a process with a time limit of its own. A failure keeps no other
item from running. Every result is a line of OUT/<stage>.jsonl as soon as it is there. What would not be done before the
time is over is not begun, and what still runs is stopped; the same command again goes on with what is left, and tries
again what failed under other code. This process imports no torch. The status is 1 where something failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.acceptance import fast, reference, right
from benchmarks.acceptance.items import FAILED, Item, Results
from benchmarks.acceptance.place import CHECKOUT, Place, code_digest, within_checkout
from benchmarks.acceptance.runner import Runner

STAGES: dict[str, Callable[[Place], list[Item]]] = {
    "right": right.items,
    "fast": fast.items,
    "reference": reference.items,
}
CORES = 12


def main() -> None:
    """The command."""
    began = time.monotonic()
    given = _arguments()
    source, work, out = (within_checkout(path) for path in (given.source, given.work, given.out))
    place = Place(source, work, out, given.shrunk, given.plain_steps)
    os.chdir(CHECKOUT)
    for folder in (place.out, place.work):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *args: sys.exit(143))
    place.check()
    place.install()
    print(f"installed after {time.monotonic() - began:.0f} s", flush=True)
    failed = 0
    for stage in given.stages:
        runner = Runner(
            results=Results(place.out / f"{stage}.jsonl"),
            of_machine=Results(place.of_machine),
            until=began + 60 * given.minutes,
            cores=given.cores,
            code=secrets.token_hex(8) if given.again else code_digest(place),
            place=CHECKOUT,
            variables=place.variables(),
            say=lambda line: print(f"{time.monotonic() - began:4.0f} s {line}", flush=True),
            keep=partial(keep, place, stage),
        )
        items = chosen(STAGES[stage](place), given.only)
        print(f"{stage}: {len(items)} items, {sum(map(runner.is_due, items))} to do", flush=True)
        try:
            left = runner.run(items)
        finally:
            keep(place, stage)
        rows = {item.name: runner.results_of(item).rows.get(item.name, {}) for item in items}
        broken = [name for name, row in rows.items() if row.get("status") == FAILED]
        failed += len(broken)
        print("".join(f"  FAILED {name}\n" for name in broken), end="")
        print(f"{stage}: {len(items) - len(left)} of {len(items)} done, {len(broken)} of them failed", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(1 if failed else 0)


def keep(place: Place, stage: str) -> None:
    """Write what is not in the results of single items to the folder of results."""
    place.bring_home()
    if stage == reference.STAGE:
        reference.pack(place)


def chosen(items: Sequence[Item], pattern: str) -> list[Item]:
    """Those whose names are like the pattern, and those that they wait for."""
    names = {item.name for item in items if fnmatch.fnmatch(item.name, pattern)}
    names |= {name for item in items if item.name in names for name in item.after}
    names |= {name for item in items if item.name in names for name in item.after}  # as the text, for the rate
    return [item for item in items if item.name in names]


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--minutes", type=float, default=9.0, help="after which all has ended")
    parser.add_argument("--out", type=Path, required=True, help="the folder of results; those in it are not made again")
    parser.add_argument("--from", dest="source", type=Path, default=Path(".acceptance"), help="what prepare wrote")
    parser.add_argument("--work", type=Path, default=Path(".acceptance/work"), help="for runs and compiled code")
    parser.add_argument("--cores", type=int, default=CORES, help="how many items run side by side")
    parser.add_argument("--only", default="*", help="items of these names: 'compiled t5*'")
    parser.add_argument("--again", action="store_true", help="what failed is tried again, under the same code too")
    parser.add_argument(
        "--plain-steps", action="store_true", help="no CUDA graphs, where the first stage found them wrong"
    )
    parser.add_argument("--shrunk", action="store_true", help="the rehearsal: tiny models, a CPU, seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
