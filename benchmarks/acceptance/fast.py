"""Is it fast? MFU by size and scheme, beside Hugging Face's Llama, and several small runs on one device.

    python -m benchmarks.acceptance.fast bench SHAPE ROUNDS STEPS FROM WORK OUT SHRUNK PLAIN SCHEME...

Code is compiled first, side by side, into caches that the items behind read; each of those runs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.acceptance import text
from benchmarks.acceptance.items import FAILED, KILLED, Item, Results, emit, run_part
from benchmarks.acceptance.place import PACKAGE, SLOW, Place, device_of, place_of, schemes

STAGE, MODULE = "fast", f"{PACKAGE}.fast"
MAIN = ("nope", "qk_rope", "qkvo_rope", "alibi")
GROUP = 6  # schemes that are measured in turn, beside NoPE
COMPILED_LAYERS = 4  # one block's code serves all layers; four, for the scheme whose layers take turns of four
WARM_LLAMA = "compile Llama 125m"
LLAMA = "posbench nope,posbench qk_rope,transformers Llama"
SEVERAL = ("nope", "qk_rope", "vo_rope", "qkvo_rope")  # small runs, one after another and at once
ONE_BY_ONE, AT_ONCE, WITH_MPS = "one after another", "at once", "at once with MPS"
# Shape, schemes in memory together, and the seconds that they are expected to take.
SIZES = (("125m", [MAIN], 45), ("350m", [MAIN], 50), ("1b", [MAIN[:2], MAIN[2:]], 60), ("25m", [MAIN], 35))


def items(place: Place) -> list[Item]:
    """In order of worth: four schemes at all sizes, small runs at once, Llama, then all schemes at one size.

    All that those need is compiled at once, what takes longest first.
    """
    if place.shrunk:
        shape = "rehearsal"
        return [
            text.item(place),
            warm(shape, "nope", place),
            _bench(shape, ("nope", "qk_rope"), 40, place),
            _peers(shape, "posbench qk_rope,plain GPT-2", place),
            _several(place),
            _with_mps(place),
        ]
    others = [name for name in schemes() if name not in MAIN and name not in SLOW]
    groups = [_bench("125m", ("nope", *others[n : n + GROUP]), 75, place, "all") for n in range(0, len(others), GROUP)]
    measured = tuple(item.name for item in groups)
    return [
        text.item(place),
        _warm_llama(place),
        *(warm(shape, scheme, place) for shape, _, _ in SIZES for scheme in MAIN),
        *(warm("small", scheme, place) for scheme in SEVERAL),
        *(_bench(shape, group, seconds, place) for shape, groups, seconds in SIZES for group in groups),
        _several(place),
        _peers("125m", LLAMA, place, after=(WARM_LLAMA,)),
        *(warm("125m", scheme, place) for scheme in others),
        *groups,
        _with_mps(place),
        # Nothing may run beside a measurement, so what compiles for minutes would hold up all others.
        *(warm("125m", scheme, place, measured) for scheme in SLOW),
        _bench("125m", ("nope", *SLOW), 75, place, "all"),
    ]


def warm(shape: str, scheme: str, place: Place, after: tuple[str, ...] = ()) -> Item:
    """Compile a scheme's training step at a shape into the caches of the machine."""
    words, seconds = ("compile", shape, *place.words, scheme), 40 * SLOW.get(scheme, 1.0)
    return Item(_warm_name(scheme, shape), "compile", MODULE, words, seconds, after=after, is_of_machine=True)


def _warm_name(scheme: str, shape: str) -> str:
    return f"compile {scheme} {shape}"


def _bench(shape: str, names: tuple[str, ...], seconds: float, place: Place, what: str = "bench") -> Item:
    rounds, steps = ("2", "1") if place.shrunk else ("5", "4")
    words = ("bench", shape, rounds, steps, *place.words, *names)
    after = tuple(_warm_name(name, shape) for name in names)
    name = f"{what} {shape} {','.join(names)}"
    return Item(name, f"{what} {shape}", MODULE, words, seconds, alone=True, after=after)


