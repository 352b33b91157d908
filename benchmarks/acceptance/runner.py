"""Runs items until the time is over: side by side where they may, past failures, and none that would not fit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.acceptance.items import CUT_OFF, DONE, FAILED, KILLED, Item, Results

GRACE_SECONDS = 10.0  # between the signal at the end of the time and the kill: a training run writes a checkpoint
KEPT_CHARACTERS = 20_000  # of what an item said that is not done: a compiler prints pages behind the cause
KEPT_WHERE_DONE = 2000
KILL_SECONDS = 5.0  # that a killed process may take to end: a driver that hangs keeps it for ever
STACK_SECONDS = 1.0  # for an item to print where it is, before it is killed
POLL_SECONDS = 0.1
KEEP_SECONDS = 100.0
ADVICE, EXCEPTION = re.compile(r"\s|Set TORCH|For even more|You can suppress"), re.compile(r"[\w.]+: \S")
COMPILERS_ALONE = 8  # processes that compile for an item which runs alone; beside others it has one


@dataclass
class Started:
    """An item that runs."""

    item: Item
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def signal(self, number: int) -> None:
        """To it and to all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Have it print where it is, then end it."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.wait(STACK_SECONDS)
        self.end()

    def end(self) -> None:
        """End it and all that it started, and wait for it a while, not for ever."""
        self.signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)


@dataclass
class Runner:
    """Runs the items of a stage. `until`: the moment (time.monotonic) at which everything has ended."""

    results: Results
    of_machine: Results  # of the items that prepare it
    until: float
    cores: int
    code: str
    place: Path  # the working folder of items
    variables: Mapping[str, str]  # their environment
    say: Callable[[str], object] = print
    keep: Callable[[], object] = lambda: (
        None
    )  # now and then, where an item has ended: brings home what a kill would lose

    def run(self, items: Sequence[Item]) -> list[Item]:
        """Run what is due, in order. Returns: what was left for the next time."""
        waiting = [item for item in items if self.is_due(item)]
        running: list[Started] = []
        kept = time.monotonic()
        try:
            while self.remaining > 0:
                chosen = self.startable(waiting, [each.item for each in running], self.lasting(running))
                for item in chosen:
                    waiting.remove(item)
                    running.append(self._start(item))
                if not running:
                    break
                before, running = len(running), [each for each in running if not self._has_ended(each)]
                if len(running) < before and time.monotonic() - kept > KEEP_SECONDS:
                    self.keep()
                    kept = time.monotonic()
                time.sleep(POLL_SECONDS)
        finally:  # where somebody asks for an end, too
            cut_off = self._stop(running)
        return waiting + cut_off

    def is_due(self, item: Item) -> bool:
        """Whether it is to be run."""
        return self.results_of(item).is_due(item, self.code)

    def results_of(self, item: Item) -> Results:
        """Where its result stands."""
        return self.of_machine if item.is_of_machine else self.results

    @property
    def remaining(self) -> float:
        """Seconds in which items may run; after them they are asked to stop."""
        return self.until - GRACE_SECONDS - time.monotonic()

    def lasting(self, running: Sequence[Started]) -> float:
        """Seconds until what runs has ended: what takes longer than expected needs as long again as it is over."""
        left = (abs(self.results_of(each.item).expected(each.item) - each.seconds) for each in running)
        return max(left, default=0.0)

    def startable(self, waiting: Sequence[Item], running: Sequence[Item], lasting: float = 0.0) -> list[Item]:
        """The next items, in order, that may run beside those that do and will be done in time.

        One that must be alone holds up all behind it, but for those that will have ended when its turn comes.
        Arguments: lasting, seconds that what runs will still take.
        """
        chosen: list[Item] = []
        not_ended = {item.name for item in (*waiting, *running)}
        meanwhile: float | None = None  # seconds until one that must be alone has its turn
        for item in waiting:
            beside = [*running, *chosen]
            if any(each.alone for each in beside):
                break
            seconds, waits = self.results_of(item).expected(item), set(item.after) & not_ended
            if seconds > self.remaining:
                continue
            if item.alone and meanwhile is None and waits <= {each.name for each in beside}:
                if beside:
                    meanwhile = max(lasting, 0.0, *(self.results_of(each).expected(each) for each in chosen))
                else:
                    chosen.append(item)
            elif item.alone or waits or (meanwhile is not None and seconds > meanwhile):
                continue
            elif not beside or item.cores <= self.cores - sum(each.cores for each in beside):
                chosen.append(item)
            else:  # room is kept for it, or smaller ones would pass it as long as there are any
                break
        return chosen

    def _start(self, item: Item) -> Started:
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (closed with the item)
        process = subprocess.Popen(
            [sys.executable, "-m", item.module, *item.words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=self.place,
            env={**self.variables, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILERS_ALONE if item.alone else 1)},
            start_new_session=True,
        )
        return Started(item, process, out, err, time.monotonic())

    def _has_ended(self, each: Started) -> bool:
        """Record an item that has ended; kill one that takes far too long."""
        status = each.process.poll()
        if status is None:
            if each.seconds < each.item.limit:
                return False
            seconds = each.seconds
            each.kill()
            self._record(each, FAILED, f"{KILLED} after {seconds:.0f} s, {each.item.seconds:.0f} were expected")
        elif status == 0:
            self._record(each, DONE)
        else:
            self._record(each, FAILED, f"exit status {status}")
        each.signal(signal.SIGKILL)  # what it may have left behind
        return True

    def _stop(self, running: Sequence[Started]) -> list[Item]:
        """Ask what runs to stop, then kill it. Returns: what was cut off."""
        for each in running:
            each.signal(signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS - 2
        for each in running:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, end - time.monotonic()))
        for each in running:  # all before the first is waited for: leaving a GPU takes seconds
            each.signal(signal.SIGKILL)
        for each in running:
            each.end()
            self._record(each, DONE if each.process.returncode == 0 else CUT_OFF)
        return [each.item for each in running if each.process.returncode != 0]

    def _record(self, each: Started, status: str, why: str = "") -> None:
        result = _result_of(_text(each.out))
        more: dict[str, Any] = {"result": result}
        said = _text(each.err)[-(KEPT_WHERE_DONE if status == DONE else KEPT_CHARACTERS) :].strip()
        if why:
            more["error"] = f"{why}\n{said}".strip()
        elif said:  # warnings, and how far it came
            more["said"] = said
        self.results_of(each.item).add(each.item, status, each.seconds, self.code, **more)
        last = [_cause(more["error"])] if status == FAILED else []
        each.out.close()
        each.err.close()
        self.say(f"  {each.item.name}: {status}, {each.seconds:.0f} s" + "".join(f": {line[:300]}" for line in last))


def _cause(error: str) -> str:
    """The line that tells most: the last one, but for a compiler's advice and what it dumps behind the exception."""
    lines = error.splitlines()
    if ADVICE.match(lines[-1]):
        return next((line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1])
    return lines[-1]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _result_of(text: str) -> dict[str, Any]:
    """The lines of JSON objects, joined into one: later ones add keys."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                result |= json.loads(line)
    return result
