"""Do small runs still end with the same bytes? A list of runs, each with digests of what it computed.

    python -m benchmarks.unchanged before.json          # in the old checkout
    python -m benchmarks.unchanged after.json           # in the new one, on the same machine
    python -m benchmarks.unchanged --compare before.json after.json

Every scheme of the demo in float32 and bfloat16, compiled and not, with accumulation, and stopped and resumed; and,
with `--demo`, the demo's own runs of seed 0. A digest covers the weights of the last step, every logged loss and norm,
and every stored window of the final validation and of all protocols. Run it with one thread (OMP_NUM_THREADS=1): sums
over more threads are ordered by their number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from rich.console import Console

from posbench import compose

ROTARY = ["q_rope", "k_rope", "v_rope", "o_rope", "qk_rope", "vo_rope", "qkv_rope", "qkvo_rope"]
SCHEMES = ["nope", *ROTARY, "alibi", "sinusoidal"]
SMALL = [
    "model=tiny",
    "model.num_kv_heads=2",
    "tokenizer=bytes",
    "train.context_length=64",
    "train.batch_size=4",
    "train.steps=6",
    "train.log_every=1",
    "train.checkpoint_every=2",
    "train.validation_tokens=1024",
    "evaluation.max_tokens=4096",
    "evaluation.windows=8",
    "evaluation.targets=16",
    "evaluation.passage=8",
]
PROTOCOLS = "fixed,nonoverlapping,sliding,position,retrieval"
NOT_COMPUTED = ("tokens_per_second",)  # of metrics.jsonl: it says how fast, not what
VARIANTS = {
    "fp32": ["train.dtype=float32", "train.compile=false"],
    "bf16": ["train.dtype=bfloat16", "train.compile=false"],
    "fp32-compiled": ["train.dtype=float32", "train.compile=true"],
    "bf16-compiled": ["train.dtype=bfloat16", "train.compile=true"],
    "accumulation": ["train.dtype=float32", "train.compile=false", "train.accumulation=2"],
    "resumed": ["train.dtype=float32", "train.compile=false"],
}
DEMO = ["experiment=demo", "train.dtype=float32", "train.compile=false"]


def digests(run: Path) -> dict[str, str]:
    """What a finished run computed: its last weights, its logged numbers, its stored windows."""
    last = max((run / "checkpoints").glob("step=*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [{key: value for key, value in row.items() if key not in NOT_COMPUTED} for row in rows]
    files = {f"windows {f.parent.name} {f.stem}": f.read_bytes() for f in sorted((run / "eval").glob("*/*.parquet"))}
    content = {
        "weights": (last / "model.safetensors").read_bytes(),
        "moments": (last / "optimizer.safetensors").read_bytes(),
        "metrics": json.dumps(logged).encode(),
        **files,
    }
    return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in content.items()}


def small_runs(folder: Path, schemes: list[str], variants: list[str]) -> Iterator[tuple[str, Path]]:
    """Each scheme in each variant, trained and, in float32, evaluated by every protocol."""
    for variant in variants:
        for scheme in schemes:
            words = [*SMALL, *VARIANTS[variant], f"scheme={scheme}", f"experiment_name={variant}"]
            run = trained([*words, f"runs_dir={folder}", "tracking=none"], stop_early=variant == "resumed")
            if variant in ("fp32", "bf16"):
                evaluated(run, "64,96")
            yield f"{variant} {scheme}", run


def demo_runs(folder: Path, schemes: list[str]) -> Iterator[tuple[str, Path]]:
    """The demo's own runs of seed 0, evaluated as the demo is."""
    for scheme in schemes:
        run = trained([*DEMO, f"scheme={scheme}", f"runs_dir={folder}", "tracking=none"])
        evaluated(run, None)
        yield f"demo {scheme}", run


def trained(words: list[str], stop_early: bool = False) -> Path:
    """Train the run that the words name; with `stop_early` it gets a Ctrl-C after a checkpoint, and is resumed."""
    from posbench.training import train

    config = compose(words)
    run = Path(config.runs_dir) / config.experiment_name / config.scheme.name / f"seed={config.seed}"
    if stop_early:
        threading.Thread(target=_interrupt, args=(run / "checkpoints" / "step=00000002",), daemon=True).start()
        try:
            train(config, Console(quiet=True))
        except BaseException as stopped:
            if type(stopped).__name__ != "Stopped":
                raise
    train(config, Console(quiet=True))
    return run


def _interrupt(checkpoint: Path) -> None:
    while not checkpoint.is_dir():
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGINT)


def evaluated(run: Path, lengths: str | None) -> None:
    """Score it by `posbench eval`."""
    import subprocess

    words = ["--length", lengths, "--protocol", PROTOCOLS] if lengths else []
    command = [sys.executable, "-m", "posbench", "eval", str(run), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print what differs between two lists, and what only one of them has. Returns whether nothing does."""
    differing = 0
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            print(f"{name}: only in the {'second' if name in after else 'first'} list")
            differing += 1
            continue
        parts = sorted({*before[name], *after[name]})
        wrong = [part for part in parts if before[name].get(part) != after[name].get(part)]
        differing += bool(wrong)
        if wrong:
            print(f"{name}: {', '.join(wrong)} differ")
    digests = sum(len(parts) for parts in after.values())
    print(
        f"{len({*before, *after})} runs, {differing} differ; {digests} digests of weights, moments, metrics and windows"
    )
    return not differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--demo", action="store_true", help="the demo's eleven runs of seed 0 instead of small ones")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    if given.compare:
        raise SystemExit(not compare(*(json.loads(file.read_text()) for file in given.compare)))
    folder = Path(tempfile.mkdtemp(prefix="unchanged-"))
    schemes = given.schemes.split(",")
    runs = demo_runs(folder, schemes) if given.demo else small_runs(folder, schemes, given.variants.split(","))
    found: dict[str, Any] = {}
    try:
        for name, run in runs:
            found[name] = digests(run)
            print(name, found[name]["weights"], flush=True)
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
