"""Is it right? Every path of every scheme against the float64 definition, long windows, a run that is killed.

python -m benchmarks.acceptance.right paths SCHEME FORMATS COMPILED DEVICE
"""

from __future__ import annotations

import sys
import traceback

from benchmarks.acceptance import reference, text
from benchmarks.acceptance.items import Item, emit, run_part
from benchmarks.acceptance.place import PACKAGE, SLOW, Place, place_of, schemes

MODULE = f"{PACKAGE}.right"
FORMATS = {"fp32": ("float32", 2.0**-24), "bf16": ("bfloat16", 2.0**-8)}
LONG = ("qk_rope", "t5", "nope", "alibi", "fox", "linear_qk_rope", "qkvo_rope", "sinusoidal")
RESUMED = ("qk_rope", "t5")
VOCAB = 16384
LONGEST_SIDE_BY_SIDE = 64 << 10  # tokens
PIECES = 4  # into which a long window is cut the second time
SAME_LOSS = 0.01  # nats: of a long window whole and in pieces, and of a run that was resumed
MOST_BYTES, MOST_BYTES_A_TOKEN = 2 << 30, 128 << 10  # of a long window: 18 GiB for 128k tokens


def items(place: Place) -> list[Item]:
    """Most important first: the reference's learning rate, which all runs of that stage need; all schemes uncompiled;
    resuming; all schemes as they are trained; long windows; fp32 compiled.
    """
    if place.shrunk:
        return [
            text.item(place),
            _resume("qk_rope", place),
            _paths("nope", "fp32", False, place),
            _paths("alibi", "fp32", True, place),
            _long("alibi", 256, place),
        ]
    names = schemes()
    slow_first = sorted(names, key=lambda name: -SLOW.get(name, 1.0))
    return [
        text.item(place),
        reference.rate_item(place),
        _paths(slow_first[0], "bf16", True, place),  # it compiles for most of the time that there is
        *(_paths(name, "fp32,bf16", False, place) for name in names),
        *(_resume(name, place) for name in RESUMED),
        *(_paths(name, "bf16", True, place) for name in slow_first[1:]),
        *(_long(name, length, place) for length in (32 << 10, 128 << 10) for name in LONG),
        *(_paths(name, "fp32", True, place) for name in slow_first),
    ]


def _paths(scheme: str, formats: str, compiled: bool, place: Place) -> Item:
    kind = "compiled" if compiled else "uncompiled"
    seconds = 60 * SLOW.get(scheme, 1.0) if compiled else 25
    # Compiling for a CPU takes longer than a rehearsal may: the same paths, uncompiled.
    words = ("paths", scheme, formats, str(int(compiled and not place.shrunk)), place.device)
    return Item(f"{kind} {scheme} {formats}", kind, MODULE, words, seconds)


def _long(scheme: str, length: int, place: Place) -> Item:
    model = "tiny" if place.shrunk else "25m"
    words = ("long", scheme, model, str(length), place.device)
    cores = 2 if length > LONGEST_SIDE_BY_SIDE else 1  # twelve at once would not fit into the GPU's memory
    seconds = 90 if length > LONGEST_SIDE_BY_SIDE else 30  # in pieces every way of attention goes by blocks
    return Item(f"long {scheme} {length}", f"long {length}", MODULE, words, seconds, cores)


def _resume(scheme: str, place: Place) -> Item:
    return Item(f"resume {scheme}", "resume", MODULE, ("resume", scheme, *place.words), 120, after=(text.NAME,))


def paths(scheme: str, formats: str, compiled: str, device: str) -> None:
    """Every path of a scheme on the device, uncompiled and compiled; prints roundings and the limit."""
    import torch

    from posbench.verify.certificates import ROUNDINGS
    from posbench.verify.measures import path_errors
    from posbench.verify.specimen import Specimen, certificate_config

    torch.set_num_threads(1)
    broken: list[str] = []
    stopped: list[str] = []
    with torch.no_grad():
        specimen = Specimen.of(certificate_config(scheme))
        for name in formats.split(","):
            dtype, rounding = FORMATS[name]
            errors = path_errors(specimen, getattr(torch, dtype), rounding, bool(int(compiled)), (device,))
            found: dict[str, float] = {}
            try:
                for path, error in errors:
                    found[path] = round(error, 3)
                    emit(**{name: {"limit": ROUNDINGS[name], "paths": found}})  # what a kill leaves is worth having
            except Exception as failure:  # the other format may still be measured
                traceback.print_exc()
                stopped.append(f"{name} after {next(reversed(found), 'no path')}: {type(failure).__name__}: {failure}")
            broken += [f"{name} {path}: {error}" for path, error in found.items() if not error <= ROUNDINGS[name]]
    if stopped:
        raise SystemExit(f"{scheme}: stopped: {'; '.join([*stopped, *broken])}")
    if broken:
        raise SystemExit(f"{scheme}: beyond the limit: {'; '.join(broken)}")


