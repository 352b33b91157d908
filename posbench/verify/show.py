"""`posbench verify`: the certificates of schemes as a table, with the reason of each that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.composition import choices
from posbench.config import ConfigError
from posbench.scheme_file import place_of
from posbench.verify.certificates import APART, EXACT, ROUNDINGS, SLOPE, Certificate, Check, certify
from posbench.verify.specimen import FAR, SHIFT, certificate_config

NARROW = 5  # characters of a number in the table
TOGETHER = {"trip": "turn", "offset": "turn"}  # certificates that share a column, which shows the worst of them


def verify(words: Sequence[str] | None, console: Console, compiled: bool = False) -> bool:
    """Print the certificates of the schemes named (none: every file of `conf/scheme`) as a table. True when all hold.

    Arguments: words, names of schemes and overrides, such as `vo_rope scheme.base=1e6`; compiled, whether what is
    compiled for training is certified too.
    Raises: ConfigError for a name that is no scheme, or options that it refuses.
    """
    overrides = [word for word in words or () if "=" in word]
    names = [word for word in words or () if "=" not in word] or choices("scheme")
    configs = [certificate_config(name, overrides) for name in names]
    certificates: list[Certificate] = []
    crashes: dict[str, str] = {}
    for name, config in zip(names, configs, strict=True):
        try:
            certificates.append(certify(config, compiled))
        except Exception as error:  # a scheme's own code: whatever it raises, the other rows are worth having
            if isinstance(error, ConfigError) or os.environ.get("POSBENCH_TRACEBACK", "0") not in ("", "0"):
                raise
            crashes[name] = f"{place_of(error)}{type(error).__name__}: {error}"
    if certificates:
        console.print(tabulate(certificates))
    for line in explain(certificates, crashes):
        console.print(line, style="red" if line.startswith("FAIL") else None)
    return not crashes and all(certificate.holds for certificate in certificates)


def tabulate(certificates: Sequence[Certificate]) -> Table:
    """One row a scheme, what broke in red; 80 characters wide with names of up to 21."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for name in ("scheme", "pos"):
        table.add_column(name, no_wrap=True)
    for name in _columns(certificates[0]):
        half = len(name) // 2
        narrow = f"{name[:half]}-\n{name[half:]}" if len(name) > NARROW else name
        table.add_column(narrow, justify="right", no_wrap=True)
    table.add_column("")
    for row in certificates:
        measured = Text(row.measured[:3], style="" if row.measured == row.promised else "bold red")
        cells = [Text(str(check), style="" if check.holds else "bold red") for check in _columns(row).values()]
        verdict = Text("ok", style="green") if row.holds else Text("NO", style="bold red")
        table.add_row(row.scheme, measured, *cells, verdict)
    return table


def _columns(row: Certificate) -> dict[str, Check]:
    """The check that each column shows: the one furthest beyond its limit where several share it."""
    columns: dict[str, Check] = {}
    for check in row.checks:
        name = TOGETHER.get(check.name, check.name)
        columns[name] = max(columns.get(name, check), check, key=_badness)
    return columns


def _badness(check: Check) -> tuple[bool, float]:
    return not check.holds, -1.0 if check.measured is None else check.measured


def explain(certificates: Sequence[Certificate], crashes: Mapping[str, str]) -> Iterator[str]:
    """What was measured and its limits, a line for each thing that broke, the verdict."""
    yield "pos: relative (rel) or absolute (abs), by the measured shift"
    yield (
        f"shift: largest change of a logit when all positions grow by {SHIFT}: "
        f"at most {EXACT:g} for a relative scheme, above {APART:g} for an absolute one"
    )
    yield (
        f"norm turn future decode fp64: largest error in float64, at most {EXACT:g} (turn: "
        "trip, a rotation undone, and offset, V with O; fp64: posbench/reference)"
    )
    yield f"grad: gradient of the scheme's parameters, checked numerically: error at most {SLOPE:g}"
    limits = ", ".join(f"{limit:g} {name}" for name, limit in ROUNDINGS.items())
    yield (
        f"fp32 bf16: rounding error (root mean square) at position {FAR:,}, in units of the format's precision (limit: "
        f"{limits}). The largest of every kernel, of reading in pieces and of each hook alone; on a GPU or "
        "with --compiled also gradients of all weights, with --compiled also compiled blocks. Where hooks make q and k "
        "longer, it is divided by how much"
    )
    for row in certificates:
        if not row.is_streaming:
            yield (
                f"{row.scheme}: not streaming: angles follow the length of the window, so decode is how far logits "
                f"move when it grows, which must be above {APART:g}"
            )
        if row.longest is not None:
            yield f"{row.scheme}: defined up to {row.longest:,} tokens, and certified within them"
        if not row.defined:
            yield (
                f"{row.scheme}: there is no NumPy reference of this scheme, so its formula is not checked (fp64), and "
                "fp32 and bf16 are compared with its own float64 logits"
            )
        for check in row.checks:
            if not check.holds:
                limit = f"{'above' if check.at_least else 'at most'} {check.limit:g}"
                promise = f" (promised {row.promised}, measured {row.measured})" if check.name == "shift" else ""
                where = f" ({check.where})" if check.where else ""
                yield f"FAIL {row.scheme}: {check.name} is {check}{where}, must be {limit}{promise}"
    for name, message in crashes.items():
        yield f"FAIL {name}: {message}"
    failed = [row.scheme for row in certificates if not row.holds] + list(crashes)
    total = f"{len(certificates) + len(crashes)} scheme{'s' if len(certificates) + len(crashes) > 1 else ''}"
    yield f"{len(failed)} of {total} failed: {', '.join(failed)}" if failed else f"{total}: all checks passed"