def _peers(shape: str, names: str, place: Place, after: tuple[str, ...] = ()) -> Item:
    words = ("peers", shape, names, *place.words)
    return Item(f"peers {shape}", "peers", MODULE, words, 40 if place.shrunk else 120, alone=True, after=after)


def _warm_llama(place: Place) -> Item:
    """Its whole model is one graph, and the shape of a step: no smaller one compiles the same code."""
    words, name = ("peers", "125m", "transformers Llama", *place.words, "1"), WARM_LLAMA
    return Item(name, "compile Llama", MODULE, words, 90, is_of_machine=True)


def _several(place: Place) -> Item:
    seconds = 80 if place.shrunk else 155
    return Item("several", "several", MODULE, ("several", *place.words), seconds, alone=True, after=(text.NAME,))


def _with_mps(place: Place) -> Item:
    return Item(WITH_MPS, "several", MODULE, ("mps", *place.words), 70, alone=True, after=("several",))


def compile_step(shape_name: str, *words: str) -> None:
    """One step of a decoder with few layers, at the shape of the whole one."""
    from dataclasses import replace

    import torch

    from benchmarks.peers import Ours

    place, scheme = place_of(*words[:5]), words[5]
    shape = _shapes(place)[shape_name]
    few = replace(shape, layers=min(shape.layers, COMPILED_LAYERS))
    device = _device(place)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.context + 1)).to(device.torch)
    Ours(few, scheme, _dtype(place), device.compiled, words=place.step_words).step(tokens)
    device.wait()


def bench(shape_name: str, rounds: str, steps: str, *words: str) -> None:
    """Tokens a second of each scheme's training step, in turn; a scheme that fails is named and left out."""
    from benchmarks import peers

    place = place_of(*words[:5])
    shapes = _shapes(place)
    device = _device(place)
    names, left_out = compiled_in_time(words[5:], shape_name, place)
    only = ",".join(f"posbench {name}" for name in names)
    how, given = [device.compiled], (int(rounds), int(steps), only)
    result = peers.compare(shape_name, _dtype(place), how, *given, keep=True, words=place.step_words, report=_so_far)
    result["failed"] |= left_out
    emit(**result, parameters=_parameters(shapes[shape_name]))
    _end_with(result)


def compiled_in_time(names: Sequence[str], shape: str, place: Place) -> tuple[list[str], dict[str, str]]:
    """Those whose code was not too slow to compile, and why the others are left out: here all would be killed."""
    rows = Results(place.of_machine).rows
    errors = {name: rows.get(_warm_name(name, shape), {}) for name in names}
    left_out = {
        f"posbench {name}": f"not measured: compiling was {row['error'].partition(chr(10))[0]}"
        for name, row in errors.items()
        if row.get("status") == FAILED and row["error"].startswith(KILLED)
    }
    return [name for name in names if f"posbench {name}" not in left_out], left_out


def peers(shape_name: str, names: str, *words: str) -> None:
    """posbench beside other people's models, uncompiled and compiled, in turn."""
    from benchmarks import peers

    place, rounds = place_of(*words[:5]), int((*words[5:], "3")[0])
    _shapes(place)
    _device(place)
    how = [False] if place.shrunk else [False, True]
    result = peers.compare(
        shape_name, _dtype(place), how, rounds, 3, names, keep=True, words=place.step_words, report=_so_far
    )
    emit(**result)
    _end_with(result)


def several(*words: str) -> None:
    """The same small runs one after another and at once: seconds of both sweeps, and whether the losses agree."""
    place = place_of(*words)
    one = _sweep(place, ONE_BY_ONE)
    emit(**{ONE_BY_ONE: one})
    other = _sweep(place, AT_ONCE, at_once=True)
    emit(**{AT_ONCE: other})
    _agree(one["losses"], other["losses"])


