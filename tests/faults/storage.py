"""Checkpoints cut off while written, truncated, with flipped bits, on a full disk, or missing: none is ever loaded bad.

Each fault strikes a fresh copy of three checkpoints, one save interval apart. What must come of it is known by what was
done: the newest checkpoint that nothing happened to is found, exactly as it was written.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posbench.config import ConfigError
from posbench.machine import files
from posbench.runs import checkpoint, run_folder
from tests.faults.children import in_child
from tests.faults.kills import Battery

STEPS = (4, 8, 12)  # one save interval apart
RESUMED_EVERY = 25  # faults: one in so many strikes a real run, which is then trained on and compared
CASE = "scheme=qkvo_rope train.dtype=float32 train.accumulation=1 train.steps=16 train.keep_checkpoints=3"


@dataclass
class Faults:
    """What came of the faults."""

    count: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)  # save intervals -> faults
    resumed: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.by_kind.items()))
        lost = ", ".join(f"{n} save intervals lost by {count}" for n, count in sorted(self.lost.items()))
        return (
            f"storage: {self.count} faults ({kinds}); {lost}; {len(self.problems)} loaded a bad checkpoint or lost more"
            f"\n{self.resumed} of them struck a real run, which went on to the same bytes"
        )


def damage(battery: Battery, count: int, seed: int) -> Faults:
    """Do `count` faults, of each kind about as many."""
    chosen = random.Random(seed)
    faults = Faults()
    place = battery.folder / "storage"
    pristine = _pristine(place / "pristine")
    kinds: tuple[Callable[..., int], ...] = (_truncated, _flipped, _missing, _killed, _full)
    for n in range(count):
        kind = kinds[n % len(kinds)]
        folder = place / "struck"
        shutil.copytree(pristine, folder)
        expected = kind(folder, chosen)
        told = f"fault {n}: {kind.__name__[1:]}"
        faults.by_kind[kind.__name__[1:]] += 1
        faults.count += 1
        problem = _judge(folder, pristine, expected, faults)
        if problem:
            faults.problems.append(f"{told}: {problem}")
        shutil.rmtree(folder)
        if n % RESUMED_EVERY == 0:
            problem = _resumed(battery, chosen, n)
            faults.resumed += problem == ""
            faults.problems += [f"{told}: {problem}"] if problem else []
    return faults


def _tensors(step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    model = {name: torch.randn(100, 100, generator=generator) for name in ("a.weight", "b.weight")}
    return model, {f"{name}/exp_avg": torch.randn(100, 100, generator=generator) for name in model}


def _save(folder: Path, step: int) -> None:
    model, optimizer = _tensors(step)
    metrics = b"".join(b'{"step": %d, "loss": 2.5}\n' % n for n in range(step))
    checkpoint.save(folder, step, model, optimizer, metrics, {"loss_sum": step / 3, "batches": "ab" * 32}, keep=3)


def _pristine(folder: Path) -> Path:
    for step in (*STEPS, STEPS[-1] + 4):  # the last one is what a fault in writing should have written
        _save(folder / "next" if step > STEPS[-1] else folder / "there", step)
    return folder / "there"


def _judge(folder: Path, pristine: Path, expected: int, faults: Faults) -> str:
    """What is wrong, or nothing; counts the save intervals lost. `expected`: the newest step nothing happened to."""
    found = checkpoint.newest(folder, lambda text: None)
    if found is None:
        return "no checkpoint was found"
    step = int(found.name.removeprefix("step="))
    if step < expected:
        return f"step {step} was found, and {expected} is whole"
    source = pristine if step <= STEPS[-1] else pristine.parent / "next"
    if checkpoint.read_state(found) != checkpoint.read_state(source / found.name):
        return f"the state of step {step} is not what was written"
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.METRICS):
        if (found / name).read_bytes() != (source / found.name / name).read_bytes():
            return f"{name} of step {step} is not what was written"
    newest_possible = max(STEPS[-1], step)
    lost = (newest_possible - step) // 4
    faults.lost[lost] += 1
    return f"{lost} save intervals were lost" if lost > 1 else ""


def _struck_file(folder: Path, chosen: random.Random) -> tuple[Path, int]:
    """A file of one of the two newest checkpoints, and the newest step that is whole without it."""
    step = chosen.choice(STEPS[1:])
    file = chosen.choice(sorted((folder / f"step={step:08d}").iterdir()))
    return file, STEPS[-2] if step == STEPS[-1] else STEPS[-1]


def _truncated(folder: Path, chosen: random.Random) -> int:
    file, whole = _struck_file(folder, chosen)
    os.truncate(file, chosen.randrange(file.stat().st_size))
    return whole


def _flipped(folder: Path, chosen: random.Random) -> int:
    file, whole = _struck_file(folder, chosen)
    content = bytearray(file.read_bytes())
    for _ in range(chosen.choice((1, 1, 2, 64))):
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    file.write_bytes(content)
    return whole


def _missing(folder: Path, chosen: random.Random) -> int:
    file, whole = _struck_file(folder, chosen)
    if chosen.random() < 0.2:
        shutil.rmtree(file.parent)
    else:
        file.unlink()
    return whole


def _killed(folder: Path, chosen: random.Random) -> int:
    """SIGKILL while the next checkpoint is written, with a part of one of its files on the disk."""
    name = chosen.choice(
        (
            checkpoint.MODEL,
            checkpoint.OPTIMIZER,
            checkpoint.METRICS,
            checkpoint.STATE,
            checkpoint.SUMS,
            "rename",
            "after",
        )
    )
    part = chosen.random()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_a_part(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if path.name == name:
            os.truncate(path, int(path.stat().st_size * part))
            die()

    def write_a_part_of_bytes(path: Path, content: bytes) -> int:
        if path.name == name:
            content = content[: int(len(content) * part)]
        with path.open("wb") as opened:
            opened.write(content)
        if path.name == name:
            die()
        return len(content)

    def work() -> None:
        safetensors.torch.save_file = write_a_part
        Path.write_bytes = write_a_part_of_bytes  # type: ignore[method-assign]
        Path.write_text = lambda path, text, encoding: write_a_part_of_bytes(path, text.encode())  # type: ignore[method-assign, assign]
        if name == "rename":
            Path.rename = lambda path, target: die()  # type: ignore[method-assign, assign, return-value]
        if name == "after":
            files.sync_folder = lambda path: die() if path == folder else None  # type: ignore[assign]
        _save(folder, STEPS[-1] + 4)

    import safetensors.torch

    save_file = safetensors.torch.save_file
    assert in_child(work, folder.parent) == -9
    return STEPS[-1]


def _full(folder: Path, chosen: random.Random) -> int:
    """The next checkpoint where files may not grow as large as it is, as on a disk that fills up."""
    import resource

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = chosen.randrange(0, 80_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            _save(folder, STEPS[-1] + 4)
        except ConfigError as error:
            raise SystemExit(3 if "0.2 MB are needed" in str(error) else 1) from None

    assert in_child(work, folder.parent) == 3
    return STEPS[-1]


def _resumed(battery: Battery, chosen: random.Random, n: int) -> str:
    """Strike a run that was cut off after its third checkpoint, go on with it, and compare. Returns what is wrong."""
    whole = battery.whole(CASE)
    config = replace(whole.config, experiment_name=f"struck-{n}")
    folder = run_folder(config)
    shutil.copytree(_cut_off(battery), folder)
    victims = [*folder.glob("*.*"), *folder.glob(f"checkpoints/step={STEPS[-1]:08d}/*")]
    file = chosen.choice(sorted(victims))
    how = chosen.choice((_shorten, _flip, Path.unlink))
    if file.name == "run.json" and how is _flip:
        how = _shorten  # a flipped digit of it can be another run's manifest, which is refused
    how(file)
    compared = battery.compare(config, whole)
    return f"{how.__name__} of {file.relative_to(folder)}: {compared}" if compared else ""


def _cut_off(battery: Battery) -> Path:
    """A run killed between its checkpoint of step 12 and its last one."""
    config = replace(battery.whole(CASE).config, experiment_name="cut-off")
    folder = run_folder(config)
    if not folder.exists():

        def work() -> None:
            from posbench.training import train

            train(config, observe=lambda phase, n, step: n == 13 and os.kill(os.getpid(), signal.SIGKILL))

        assert in_child(work, battery.folder) == -9
        assert len(list((folder / "checkpoints").iterdir())) == 3
    return folder


def _shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[len(content) // 2] ^= 4
    file.write_bytes(content)
