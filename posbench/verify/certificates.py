"""Does a scheme keep its promises? Measure the certificates of one scheme.

A small grouped-query decoder with random weights is built under the scheme (`random_model`) and tested in float64:

    shift   do logits stay the same if all positions grow by 37 (relative; tested 1,024 tokens out too), or do they
            clearly change (absolute), as promised?
    norm    does the scheme keep the lengths of q, k, v and o, if it promises to?
    trip    does the inverse rotation undo the rotation at each rotated site?
    offset  with values and outputs rotated, is the output sum_j a_ij R_(j-i) v_j?
    future  do the logits before t stay the same if all tokens from t on change?
    batch   do two sequences with different, not consecutive positions get the same logits in one batch as separately?
            (not tested if the scheme's methods take only positions [T]: it is marked "text")
    decode  does decoding token by token, with each layer's cache, give the logits of the whole forward pass? (if the
            scheme cannot stream, as dynamic NTK: do the logits clearly move when the window grows?)
    fp64    do the logits equal those from `posbench.reference`, the definition?
    grad    do the gradients of the scheme's parameters, of sinks and of the projection to q, k and v equal finite
            differences, on every kernel?

In the number formats of runs (fp32 and bf16, also on a GPU if there is one), a million tokens out: on every kernel, and
piece by piece with its cache, do the logits equal the definition up to rounding? Does each of the methods q, k, v and o
by itself give its float64 result? On a GPU, or with `compiled`, the gradients of all weights are tested too.

If `posbench.reference` does not define a scheme or kind of attention (a plug-in's), fp32 and bf16 are compared with the
model's own float64 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from posbench.config import Config
from posbench.verify import measures
from posbench.verify.gradients import gradients
from posbench.verify.random_model import RandomModel

EXACT = 1e-12  # largest error of float64 logits of size 1
SLOPE = 1e-7  # largest error of derivatives of size 0.01 to 10; finite differences by themselves err by 2e-9
APART = 1e-3  # the logits of an absolute scheme move by more than this
# Limits of root-mean-square errors, in roundings of the root mean square. Over all paths of all schemes, fp32 was
# measured at 10 to 11.5 and has twice that; bf16 was measured at 3.2 to 3.9 and has half as much again.
ROUNDINGS = {"fp32": 24.0, "bf16": 6.0}


_LARGER_WITH_SCORES = ("shift", "offset", "future", "batch", "decode", "fp64", "grad")  # errors that grow with scores


@dataclass(frozen=True)
class CertificateSpec:
    """A test: the models it applies to, the function that measures an error, and its limit."""

    name: str
    applies: Callable[[RandomModel], bool]
    measure: Callable[[RandomModel], float | tuple[float, str]]  # the error, and for several paths the worst path
    limit: float  # for scores of usual size (`RandomModel.score_scale`)
    at_least: bool = False  # whether the error must exceed the limit rather than stay below it


SPECS = (
    CertificateSpec("shift", lambda s: s.promises_relative, measures.shift, EXACT),
    CertificateSpec("shift", lambda s: not s.promises_relative, measures.shift, APART, at_least=True),
    CertificateSpec("norm", lambda s: s.wide.scheme.keeps_norms, measures.norm, EXACT),
    CertificateSpec("trip", lambda s: any(map(measures.rotates, s.schemes)), measures.round_trip, EXACT),
    CertificateSpec("offset", lambda s: bool(measures.schemes_rotating_values(s)), measures.offset_form, EXACT),
    CertificateSpec("future", lambda s: True, measures.future, EXACT),
    CertificateSpec("batch", lambda s: not s.text_only, measures.batch, EXACT),
    CertificateSpec("decode", lambda s: s.wide.scheme.is_streaming, measures.decode, EXACT),
    CertificateSpec("decode", lambda s: not s.wide.scheme.is_streaming, measures.growth, APART, at_least=True),
    CertificateSpec("fp64", lambda s: s.is_defined, measures.definition, EXACT),
    CertificateSpec("grad", lambda s: True, gradients, SLOPE),
    CertificateSpec(
        "fp32", lambda s: True, lambda s: measures.roundings(s, torch.float32, 2.0**-24), ROUNDINGS["fp32"]
    ),
    CertificateSpec(
        "bf16", lambda s: True, lambda s: measures.roundings(s, torch.bfloat16, 2.0**-8), ROUNDINGS["bf16"]
    ),
)


@dataclass(frozen=True)
class Check:
    """The result of one test of one scheme. `measured` is None if the test does not apply."""

    name: str
    measured: float | None
    limit: float
    at_least: bool = False
    worst_path: str = ""  # the path with the largest error, if several were measured

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return True
        if self.at_least:  # both comparisons are false for NaN
            return self.measured > self.limit
        return self.measured <= self.limit

    def __str__(self) -> str:
        if self.measured is None:
            return "-"
        if self.measured == 0:
            return "0"
        return f"{self.measured:.0e}" if self.measured < 0.01 else f"{self.measured:.2g}"


@dataclass(frozen=True)
class Certificate:
    """The results of all tests of one scheme, and whether they match what it promises."""

    scheme: str
    promised_relative: bool
    checks: tuple[Check, ...]
    defined: bool = True  # whether `posbench.reference` defines it
    is_streaming: bool = True  # whether it promises that decoding with caches changes no logits
    longest: int | None = None  # tokens up to which the scheme is defined; None means any length
    text_only: str = ""  # why it does not support positions per sequence; empty if it does
    problem: str = ""  # why nothing was measured; empty if it was
    rounding: str = ""  # a sentence with the line of a hook that rounds float64 numbers; empty if none does
    has_gates: bool = False  # whether it computes numbers from the hidden states
    score_scale: float = 1.0  # how much larger than usual its scores are, and so the limits of float64 errors

    @property
    def holds(self) -> bool:
        return not self.problem and all(check.holds for check in self.checks)

    @property
    def promised(self) -> str:
        """Return what the scheme promises, `relative` or `absolute`."""
        return "relative" if self.promised_relative else "absolute"

    @property
    def measured(self) -> str:
        """Return how logits reacted when all positions grew: `relative` (equal), `absolute` (changed) or `unclear`."""
        return relativity((self["shift"].measured or 0.0) / self.score_scale)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)


def relativity(drift: float) -> str:
    """Return what a change of logits by `drift`, as all positions grow, means: relative, absolute or unclear."""
    if drift <= EXACT:
        return "relative"
    return "absolute" if drift > APART else "unclear"


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in the context: small tensors need no more, and another process may train."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
@torch.no_grad()
def certify(config: Config, compiled: bool = False) -> Certificate:
    """Run every test of `config.scheme` in a decoder of `config.model` with random weights.

    Arguments: compiled, whether to test compiled blocks too, which takes minutes.
    Raises: ConfigError if the scheme refuses its options or the decoder's shape.
    """
    random_model = RandomModel.build(config, compiled)
    if not random_model.logits.isfinite().all():
        return _certificate_of_nothing(random_model)
    checks: dict[str, Check] = {}
    for spec in SPECS:
        if not spec.applies(random_model):
            # setdefault: two specs share a name, and one of them may apply.
            checks.setdefault(spec.name, Check(spec.name, None, spec.limit))
            continue
        limit = spec.limit
        if spec.name in _LARGER_WITH_SCORES and not spec.at_least:
            # Rounding errors grow in proportion to the scores; a lower bound (`at_least`) is no rounding error.
            limit *= random_model.score_scale
        result = spec.measure(random_model)
        measured, worst_path = result if isinstance(result, tuple) else (result, "")
        checks[spec.name] = Check(spec.name, measured, limit, spec.at_least, worst_path)
    scheme = random_model.wide.scheme
    certificate = Certificate(
        config.scheme.name,
        random_model.promises_relative,
        tuple(checks.values()),
        random_model.is_defined,
        scheme.is_streaming,
        scheme.longest,
        random_model.text_only,
        has_gates=any(part.overrides("gate") for part in random_model.schemes),
        score_scale=random_model.score_scale,
    )
    if certificate.holds:
        return certificate
    # Running the model once more to find the line of a rounding is worth it only for a failure.
    return replace(certificate, rounding=random_model.rounding)


def _certificate_of_nothing(random_model: RandomModel) -> Certificate:
    # If logits are not numbers, no test means anything.
    checks = {spec.name: Check(spec.name, None, spec.limit) for spec in SPECS}
    kind = "NaN" if random_model.logits.isnan().any() else "infinite"
    return Certificate(
        random_model.config.scheme.name,
        random_model.promises_relative,
        tuple(checks.values()),
        problem=f"the logits are {kind}, with random weights and {random_model.length} tokens: look for a root or a "
        "logarithm of a number below 0, a division by 0, or a row without a visible key",
    )