def with_mps(*words: str) -> None:
    """The small runs at once under NVIDIA's MPS, where it is there; else why not."""
    from benchmarks.acceptance.mps import NoService, service

    place = place_of(*words)
    try:
        with service() as variables:
            found = _sweep(place, WITH_MPS, at_once=True, variables=variables)
            emit(**{WITH_MPS: found})
    except NoService as none:
        emit(no_mps=str(none))
        return
    one = Results(place.out / f"{STAGE}.jsonl").result("several").get(ONE_BY_ONE)
    if one:
        _agree(one["losses"], found["losses"])


def _sweep(place: Place, how: str, at_once: bool = False, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Train the small runs in one sweep, with an environment. Returns its seconds, the losses and the rates."""
    import shutil
    import subprocess
    import time

    from benchmarks import shapes
    from posbench import load_run

    names = SEVERAL[:2] if place.shrunk else SEVERAL
    small = shapes.SHAPES["small"]
    size = ["model=small", f"train.context_length={small.context}", f"train.batch_size={small.batch}"]
    size += ["train.tokens=20_000_000", "train.dtype=bfloat16", "train.compile=true", "train.validation_tokens=65536"]
    if place.shrunk:
        size = ["model=tiny", "train.context_length=32", "train.batch_size=2", "train.steps=4", "train.dtype=float32"]
        size += ["train.validation_tokens=256"]
    experiment = f"several-{how.replace(' ', '-')}"
    words_of_runs = [*place.run_words("main"), *size, "train.checkpoint_every=100000", f"train.device={place.device}"]
    command = [sys.executable, "-m", "posbench", "train", "-m", *words_of_runs, f"experiment_name={experiment}"]
    command += [f"scheme={','.join(names)}", f"runs_dir={place.runs}", "train.lr=1e-3"]
    command += [f"--jobs={len(names)}"] * at_once
    shutil.rmtree(place.runs / experiment, ignore_errors=True)  # of a try that was cut off
    began = time.perf_counter()
    status = subprocess.run(command, env=variables).returncode
    if status:
        raise SystemExit(f"the sweep {how} ended with {status}")
    seconds = time.perf_counter() - began
    runs = [load_run(place.runs / experiment / name / "seed=0").manifest for name in names]
    losses = [float(run.loss or "nan") for run in runs]
    rates = [run.costs.tokens_per_second if run.costs else None for run in runs]
    return {"seconds": seconds, "losses": losses, "tokens_per_second": rates, "runs": len(runs)}


def _agree(one: list[float], other: list[float]) -> None:
    """Raises: SystemExit where losses (nats) differ by more than bf16's sums in another order make them."""
    if not all(abs(a - b) < 0.05 for a, b in zip(one, other, strict=True)):
        raise SystemExit(f"runs at once have other losses: {other}, not {one}")


def _so_far(rates: dict[str, list[float]]) -> None:
    """What a kill leaves: the rates of each round."""
    emit(rates_so_far=rates)


def _dtype(place: Place) -> str:
    return "float32" if place.shrunk else "bfloat16"


def _device(place: Place) -> Any:
    return device_of(place, _dtype(place), compiled=not place.shrunk)


def _shapes(place: Place) -> dict[str, Any]:
    """The shapes by name, with that of the rehearsal."""
    from benchmarks import shapes

    if place.shrunk:
        shapes.SHAPES["rehearsal"] = shapes.Shape(layers=1, width=32, heads=2, context=16, batch=2, vocab=64)
    return shapes.SHAPES


def _parameters(shape: Any) -> int:
    """Of NoPE at the shape."""
    from benchmarks.shapes import config_of
    from posbench.size import num_parameters

    return sum(num_parameters(config_of(shape, "nope", "float32", False), shape.vocab).values())


def _end_with(result: dict[str, Any]) -> None:
    """Raises: SystemExit where a contender failed."""
    if result["failed"]:
        raise SystemExit("; ".join(f"{name}: {error}" for name, error in result["failed"].items()))


if __name__ == "__main__":
    run_part({"compile": compile_step, "bench": bench, "peers": peers, "several": several, "mps": with_mps})
