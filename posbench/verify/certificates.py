"""Does a scheme keep its promises? The certificates as a table, and what was measured of one scheme.

A small grouped-query decoder with random weights is built under the scheme (`specimen`) and asked, in float64:

    shift   the same tokens 37 positions on: logits as before (relative, 1,024 tokens out too) or clearly others
            (absolute), as promised?
    norm    do q, k, v and o come out of their hooks as long as they went in, where the scheme promises it?
    trip    does the inverse rotation undo each rotated site?
    offset  V with O: is the output sum_j a_ij R_(j-i) v_j?
    future  do other tokens from t on leave the logits before t as they were?
    batch   two sequences, with positions of their own that leave some out: the logits of each alone? (not asked of a
            scheme whose hooks take positions [T] only: it is marked "text", and not for tasks or document masks)
    decode  token by token, with what each layer keeps of the tokens before: the logits of the whole forward pass?
            (of a scheme that says it cannot stream, as dynamic NTK: do the logits clearly move when the window grows?)
    fp64    do the logits equal those of `posbench.reference`, the definition?
    grad    are gradients of what the scheme learns, of sinks and of what makes q, k and v, on every kernel those of
            finite differences?

and in the number formats that runs use (fp32, bf16; on a GPU too where there is one), a million tokens out: on every
kernel that the kind of attention has, and piece by piece on what it caches, are the logits those of the definition, but
for roundings? Does each hook alone give what it gives in float64? Where hooks make q and k longer, scores round in
proportion, and as many more roundings are allowed. On a GPU, and with `compiled`, so are gradients of all weights, of
text, of positions of each sequence's own and of documents that are read each alone; with `compiled` blocks are compiled
too, as training has them.

A certificate that does not apply shows as "-". What `posbench.reference` does not define (a plug-in's kind) cannot be
held to a definition, and the table says so; its formats are held to its own float64 logits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from posbench.config import Config
from posbench.verify import measures
from posbench.verify.gradients import gradients
from posbench.verify.specimen import Specimen

EXACT = 1e-12  # of float64 logits of size 1
SLOPE = 1e-7  # of derivatives of size 0.01 to 10, of which finite differences were measured to leave 2e-9
APART = 1e-3  # an absolute scheme's logits move by more
# Root-mean-square errors, in roundings of the root mean square: twice what fp32 was measured to need (10 to 11.5), half
# again what bf16 was (3.2 to 3.9, by every path of every scheme).
ROUNDINGS = {"fp32": 24.0, "bf16": 6.0}


@dataclass(frozen=True)
class Property:
    """One certificate: of which specimens, by which measure, within which limit."""

    name: str
    applies: Callable[[Specimen], bool]
    measure: Callable[[Specimen], float | tuple[float, str]]  # with the worst of several paths
    limit: float
    at_least: bool = False  # must the measure exceed the limit rather than stay below it?


PROPERTIES = (
    Property("shift", lambda s: s.promises_relative, measures.shift, EXACT),
    Property("shift", lambda s: not s.promises_relative, measures.shift, APART, at_least=True),
    Property("norm", lambda s: s.wide.scheme.keeps_norms, measures.norm, EXACT),
    Property("trip", lambda s: any(map(measures.rotates, s.schemes)), measures.round_trip, EXACT),
    Property("offset", lambda s: bool(measures.turning_values(s)), measures.offset_form, EXACT),
    Property("future", lambda s: True, measures.future, EXACT),
    Property("batch", lambda s: not s.text_only, measures.batch, EXACT),
    Property("decode", lambda s: s.wide.scheme.is_streaming, measures.decode, EXACT),
    Property("decode", lambda s: not s.wide.scheme.is_streaming, measures.growth, APART, at_least=True),
    Property("fp64", lambda s: s.is_defined, measures.definition, EXACT),
    Property("grad", lambda s: True, gradients, SLOPE),
    Property("fp32", lambda s: True, lambda s: measures.roundings(s, torch.float32, 2.0**-24), ROUNDINGS["fp32"]),
    Property("bf16", lambda s: True, lambda s: measures.roundings(s, torch.bfloat16, 2.0**-8), ROUNDINGS["bf16"]),
)


@dataclass(frozen=True)
class Check:
    """One certificate of one scheme. `measured` None: it does not apply."""

    name: str
    measured: float | None
    limit: float
    at_least: bool = False
    where: str = ""  # of several paths, the one that was measured to be the worst

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return True
        return self.measured > self.limit if self.at_least else self.measured <= self.limit  # NaN holds neither way

    def __str__(self) -> str:
        if self.measured is None:
            return "-"
        if self.measured == 0:
            return "0"
        return f"{self.measured:.0e}" if self.measured < 0.01 else f"{self.measured:.2g}"


@dataclass(frozen=True)
class Certificate:
    """What was measured of one scheme, and whether it is what the scheme promises."""

    scheme: str
    promised_relative: bool
    checks: tuple[Check, ...]
    defined: bool = True  # does `posbench.reference` define it?
    is_streaming: bool = True  # as promised
    longest: int | None = None  # tokens up to which the scheme is defined; None: any length
    text_only: str = ""  # why it cannot have positions of each sequence's own; empty: it can

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def promised(self) -> str:
        """`relative` or `absolute`."""
        return "relative" if self.promised_relative else "absolute"

    @property
    def measured(self) -> str:
        """`relative`, `absolute`, or `unclear` where the drift lies between the two limits."""
        return relativity(self["shift"].measured or 0.0)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)


def relativity(drift: float) -> str:
    """What a shift's drift says of a scheme: `relative`, `absolute`, or `unclear` in between."""
    return "relative" if drift <= EXACT else "absolute" if drift > APART else "unclear"


@contextmanager
def _one_thread() -> Iterator[None]:
    """For small tensors: as fast as several on an idle machine, ten times as fast beside a run that trains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
@torch.no_grad()
def certify(config: Config, compiled: bool = False) -> Certificate:
    """Measure every certificate of `config.scheme` in a decoder of `config.model` with random weights.

    Arguments: compiled, whether compiled blocks are certified too, which takes minutes.
    Raises: ConfigError where the scheme refuses its options or the shape.
    """
    specimen = Specimen.of(config, compiled)
    checks: dict[str, Check] = {}
    for wanted in PROPERTIES:
        if not wanted.applies(specimen):
            checks.setdefault(wanted.name, Check(wanted.name, None, wanted.limit))
            continue
        result = wanted.measure(specimen)
        measured, where = result if isinstance(result, tuple) else (result, "")
        checks[wanted.name] = Check(wanted.name, measured, wanted.limit, wanted.at_least, where)
    scheme = specimen.wide.scheme
    return Certificate(
        config.scheme.name,
        specimen.promises_relative,
        tuple(checks.values()),
        specimen.is_defined,
        scheme.is_streaming,
        scheme.longest,
        specimen.text_only,
    )
