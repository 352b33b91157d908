"""Memory and time of scoring one window against its length, each length in a process of its own.

python -m benchmarks.memory_by_length --output docs/memory-by-length
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SCHEMES = ("nope", "qk_rope", "sinusoidal", "alibi")


def measure(scheme: str, length: int) -> dict[str, float]:
    """Seconds and peak resident bytes of one window, by `posbench bench --eval`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = ["bench", "--schemes", scheme, "--eval", str(length), "--rounds", "1", "--output", str(file)]
        subprocess.run([sys.executable, "-m", "posbench", *command], check=True, capture_output=True)
        found = json.loads(file.read_text(encoding="utf-8"))["schemes"][scheme][str(length)]
    return {key: found[key] for key in ("seconds", "peak_memory_bytes")}


def draw(figures: dict[str, dict[str, dict[str, float]]], file: Path) -> None:
    """Two panels over length: peak memory, and seconds on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, scale, label in (
        (panels[0], "peak_memory_bytes", 2.0**-20, "peak memory (MiB)"),
        (panels[1], "seconds", 1.0, "seconds a window"),
    ):
        for scheme, of in figures.items():
            axes.plot(
                [int(length) for length in of],
                [value[key] * scale for value in of.values()],
                label=scheme,
                marker="o",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(0, 2300)
    panels[0].axhline(2048, color="0.5", linestyle=":", linewidth=1)
    panels[0].text(LENGTHS[0], 2080, "2 GiB", color="0.4")
    panels[1].set_yscale("log")
    panels[1].legend(frameon=False)
    figure.savefig(file)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="without an ending: .json and .svg are added")
    given = parser.parse_args()
    figures = {scheme: {str(n): measure(scheme, n) for n in LENGTHS} for scheme in SCHEMES}
    given.output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    draw(figures, given.output.with_suffix(".svg"))
    for scheme, of in figures.items():
        told = ", ".join(f"{n} {v['peak_memory_bytes'] / 2**20:,.0f} MiB {v['seconds']:.1f} s" for n, v in of.items())
        print(f"{scheme}: {told}")


if __name__ == "__main__":
    main()
