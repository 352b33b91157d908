"""Print what schemes promise (`posbench schemes`) and their certificates as a table (`posbench verify`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.attention import KINDS
from posbench.catalogue.choices import choices, description, read_row
from posbench.config.units import count_of
from posbench.schemes import SCHEMES, Shape, build_scheme, scheme_class
from posbench.system.console import say
from posbench.verify.certificates import APART, EXACT, ROUNDINGS, SLOPE, Certificate, Check, certify
from posbench.verify.nearest import nearest_scheme
from posbench.verify.random_model import FAR, SHIFT, certificate_config

NARROW = 5  # characters of a number in the table; longer column names are hyphenated
_GROUPS = (
    "no position",
    "rotations",
    "biases on the scores",
    "added once",
    "earlier tokens",
    "alternating layers",
    "kinds of attention",
)
# Certificate -> the table column it shares with others; the column shows the worst one.
SHARED_COLUMN = {"trip": "turn", "offset": "turn", "batch": "future"}


def verify(
    words: Sequence[str] | None, console: Console, compiled: bool = False, config_dir: Path | None = None
) -> bool:
    """Test the named schemes, by default all, and print the results as a table. Return whether all hold.

    Of the user's own, also print which scheme of posbench's is the same or the nearest.

    Arguments: words, names of schemes and overrides, such as `vo_rope scheme.base=1e6`; compiled, whether to test the
    compiled code of training too; config_dir, a folder of the user's own schemes.
    Raises: ConfigError for an unknown scheme, or for options that a scheme refuses.
    """
    arguments = [word.removeprefix("scheme=") for word in words or ()]
    folders = [config_dir] if config_dir else []
    names: list[str] = []
    overrides = []
    for word in arguments:
        if "=" in word:
            overrides.append(word)
        else:
            names += word.split(",")
    overrides += [f"--config-dir={folder}" for folder in folders]
    if not names:
        names = list(choices("scheme", *folders))
    # All configurations first, so that a wrong word fails before minutes of tests.
    configs = [certificate_config(name, overrides) for name in names]
    certificates: list[Certificate] = []
    try:
        for number, config in enumerate(configs, 1):
            if len(configs) > 1:
                say(f"scheme {number} of {len(configs)}: {config.scheme.name}")
            certificates.append(certify(config, compiled))
    finally:
        # Also if a later scheme ends with an error, which is printed after the results.
        if certificates:
            _show(certificates, console)
    for name, config, certificate in zip(names, configs, certificates, strict=True):
        if name not in choices("scheme") and certificate.holds:
            console.print(nearest_scheme(config))
    return all(certificate.holds for certificate in certificates)


def _show(certificates: Sequence[Certificate], console: Console) -> None:
    console.print(tabulate(certificates))
    for line in explain(certificates):
        style = "red" if line.startswith("FAIL") else None
        console.print(line, style=style)


def tabulate(certificates: Sequence[Certificate]) -> Table:
    """Return a table of test results, one row per scheme, failures in red."""
    # No padding: it fits 80 columns if names of schemes have up to 21 characters.
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for name in ("scheme", "pos"):
        table.add_column(name, no_wrap=True)
    for name in _columns(certificates[0]):
        half = len(name) // 2
        if len(name) > NARROW:
            name = f"{name[:half]}-\n{name[half:]}"
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in certificates:
        # Shortened to the width of the column: rel, abs or unc.
        measured = _marked(row.measured[:3], row.measured == row.promised)
        cells = [_marked(str(check), check.holds) for check in _columns(row).values()]
        verdict = Text("ok", style="green")
        if row.text_only:
            verdict = Text("text", style="yellow")
        if not row.holds:
            verdict = _marked("NO", False)
        table.add_row(row.scheme, measured, *cells, verdict)
    return table


def _columns(row: Certificate) -> dict[str, Check]:
    columns: dict[str, Check] = {}
    for check in row.checks:
        name = SHARED_COLUMN.get(check.name, check.name)
        worst = columns.get(name)
        # Of tests that share a column, the worst is shown.
        if worst is None or (not check.holds, check.measured or 0.0) > (not worst.holds, worst.measured or 0.0):
            columns[name] = check
    return columns


def _marked(text: str, is_kept: bool) -> Text:
    return Text(text, style="" if is_kept else "bold red")


def explain(certificates: Sequence[Certificate]) -> Iterator[str]:
    """Yield the lines below the table: what was measured, the limits, each failure, and the verdict."""
    limits = " and ".join(f"{limit:g} {name}" for name, limit in ROUNDINGS.items())
    yield (
        "ok: relative or absolute as promised, blind to later tokens (future), the same token by token (decode), equal "
        "to its NumPy definition (fp64), with right gradients (grad) and small rounding errors (fp32, bf16)"
    )
    yield (
        f"pos comes from shift: the change of logits if positions grow by {SHIFT}, near 0 and far out, divided by the "
        f"radians that a token adds to rotations, if more than 1. At most {EXACT:g} is relative, above {APART:g} "
        f"absolute. norm to fp64: errors in float64, at most {EXACT:g}. grad: at most {SLOPE:g}. fp32, bf16: errors at "
        f"position {FAR:,} in roundings, at most {limits}; a failure names the device and the kernel or hook. "
        "See posbench/verify/certificates.py"
    )
    for row in certificates:
        if row.problem:
            yield f"FAIL {row.scheme}: {row.problem}"
            continue
        if not row.is_streaming:
            yield (
                f"{row.scheme}: not streaming: angles depend on the length of the window, so decode is how much logits "
                f"move when the window grows, which must be above {APART:g}"
            )
        if row.longest is not None:
            yield f"{row.scheme}: defined up to {row.longest:,} tokens, and certified up to there"
        if row.text_only:
            yield row.text_only
        if not row.defined:
            yield (
                f"{row.scheme}: there is no NumPy reference of this scheme, so its formula is not checked (fp64), and "
                "fp32 and bf16 are compared with its own float64 logits"
            )
        if row.score_scale > 1:
            yield (
                f"{row.scheme}: with these parameters its scores are {row.score_scale:.3g} times the usual size, and "
                "the limits of logits (shift, future, batch, decode, fp64) and grad are too"
            )
        if row.rounding:
            yield f"FAIL {row.scheme}: {row.rounding}"
        for check in row.checks:
            if not check.holds:
                side = "above" if check.at_least else "at most"
                limit = f"{side} {check.limit:.2g}"
                promise = ""
                if check.name == "shift":
                    promise = f" (promised {row.promised}, measured {row.measured})"
                path = f" ({check.worst_path})" if check.worst_path else ""
                remedy = ""
                if check.name in ROUNDINGS and row.has_gates:
                    remedy = ": its numbers of each token round, so compute and return float64 in gate (x.double())"
                yield f"FAIL {row.scheme}: {check.name} is {check}{path}, must be {limit}{promise}{remedy}"
    failed = [row.scheme for row in certificates if not row.holds]
    total = count_of(len(certificates), "scheme")
    if failed:
        yield f"{len(failed)} of {total} failed: {', '.join(failed)}"
    else:
        yield f"{total}: all checks passed"


# ---------------------------------------------------------------- posbench schemes


def list_schemes(console: Console, config_dir: Path | None = None, names: Sequence[str] = ()) -> None:
    """Print the named schemes, by default all, and the available kinds."""
    folders = [config_dir] if config_dir else []
    columns = ["scheme", "promises"]
    if names:
        columns.insert(1, "kind")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in names or choices("scheme", *folders):
        group, kind, promise, comment = _row(name, folders)
        cells = (name, kind, promise, comment) if names else (name, promise, comment)
        groups.setdefault(group, []).append(cells)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, expand=True)
    for column in columns:
        table.add_column(column, no_wrap=True)
    table.add_column("what it is", ratio=1, no_wrap=not names, overflow="ellipsis")
    known = [group for group in _GROUPS if group in groups]
    remaining = [group for group in groups if group not in _GROUPS]
    for group in [*known, *remaining]:
        table.add_row(Text(group, style="bold"))
        for texts in groups[group]:
            table.add_row(*map(Text, texts))
        table.add_section()
    console.print(table)
    if not names:
        console.print("posbench schemes NAME prints the whole description")
    console.print(f"kinds: {', '.join(SCHEMES)}")
    console.print(f"kinds of attention: {', '.join(KINDS)}")


def _row(name: str, folders: Sequence[Path]) -> tuple[str, str, str, str]:
    config = read_row(name, *folders)
    # Any sizes will do; twelve layers show every scheme of a list.
    scheme = build_scheme(config, Shape(d_model=128, num_heads=2, num_kv_heads=2, head_dim=64, num_layers=12))
    group = "kinds of attention" if config.attention else scheme.group
    text = description("scheme", name, *folders) or (inspect.getdoc(scheme_class(config.kind)) or "").partition("\n")[0]
    promise = "relative" if scheme.is_relative else "absolute"
    kind_without_folder = config.kind.rpartition("/")[2]  # of a class in the user's file
    return group, kind_without_folder, promise, text
