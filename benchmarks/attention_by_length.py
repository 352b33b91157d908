"""Time and memory of attention against length, forward: softmax, linear attention and decay, and where they cross.

One layer's hooks and mixing, without its projections and without a gradient, each length in a process of its own.

python -m benchmarks.attention_by_length --output docs/attention-by-length
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BASE = "qk_rope"  # the fused kernel
ROWS = (BASE, "alibi", "linear_nope", "linear_qk_rope", "linear_alibi", "decay", "decay_vo_rope")
Figures = dict[str, dict[str, dict[str, float]]]  # row -> length -> seconds, peak_memory_bytes


def measure(row: str, length: int, rounds: int, words: list[str]) -> dict[str, float]:
    """Median seconds and peak bytes of one forward pass, on the device and in the number format of training."""
    import torch

    from posbench.attention import build_kind
    from posbench.composition import compose
    from posbench.machine.device import choose_device
    from posbench.model import as_wide_as, shape_of
    from posbench.schemes import At, build_scheme

    config = compose(["model=small", *words, f"scheme={row}"])
    device, shape = choose_device(config.train), shape_of(config)
    kind = build_kind(config.scheme, shape)
    scheme = build_scheme(config.scheme, shape).to(device.torch)[0]
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device.torch, device.dtype)

    parts = {part: drawn(1, heads, length, shape.head_dim) for part, heads in kind.heads.items()}
    q, k, x = parts.get("q"), parts.get("k"), drawn(1, length, shape.d_model)
    v = k if kind.shared_kv else parts["v"]
    assert v is not None
    pos = torch.arange(length, device=device.torch)
    at = At(as_wide_as(torch.float32, scheme.prepare(pos, length)), 0, 0, length)
    seconds = []
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    with torch.no_grad():
        for _ in range(rounds + 1):
            device.wait()
            began = time.perf_counter()
            kind.mix(q, k, v, x, scheme, at, None)
            device.wait()
            seconds.append(time.perf_counter() - began)
    # The first round allocates; it counts for memory alone.
    return {"seconds": median(seconds[1:]), "peak_memory_bytes": float(device.peak_memory_bytes() - before)}


def in_a_process(row: str, length: int, rounds: int, words: list[str]) -> dict[str, float]:
    """`measure`, where no other length has left its memory."""
    command = ["-m", "benchmarks.attention_by_length", "--row", row, "--length", str(length), "--rounds", str(rounds)]
    done = subprocess.run([sys.executable, *command, *words], check=True, capture_output=True, text=True)
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def crossing(of: dict[str, dict[str, float]], base: dict[str, dict[str, float]], key: str) -> float | None:
    """Tokens from which a row takes less than the base at every longer length measured; None: not up to the longest.

    Between two lengths the logarithm of the ratio is taken to be linear in that of the length.
    """
    lengths = sorted(map(int, of))
    ratios = {n: math.log(max(of[str(n)][key], 1e-9) / max(base[str(n)][key], 1e-9)) for n in lengths}
    if ratios[lengths[-1]] >= 0:
        return None
    dearer = [(one, other) for one, other in pairwise(lengths) if ratios[one] >= 0 > ratios[other]]
    if not dearer:
        return float(lengths[0])
    one, other = dearer[-1]
    share = ratios[one] / (ratios[one] - ratios[other])
    return float(one * (other / one) ** share)


def draw(figures: Figures, file: Path) -> None:
    """Two panels over length, all axes logarithmic: seconds, and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, scale, label in (
        (panels[0], "seconds", 1e3, "milliseconds a layer"),
        (panels[1], "peak_memory_bytes", 2.0**-20, "peak memory (MiB)"),
    ):
        for number, (row, of) in enumerate(figures.items()):
            values = [max(value[key] * scale, 1e-2) for value in of.values()]
            axes.plot(list(map(int, of)), values, label=row, color=f"C{number}", marker="o", markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(file)


def show(figures: Figures) -> None:
    """A line for each row, and from where it is faster, and smaller, than softmax on the fused kernel."""
    for row, of in figures.items():
        cells = (f"{n} {v['seconds'] * 1e3:,.1f} ms {v['peak_memory_bytes'] / 2**20:,.0f} MiB" for n, v in of.items())
        print(f"{row}: {', '.join(cells)}")
    for row, of in figures.items():
        if row == BASE:
            continue
        for key, word in (("seconds", "faster"), ("peak_memory_bytes", "smaller")):
            tokens = crossing(of, figures[BASE], key)
            longest = max(map(int, of))
            place = f"from about {tokens:,.0f} tokens" if tokens else f"not up to {longest:,} tokens"
            print(f"{row} is {word} than {BASE} {place}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="without an ending: .json and .svg are added")
    parser.add_argument("--length", type=int, action="append", help="tokens; may be given several times")
    parser.add_argument("--row", action="append", help="a scheme; may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("words", nargs="*", help="overrides, such as model=demo train.dtype=bfloat16")
    given = parser.parse_intermixed_args()
    if given.output is None:  # one of our own processes
        print(json.dumps(measure(given.row[0], given.length[0], given.rounds, given.words)))
        return
    rows = dict.fromkeys((BASE, *(given.row or ROWS)))
    figures = {
        row: {str(n): in_a_process(row, n, given.rounds, given.words) for n in given.length or LENGTHS} for row in rows
    }
    given.output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    draw(figures, given.output.with_suffix(".svg"))
    show(figures)


if __name__ == "__main__":
    main()
