"""A first session on a GPU: is posbench right there, is it fast there, and a small reference table.

    python -m benchmarks.gpu_session --output gpu --rehearse                # tiny models on the CPU: minutes
    python -m benchmarks.gpu_session --output gpu                           # on the GPU: everything, in order
    python -m benchmarks.gpu_session --output gpu --only 'speed*' --minutes 9
    python -m benchmarks.gpu_session --output gpu --only 'reference*' data=files data.path='books/*.parquet'

Each item runs in a process of its own with a time limit, and writes what it found to OUTPUT/<item>.json as it finds it;
its output is in OUTPUT/<item>.log. A failure does not stop the others. Repeat the command to run what is left; delete
an item's JSON file to run it again. Items that measure no speed run `--jobs` at a time. Overrides at the end of the
command are added to the reference runs.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import posbench
from benchmarks import peers
from posbench.catalogue.choices import choices
from posbench.verify.certificates import ROUNDINGS
from posbench.verify.gradients import training_errors
from posbench.verify.measures import path_errors
from posbench.verify.specimen import Specimen, certificate_config, random_tokens

Figures = dict[str, Any]
FORMATS = {"fp32": ("float32", 2.0**-24), "bf16": ("bfloat16", 2.0**-8)}
LENGTHS = (200, 333)  # tokens: no multiples of 128, the tile of FlexAttention
BIASES = ("alibi", "t5", "kerple", "fire", "shaw", "transformer_xl", "fox", "fox_qk_rope", "cope", "dape")
REFERENCE = ("qk_rope", "alibi", "nope", "vo_rope")
SPEED = "posbench nope,posbench qk_rope,posbench alibi,posbench t5,posbench fox,transformers Llama,plain GPT-2"
SAME_LOSS = 0.01  # nats per token: a resumed run and one that was left alone
NEAR_LOSS = 0.05  # nats per token: the end of a run on the GPU and on the CPU, which sum in other orders


@dataclass(frozen=True)
class Session:
    """Where and how large."""

    output: Path
    rehearse: bool
    overrides: tuple[str, ...]  # of the reference runs

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


@dataclass(frozen=True)
class Item:
    """One thing to do. `run` yields figures as it finds them, and raises where something is wrong."""

    name: str
    run: Callable[[Session], Iterator[Figures]]
    limit: float  # seconds, after which its process is killed
    alone: bool = False  # it measures speed: nothing runs beside it


def items_of(session: Session) -> list[Item]:
    """In order of worth."""
    if session.rehearse:
        return [
            Item("certificates-alibi", partial(certificates, scheme="alibi", compiled=False), 120),
            Item("resume-qk_rope", partial(resume, scheme="qk_rope"), 400),
            Item("gradients-t5-200", partial(gradients, scheme="t5", length=200, compiled=False), 120),
            Item("speed-A", partial(speed, shape="A"), 400, alone=True),
            Item("beside-cpu-qk_rope", partial(beside_cpu, scheme="qk_rope"), 240),
            Item("reference-nope-0", partial(reference, scheme="nope", seed=0), 240),
        ]
    schemes = sorted(choices("scheme"))

    def certified(how: str, compiled: bool, limit: float) -> list[Item]:
        return [Item(f"{how}-{each}", partial(certificates, scheme=each, compiled=compiled), limit) for each in schemes]

    differentiated = [
        Item(f"gradients-{scheme}-{length}", partial(gradients, scheme=scheme, length=length, compiled=True), 600)
        for scheme in BIASES
        for length in LENGTHS
    ]
    return [
        *certified("certificates", compiled=False, limit=180),
        *(Item(f"resume-{scheme}", partial(resume, scheme=scheme), 400) for scheme in ("qk_rope", "t5")),
        *differentiated,
        *(Item(f"speed-{shape}", partial(speed, shape=shape), 500, alone=True) for shape in ("125m", "25m", "350m")),
        *(Item(f"beside-cpu-{scheme}", partial(beside_cpu, scheme=scheme), 600) for scheme in ("qk_rope", "alibi")),
        *certified("compiled", compiled=True, limit=600),
        *(
            Item(f"reference-{scheme}-{seed}", partial(reference, scheme=scheme, seed=seed), 900, alone=True)
            for seed in (0, 1, 2)
            for scheme in REFERENCE
        ),
    ]


def certificates(session: Session, scheme: str, compiled: bool) -> Iterator[Figures]:
    """Every way of attention on the device (fused, FlexAttention, masked), pieces, hooks and gradients against float64.

    Errors are root mean squares in roundings of the number format, as `posbench verify` has them.
    """
    with torch.no_grad():
        specimen = Specimen.of(certificate_config(scheme))
        for name, (dtype, rounding) in FORMATS.items():
            errors: dict[str, float] = {}
            for path, error in path_errors(specimen, getattr(torch, dtype), rounding, compiled, (session.device,)):
                errors[path] = round(error, 3)
                yield {name: {"limit": ROUNDINGS[name], "errors": errors}}
            check_errors(errors, ROUNDINGS[name])


def gradients(session: Session, scheme: str, length: int, compiled: bool) -> Iterator[Figures]:
    """Gradients of all weights against float64, in a window that fills no whole number of tiles."""
    with torch.no_grad():
        specimen = replace(Specimen.of(certificate_config(scheme)), tokens=random_tokens(length))
        for name, (dtype_name, rounding) in FORMATS.items():
            dtype = getattr(torch, dtype_name)
            narrow = copy.deepcopy(specimen.narrow).to(session.device)
            narrow.compute_dtype = dtype
            errors = {path: round(e, 3) for path, e in training_errors(specimen, narrow, dtype, rounding, compiled)}
            yield {name: {"limit": ROUNDINGS[name], "errors": errors}}
            check_errors(errors, ROUNDINGS[name])


def check_errors(errors: dict[str, float], limit: float) -> None:
    """Raises: ValueError naming the paths whose error is above the limit, or no number."""
    if wrong := {path: error for path, error in errors.items() if not error <= limit}:
        raise ValueError(f"above the limit of {limit}: {wrong}")


def run_overrides(session: Session, name: str) -> list[str]:
    """Of every run that the session trains."""
    overrides = [f"runs_dir={session.output / 'runs'}", f"data.cache_dir={session.output / 'cache'}", "tracking=none"]
    return [*overrides, f"experiment_name={name}", f"train.device={session.device}"]


TINY = ["model=tiny", "tokenizer=bytes", "train.context_length=64", "train.batch_size=4", "train.dtype=float32"]
TINY += ["train.compile=false", "train.validation_tokens=1024", "train.lr=1e-3"]


def resume(session: Session, scheme: str) -> Iterator[Figures]:
    """A run that is killed after its first checkpoint and resumed, beside the same run left alone."""
    size = ["model=25m", "train.context_length=1024", "train.batch_size=16", "train.dtype=bfloat16", "train.lr=1e-3"]
    size = TINY if session.rehearse else [*size, "train.compile=true", "train.validation_tokens=65536"]
    overrides = [f"scheme={scheme}", *size, "train.steps=300", "train.checkpoint_every=30"]
    killed = session.output / "runs" / f"killed-{scheme}" / scheme / "seed=0"
    for name in (f"killed-{scheme}", f"alone-{scheme}"):
        shutil.rmtree(session.output / "runs" / name, ignore_errors=True)
    command = [sys.executable, "-m", "posbench", "train", *overrides, *run_overrides(session, f"killed-{scheme}")]
    process = subprocess.Popen(command)
    while process.poll() is None and not list(killed.glob("checkpoints/step=*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise ValueError(f"training ended by itself, with exit status {process.returncode}")
    subprocess.run(command, check=True)
    resumed = posbench.load_run(killed).manifest
    alone = posbench.train([*overrides, *run_overrides(session, f"alone-{scheme}")]).manifest
    losses = [float(manifest.loss or math.nan) for manifest in (resumed, alone)]
    yield {"losses": losses, "same_batches": resumed.fingerprints.batches == alone.fingerprints.batches}
    if resumed.fingerprints.batches != alone.fingerprints.batches or not abs(losses[0] - losses[1]) < SAME_LOSS:
        raise ValueError(f"the resumed run differs: losses {losses}")


def speed(session: Session, shape: str) -> Iterator[Figures]:
    """Training steps of ours in turn with Hugging Face's Llama and a plain GPT-2, compiled and not (benchmarks.peers).

    Llama's first loss must equal ours, from the same weights.
    """
    dtype = "float32" if session.rehearse else "bfloat16"
    only = "posbench qk_rope,plain GPT-2" if session.rehearse else SPEED
    compiled, rounds, steps = ([False], 1, 1) if session.rehearse else ([False, True], 5, 10)
    result = peers.compare(shape, dtype, compiled, rounds, steps, only, keep=True)
    peers.show(result)
    yield result
    if result["failed"]:
        raise ValueError(f"failed: {result['failed']}")


def beside_cpu(session: Session, scheme: str) -> Iterator[Figures]:
    """300 steps of one float32 run on the device and on the CPU: how far do their losses part?"""
    size = ["model=small", "train.context_length=256", "train.batch_size=8", "train.lr=1e-3"]
    size = TINY if session.rehearse else [*size, "tokenizer.vocab_size=4096", "train.validation_tokens=16384"]
    overrides = [f"scheme={scheme}", *size, "train.steps=300", "train.log_every=10", "train.dtype=float32"]
    losses: dict[str, list[float]] = {}
    for device in (session.device, "cpu"):
        name = f"beside-{device}-{len(losses)}"
        run = posbench.train([*overrides, *run_overrides(session, name), f"train.device={device}"])
        losses[f"{len(losses)} {device}"] = [float(loss) for loss in run.metrics["loss"]]
        yield {"losses": losses}
    one, other = losses.values()
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    yield {"largest_difference": max(apart), "last_difference": apart[-1]}
    if not apart[-1] < NEAR_LOSS:
        raise ValueError(f"the last losses are {apart[-1]} nats per token apart")


def reference(session: Session, scheme: str, seed: int) -> Iterator[Figures]:
    """A run of 25M parameters and 30M tokens, with its perplexity by length; packed without its weights."""
    size = ["model=25m", "train.context_length=1024", "train.batch_size=64", "train.tokens=30015488", "train.lr=1e-3"]
    size += ["train.validation_tokens=262144", "tokenizer.vocab_size=16384", "evaluation.protocols=[fixed,order]"]
    lengths = ["64", "128"] if session.rehearse else ["1024", "2048", "8192", "32768"]
    size = [*TINY, "train.steps=20", "evaluation.windows=4"] if session.rehearse else size
    overrides = [f"scheme={scheme}", f"seed={seed}", *size, *run_overrides(session, "reference"), *session.overrides]
    run = posbench.train(overrides)
    speed = run.manifest.costs.tokens_per_second if run.manifest.costs else None
    yield {"loss": run.manifest.loss, "tokens_per_second": speed}
    table = posbench.evaluate(run, protocols=["fixed"], lengths=lengths, quiet=True)
    yield {"perplexity": {str(row.length): row.perplexity for row in table.itertuples()}}
    pack = session.output / "reference.zip"
    pack.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "posbench", "pack", str(run.path.parents[1]), str(pack)], check=True)


def do(item: Item, session: Session) -> None:
    """Run an item in this process, and keep its figures as they come."""
    file = session.output / f"{item.name}.json"
    found: Figures = {"item": item.name, "status": "running", "rehearsal": session.rehearse}
    began = time.monotonic()
    try:
        for figures in item.run(session):
            found |= figures
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        found["status"] = "done"
    except Exception as error:
        traceback.print_exc()
        found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    found["seconds"] = round(time.monotonic() - began, 1)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def supervise(item: Item, session: Session, words: list[str], until: float) -> str:
    """Run an item in a process of its own. Returns its status."""
    file = session.output / f"{item.name}.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8"))["status"] in ("done", "failed"):
        return "done before"
    limit = min(item.limit, until - time.monotonic())
    if limit < item.limit / 4:
        return "not begun: no time left"
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--item", item.name, *words]
    with (session.output / f"{item.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
            end = f"stopped with exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the runs that it started
            end = f"stopped after {limit:.0f} s"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"item": item.name}
    if end:
        file.write_text(json.dumps(found | {"status": end}, indent=1) + "\n", encoding="utf-8")
    return end or f"{found['status']} in {found['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the reference runs, as of posbench train")
    parser.add_argument("--output", type=Path, required=True, help="the folder of results")
    parser.add_argument("--rehearse", action="store_true", help="one small item of each sort, on the CPU")
    parser.add_argument("--only", default="*", help="items whose names match this pattern")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which nothing begins or runs on")
    parser.add_argument("--jobs", type=int, default=4, help="items side by side, unless they measure speed")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    given = parser.parse_args()
    session = Session(given.output.absolute(), given.rehearse, tuple(given.overrides))
    session.output.mkdir(parents=True, exist_ok=True)
    items = items_of(session)
    if given.item:
        return do(next(item for item in items if item.name == given.item), session)
    words = ["--output", str(session.output), *(["--rehearse"] if session.rehearse else []), *session.overrides]
    until = time.monotonic() + 60 * given.minutes
    chosen = [item for item in items if fnmatch.fnmatch(item.name, given.only)]
    for alone, group in itertools.groupby(chosen, key=lambda item: item.alone):
        with ThreadPoolExecutor(1 if alone else given.jobs) as pool:
            for line in pool.map(lambda item: f"{item.name}: {supervise(item, session, words, until)}", group):
                print(line, flush=True)


if __name__ == "__main__":
    main()
