"""The results of `benchmarks.acceptance` as tables for docs/performance.md, and the reference runs packed.

    python -m benchmarks.acceptance.tables .acceptance/results                              # Markdown on the terminal
    python -m benchmarks.acceptance.tables .acceptance/results --reference runs/reference   # and packs, with reports

With `--reference FOLDER` each experiment that was trained is packed to FOLDER/<experiment>, its report beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.acceptance import fast, reference
from benchmarks.acceptance.items import DONE, FAILED, Results
from benchmarks.acceptance.place import schemes

Rows = dict[str, dict[str, Any]]  # of one stage, by the names of items
# What was aimed at (of MFU by the measured rate of products, and of NoPE's speed by the kind of a scheme).
MFU_AIMS = {"125m": 0.45, "350m": 0.55, "1b": 0.60}
SPEED_AIMS = {"rotary": 0.97, "alibi": 0.90}
BIAS_AIM, SEVERAL_AIM = 0.80, 1.5


def right_tables(rows: Rows) -> Iterator[str]:
    """Roundings by scheme and path; long windows; runs that were killed."""
    yield "### Right\n"
    yield "The largest error of any path in roundings, of 24 in fp32 and 6 in bf16, and where. **Bold**: beyond it.\n"
    columns = [("uncompiled", "fp32,bf16", "fp32"), ("uncompiled", "fp32,bf16", "bf16")]
    columns += [("compiled", name, name) for name in ("fp32", "bf16")]
    names = [name for name in schemes() if any(f" {name} " in item for item in rows)]
    yield from _table(
        ["scheme", *(f"{how}, {number}" for how, _, number in columns)],
        ([name, *(_worst(rows.get(f"{how} {name} {of}"), number) for how, of, number in columns)] for name in names),
    )
    long = [(item.split(), row) for item, row in rows.items() if item.startswith("long ")]
    if long:
        yield "\nOne window of random tokens with random weights, whole and in four pieces:\n"
        yield from _table(
            ["scheme", "tokens", "whole", "in pieces"], (_long_row(words[1], words[2], row) for words, row in long)
        )
    for item, row in rows.items():
        if item.startswith("resume "):
            of = row["result"]
            yield f"\n{item}: {_status(row)}; losses {of.get('losses')}, the same batches: {of.get('same_batches')}"


def _worst(row: dict[str, Any] | None, number: str) -> str:
    if row is None:
        return "–"
    paths = row["result"].get(number, {}).get("paths", {})
    if not paths:
        return f"**{row['status']}**"
    limit, path = row["result"][number]["limit"], max(paths, key=lambda name: (paths[name] != paths[name], paths[name]))
    cell = f"{paths[path]:.1f} ({path.removeprefix('cuda ')})"
    if not paths[path] <= limit:
        return f"**{cell}**"
    return (
        cell if row["status"] == DONE or "beyond the limit" in row.get("error", "") else f"{cell}, **{row['status']}**"
    )


def _long_row(scheme: str, tokens: str, row: dict[str, Any]) -> list[str]:
    cells = []
    for how in ("whole", "pieces"):
        of = row["result"].get(how)
        cells.append(f"{of['seconds']:.2f} s, {of['peak_bytes'] / 2**30:.1f} GiB" if of else f"**{row['status']}**")
    failed = "**: " + row.get("error", "").splitlines()[-1] if row["status"] == FAILED else ""
    return [scheme, f"{int(tokens):,}{' **failed' + failed if failed else ''}", *cells]


def fast_tables(rows: Rows) -> Iterator[str]:
    """MFU by size, all schemes at one size, other people's models, several runs at once."""
    yield "\n### Fast\n"
    main: list[list[str]] = []
    all_schemes: dict[str, list[str]] = {}
    kinds = _kinds()
    for item, row in rows.items():
        what = item.partition(" ")[0]
        if what not in ("bench", "all") or "contenders" not in row["result"]:
            continue
        result = row["result"]
        of = {name.removeprefix("posbench ").partition(",")[0]: each for name, each in result["contenders"].items()}
        base = of.get("nope") or _base(rows, result["shape"])
        for scheme, figures in of.items():
            line = [scheme, *_speed(figures, base, kinds.get(scheme))]
            if what == "bench":
                main.append([result["shape"], *line, _mfu_aim(figures, result["shape"])])
            elif scheme != "nope":
                all_schemes[scheme] = line
    shape_head = ["tokens/s", "least to most", "to NoPE", "aim", "MFU", "of datasheet", "GiB", "first steps"]
    yield "Training steps in bf16, medians over rounds in turn; MFU of the rate of products measured between rounds.\n"
    yield from _table(["shape", "scheme", *shape_head, "MFU aimed at"], main)
    if all_schemes:
        yield "\nAll others at 125m, each beside NoPE in its own process:\n"
        yield from _table(["scheme", *shape_head], (all_schemes[name] for name in sorted(all_schemes)))
    for item, row in rows.items():
        if item.startswith("peers ") and "contenders" in row["result"]:
            yield f"\nBeside other people's, {item.removeprefix('peers ')}:\n"
            heads = ["contender", "tokens/s", "least to most", "to Llama", "MFU"]
            yield from _table(heads, map(_peer, row["result"]["contenders"].items()))
        for name, why in row["result"].get("failed", {}).items():
            yield f"\n{item}: {name} **failed**: {why}"
        if row["status"] == FAILED and "contenders" not in row["result"]:
            yield f"\n{item} **failed**: {row['error'].splitlines()[-1]}"
    yield from _several({**_result(rows, "several"), **_result(rows, fast.WITH_MPS)})


