"""The results as a table in Markdown: a row a scheme, a column for each model, number format and length."""

from __future__ import annotations

from typing import Any

from benchmarks.compile_for_gpu.cells import Cell

_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def tabulate(results: dict[Cell, dict[str, Any]]) -> str:
    """Each cell: kernels of a compiled layer forward + backward; launches of a training step, of a window evaluated."""
    columns = sorted({(cell.length, cell.dtype, cell.model) for cell in results})
    schemes = sorted({cell.scheme for cell in results})
    heads = [f"{model} {_SHORT.get(dtype, dtype)} {_tokens(length)}" for length, dtype, model in columns]
    lines = [f"| scheme | {' | '.join(heads)} |", "|---" * (1 + len(columns)) + "|"]
    for scheme in schemes:
        rows = (results.get(Cell(scheme, model, dtype, length)) for length, dtype, model in columns)
        lines.append(f"| {scheme} | {' | '.join('–' if row is None else brief(row) for row in rows)} |")
    return "\n".join(lines)


def _tokens(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def brief(row: dict[str, Any]) -> str:
    """One cell of the table: `11 + 14; 420, 310`, with **failed** for a part that was not compiled."""
    if "error" in row:
        return "**failed**"
    training, evaluation = row["training"], row["evaluation"]
    kernels = [sum(training[way][kind] for kind in ("triton", "other")) for way in ("forward", "backward")]
    step = "**failed**" if "error" in training else f"{kernels[0]} + {kernels[1]}; {training['launches']:,}"
    window = "**failed**" if "error" in evaluation else f"{evaluation['launches']:,}"
    return f"{step}, {window}"


def summary(row: dict[str, Any]) -> str:
    """One line for the person who waits."""
    if "error" in row:
        return f"FAILED, {row['error']}"
    parts = []
    for name in ("training", "evaluation"):
        part = row[name]
        graphs = ", ".join(f"{way} {part[way]['triton']} + {part[way]['other']}" for way in ("forward", "backward"))
        figures = f"{part.get('launches', 0):,} launches, {graphs} kernels, {part['shared_bytes']:,} B shared"
        parts.append(
            f"{name} "
            + (f"FAILED, {part['error']}" if "error" in part else f"{part['cpu_seconds']} s of a core, {figures}")
        )
    return "; ".join(parts)