def long(scheme: str, model_name: str, length_words: str, device: str) -> None:
    """Score one window of random tokens, whole and in pieces, with random weights; prints losses, seconds, memory."""
    import torch

    from posbench import build_model, compose
    from posbench.bench import window_seconds
    from posbench.machine.device import choose_device

    length = int(length_words)
    config = compose([f"scheme={scheme}", f"model={model_name}", "train.context_length=1024", f"train.device={device}"])
    machine = choose_device(config.train)
    model = build_model(config, VOCAB).to(machine.torch).eval()
    if machine.is_cuda:
        model.compute_dtype = torch.bfloat16
        model.allow_compiled_attention()
    tokens = torch.randint(VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(machine.torch)
    losses = []
    with torch.no_grad():
        for how, piece in (("whole", None), ("pieces", length // PIECES)):
            model.piece = piece
            losses.append(float(model.nll(tokens[:, :-1], tokens[:, 1:]).mean()))  # compiles
            machine.reset_peak_memory()
            seconds = window_seconds(model, tokens, machine)
            emit(**{how: {"loss": losses[-1], "seconds": seconds, "peak_bytes": machine.peak_memory_bytes()}})
            if machine.is_cuda and machine.peak_memory_bytes() > MOST_BYTES + length * MOST_BYTES_A_TOKEN:
                raise SystemExit(f"{scheme}, {length} tokens {how}: {machine.peak_memory_bytes():,} bytes")
    if not abs(losses[0] - losses[1]) < SAME_LOSS:
        raise SystemExit(f"{scheme}, {length} tokens: a loss of {losses[0]} whole and {losses[1]} in pieces")


def resume(scheme: str, *place_words: str) -> None:
    """A run that is killed behind its first checkpoint and goes on, beside the same run left alone."""
    import shutil
    import signal
    import subprocess
    import time
    from pathlib import Path

    import posbench
    from posbench import load_run
    from posbench.runs.checkpoint import any_written

    place = place_of(*place_words)
    size = ["model=25m", "train.context_length=1024", "train.batch_size=16", "train.dtype=bfloat16"]
    size += ["train.compile=true", "train.steps=300", "train.checkpoint_every=30", "train.validation_tokens=65536"]
    if place.shrunk:
        size = ["model=tiny", "train.context_length=32", "train.batch_size=2", "train.dtype=float32"]
        size += ["train.steps=120", "train.checkpoint_every=12", "train.validation_tokens=256"]
    words = [*place.run_words("main"), *size, f"scheme={scheme}", f"train.device={place.device}", "train.lr=1e-3"]

    def folder(name: str) -> Path:
        return place.runs / name / scheme / "seed=0"

    for name in ("left-alone", "killed"):
        shutil.rmtree(folder(name), ignore_errors=True)  # of a try that was cut off
    command = [sys.executable, "-m", "posbench", "train", *words, f"runs_dir={place.runs}", "experiment_name=killed"]
    process = subprocess.Popen(command)
    while process.poll() is None and not any_written(folder("killed") / "checkpoints"):
        time.sleep(0.02)
    if status := process.poll():
        raise SystemExit(f"{scheme}: training ended by itself, with status {status}")
    process.send_signal(signal.SIGKILL)
    process.wait()
    at = load_run(folder("killed")).manifest.status
    process = subprocess.Popen(command)
    posbench.train([*words, f"runs_dir={place.runs}", "experiment_name=left-alone"])
    if process.wait():
        raise SystemExit(f"{scheme}: the run that was killed did not go on: exit status {process.returncode}")
    runs = {name: load_run(folder(name)).manifest for name in ("left-alone", "killed")}
    losses = [float(manifest.loss or "nan") for manifest in runs.values()]
    same = len({manifest.fingerprints.batches for manifest in runs.values()}) == 1
    emit(killed_while=at, losses=losses, same_batches=same)
    if at != "running" or not same or not abs(losses[0] - losses[1]) < SAME_LOSS:
        raise SystemExit(f"{scheme}: killed while {at}, losses {losses}, same batches: {same}")


if __name__ == "__main__":
    run_part({"paths": paths, "long": long, "resume": resume})