def _speed(figures: dict[str, Any], base: dict[str, Any] | None, kind: str | None) -> list[str]:
    ratio = figures["tokens_per_second"] / base["tokens_per_second"] if base else None
    aim = SPEED_AIMS.get(kind or "", BIAS_AIM if kind == "bias" else None)
    verdict = "" if aim is None or ratio is None else f"{aim:.2f}: {'met' if ratio >= aim else '**missed**'}"
    peak = figures.get("peak_bytes")
    return [
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['least']:,.0f} to {figures['most']:,.0f}",
        "" if ratio is None else f"{ratio:.3f}",
        verdict,
        *(f"{figures[key]:.1%}" if figures.get(key) else "" for key in ("mfu", "mfu_datasheet")),
        "" if peak is None else f"{peak / 2**30:.1f}",
        f"{figures['first_seconds']:.1f} s",
    ]


def _mfu_aim(figures: dict[str, Any], shape: str) -> str:
    aim = MFU_AIMS.get(shape)
    return "" if aim is None or not figures["mfu"] else f"{aim:.0%}: {'met' if figures['mfu'] >= aim else '**missed**'}"


def _base(rows: Rows, shape: str) -> dict[str, Any] | None:
    """NoPE at a shape, of another item."""
    for item, row in rows.items():
        if item.startswith(f"bench {shape} nope,"):
            found = [each for name, each in row["result"].get("contenders", {}).items() if "posbench nope" in name]
            return dict(found[0]) if found else None
    return None


def _peer(contender: tuple[str, dict[str, Any]]) -> list[str]:
    name, of = contender
    ratio = f"{of['to_base']:.2f}" if of["to_base"] else ""
    rates = [f"{of['tokens_per_second']:,.0f}", f"{of['least']:,.0f} to {of['most']:,.0f}"]
    return [name, *rates, ratio, f"{of['mfu']:.1%}" if of["mfu"] else ""]


def _result(rows: Rows, item: str) -> dict[str, Any]:
    return dict(rows.get(item, {}).get("result", {}))


