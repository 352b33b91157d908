"""Checkpoints cut off while written, truncated, with flipped bits, on a full disk, or missing: none is ever loaded bad.

Each fault strikes a fresh copy of three checkpoints, one save interval apart. What must come of it is known by what was
done: the newest checkpoint that nothing happened to is found, exactly as it was written.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from posbench.config import ConfigError
from posbench.runs import checkpoint, run_folder
from tests.faults.children import Moments, in_child
from tests.faults.kills import Battery

STEPS = (4, 8, 12)  # one save interval apart
NEXT = 16  # what a fault in writing should have written
MOMENTS = 45  # that a save has at the most
RESUMED_EVERY = 25  # faults: one in so many strikes a real run, which is then trained on and compared
CASE = "scheme=qkvo_rope train.dtype=float32 train.accumulation=1 train.steps=16 train.keep_checkpoints=3"


def damage(battery: Battery, count: int, seed: int) -> list[str]:
    """Do `count` faults, about equally many of each kind.

    Returns: a line for each after which a bad checkpoint was loaded, more than one save interval was lost, or a real
    run did not end with the same bytes.
    """
    chosen = random.Random(seed)
    place, problems = battery.folder / "storage", []
    for step in (*STEPS, NEXT):
        _save(place / ("written" if step in STEPS else "next"), step)
    faults: tuple[Callable[..., int], ...] = (_truncated, _flipped, _missing, _killed, _full)
    for n in range(count):
        fault = faults[n % len(faults)]
        folder = Path(shutil.copytree(place / "written", place / "struck"))
        intact = fault(folder, chosen)
        wrong = _judge(folder, place, intact)
        shutil.rmtree(folder)
        wrong += _resumed(battery, chosen, n) if n % RESUMED_EVERY == 0 else ""
        if wrong:
            problems.append(f"fault {n}, {fault.__name__[1:]}: {wrong}")
    print(f"{count} faults: {len(problems)} loaded a bad checkpoint, or lost more than they may", flush=True)
    return problems


def _tensors(step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    model = {name: torch.randn(100, 100, generator=generator) for name in ("a.weight", "b.weight")}
    return model, {f"{name}/exp_avg": torch.randn(100, 100, generator=generator) for name in model}


def _save(folder: Path, step: int) -> None:
    model, optimizer = _tensors(step)
    metrics = b"".join(b'{"step": %d, "loss": 2.5}\n' % n for n in range(step))
    checkpoint.save(folder, step, model, optimizer, metrics, {"loss_sum": step / 3, "batches": "ab" * 32}, keep=3)


def _judge(folder: Path, place: Path, intact: int) -> str:
    """Return the error of the checkpoint that is loaded, or "". `intact` is the newest untouched step."""
    newest = checkpoint.newest(folder, lambda text: None)
    if newest is None:
        return "no checkpoint was found"
    step = checkpoint.read_state(newest)["step"]
    if step < intact or max(STEPS) - step > 4:
        return f"step {step} was found, and {intact} is whole"
    written = place / ("written" if step in STEPS else "next") / newest.name
    differing = [file.name for file in written.iterdir() if file.read_bytes() != (newest / file.name).read_bytes()]
    return f"{', '.join(differing)} of step {step} are not what was written" if differing else ""


def _struck_file(folder: Path, chosen: random.Random) -> tuple[Path, int]:
    """Return a file of one of the two newest checkpoints, and the newest step that is whole without it."""
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
    """Send SIGKILL at a moment while the next checkpoint is written, or just after it."""
    at = chosen.randrange(MOMENTS)

    def work() -> None:
        Moments(at).watch()
        _save(folder, NEXT)

    return STEPS[-1] if in_child(work, folder.parent) == -9 else NEXT


def _full(folder: Path, chosen: random.Random) -> int:
    """Save the next checkpoint under a limit on file sizes that is too small, as on a disk that fills up."""
    import resource

    most = chosen.randrange(0, 80_000)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            _save(folder, NEXT)
        except ConfigError:
            raise SystemExit(3) from None

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
    strike = chosen.choice((_shorten, _flip, Path.unlink))
    if file.name == "run.json" and strike is _flip:
        strike = _shorten  # a flipped digit of it can be another run's manifest, which is refused
    strike(file)
    compared = battery.compare(config, whole)
    return f"{strike.__name__} of {file.relative_to(folder)}: {compared}" if compared else ""


def _cut_off(battery: Battery) -> Path:
    """Return a run killed between its checkpoint of step 12 and its last one."""
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