def _several(result: dict[str, Any]) -> Iterator[str]:
    one = result.get(fast.ONE_BY_ONE)
    if not one:
        return
    alone = f"{one['seconds']:.0f} s {fast.ONE_BY_ONE}"
    yield f"\n{one['runs']} small runs: {alone} (aim at once: {SEVERAL_AIM} times as fast)."
    for how in (fast.AT_ONCE, fast.WITH_MPS):
        if other := result.get(how):
            gain = one["seconds"] / other["seconds"]
            verdict = "met" if gain >= SEVERAL_AIM else "**missed**"
            yield f"{_sentence(how)}: {other['seconds']:.0f} s, {gain:.2f} times as fast ({verdict})."
    if why := result.get("no_mps"):
        yield f"{_sentence(fast.WITH_MPS)}: not measured, {why}."


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _kinds() -> dict[str, str]:
    """Scheme -> rotary, alibi, or bias where it adds to its scores in another way; others have no aim."""
    from posbench import compose
    from posbench.verify.specimen import Specimen, certificate_config

    kinds = {}
    for name in schemes():
        scheme = compose([f"scheme={name}"]).scheme
        if scheme.kind in SPEED_AIMS and not scheme.attention:
            kinds[name] = scheme.kind
        elif not scheme.attention and Specimen.of(certificate_config(name)).has_bias:
            kinds[name] = "bias"
    return kinds


def reference_tables(rows: Rows) -> Iterator[str]:
    """The learning rate's pilots; runs by scheme."""
    yield "\n### The reference\n"
    rate = rows.get(reference.RATE, {}).get("result", {})
    if rate:
        losses = "; ".join(f"{lr}: {', '.join(f'{x:.4f}' for x in found)}" for lr, found in rate["losses"].items())
        yield f"Learning rate {rate['lr']:g}, of pilots' losses {losses}.\n"
    runs = [row["result"] for item, row in rows.items() if item.startswith("train ") and "loss" in row["result"]]
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault((run["experiment"], run["scheme"]), []).append(run)
    order = sorted(grouped, key=lambda key: (key[0], statistics.mean(run["loss"] for run in grouped[key])))
    yield from _table(
        ["experiment", "scheme", "seeds", "loss", "epochs", "seconds a run"],
        (
            [
                *key,
                str(len(grouped[key])),
                f"{statistics.mean(run['loss'] for run in grouped[key]):.4f}",
                f"{grouped[key][0]['epochs']:.2f}",
                f"{statistics.mean(_seconds(rows, run) for run in grouped[key]):.0f}",
            ]
            for key in order
        ),
    )
    for item, row in rows.items():
        if row["status"] == FAILED:
            yield f"\n{item} **failed**: {row['error'].splitlines()[-1]}"


def _rates(results: Path) -> Rows:
    """The search for a learning rate, as one of the machines did it."""
    machines = [Results(file).rows for file in sorted(results.glob("machine-*.jsonl"))]
    return {name: row for rows in machines for name, row in rows.items() if name == reference.RATE}


def _seconds(rows: Rows, run: dict[str, Any]) -> float:
    return next(float(row["seconds"]) for row in rows.values() if row["result"] == run)


def _table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def _status(row: dict[str, Any]) -> str:
    return str(row["status"]) if row["status"] == DONE else f"**{row['status']}**"


def pack_reference(results: Path, target: Path) -> list[Path]:
    """Unpack the runs that came home, and pack each experiment to `target` with its report beside it."""
    from rich.console import Console

    from posbench.reporting.report import report
    from posbench.runs.finding import pack_experiment

    packs = []
    with tempfile.TemporaryDirectory() as runs:
        for file in sorted(results.glob("reference-*.tar.xz")):
            with tarfile.open(file) as packed:
                packed.extractall(runs, filter="data")
        for experiment in sorted(folder for folder in Path(runs).iterdir() if not folder.name.endswith("-tune")):
            packs.append(pack_experiment(experiment, target / f"{experiment.name}.zip", print))
            report(packs[-1], output=target / experiment.name / "report", console=Console(stderr=True))
    return packs


STAGES: dict[str, Callable[[Rows], Iterator[str]]] = {
    "right": right_tables,
    "fast": fast_tables,
    "reference": reference_tables,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--reference", type=Path, help="the folder in which experiments are packed")
    given = parser.parse_args()
    for stage, tables in STAGES.items():
        rows = Results(given.results / f"{stage}.jsonl").rows
        if stage == reference.STAGE:
            rows |= _rates(given.results)
        if rows:
            print("\n".join(tables(rows)))
    if given.reference:
        for folder in pack_reference(given.results, given.reference):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"\n{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
