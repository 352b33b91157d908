"""Does every scheme keep its promises? The certificates, measured: what `posbench verify` prints.

A small grouped-query decoder with random weights is built under the scheme and asked, in float64:

    shift   the same tokens 37 positions on: logits as before (relative) or clearly others (absolute), as promised?
    norm    do q, k, v and o come out of their hooks as long as they went in?
    trip    does the inverse rotation undo each rotated site?
    kernel  V with O: is the output sum_j a_ij R_(j-i) v_j?
    future  do other tokens from t on leave the logits before t as they were?
    fp64    do the logits equal those of `posbench.reference`, the definition?

and in the number formats that runs use (fp32, bf16; on a GPU too where there is one), a million tokens out: by every
path that attention takes when runs train and are read (as chosen for the scheme, in query blocks, by FlexAttention
where there is a bias, piece by piece on kept keys and values), are the logits those of the definition, but for
roundings? Does each hook alone give what it gives in float64?

A certificate that does not apply shows as "-". A kind of scheme that `posbench.reference` does not define (a plug-in's)
cannot be held to a definition, and the table says so; its formats are held to its own float64 logits instead.
"""

from __future__ import annotations

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posbench.attention import ways as attention
from posbench.attention.ways import attend
from posbench.composition import choices, compose, conf_dir
from posbench.config import Config, ConfigError, SchemeConfig
from posbench.model import Attention, Decoder, build_model
from posbench.reference import definition as reference
from posbench.schemes import SCHEMES, Shape, build_scheme, rotate
from posbench.schemes.rotary import Rotary

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

SHIFT = 37  # tokens
FAR = 1 << 20  # tokens: where float32 angles are off by 0.06 radians and bfloat16 positions by thousands
LENGTH = 144  # T: more than one block of the blockwise path
VOCAB = 64
EXACT = 1e-12  # of float64 logits of size 1
APART = 1e-3  # an absolute scheme's logits move by more
PIECE = 56  # tokens: three pieces, the last one short
# Root-mean-square errors, in roundings of the root mean square: twice what fp32 was measured to need (10 to 11.5), half
# again what bf16 was (3.2 to 3.9, by every path of every scheme).
ROUNDINGS = {"fp32": 24.0, "bf16": 6.0}
FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "fp32": (torch.float32, 2.0**-24),
    "bf16": (torch.bfloat16, 2.0**-8),
}
MODEL = (
    "model=tiny",
    "model.d_model=48",
    "model.num_heads=6",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.init_std=0.25",
)


@dataclass(frozen=True)
class Check:
    """One certificate of one scheme. `measured` None: it does not apply."""

    name: str
    measured: float | None
    limit: float
    at_least: bool = False  # must the measure exceed the limit rather than stay below it?
    where: str = ""  # of several paths, the one that was measured to be the worst

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return True
        return self.measured > self.limit if self.at_least else self.measured <= self.limit  # NaN holds neither way

    def __str__(self) -> str:
        return (
            "-"
            if self.measured is None
            else "0"
            if self.measured == 0
            else f"{self.measured:.0e}"
            if self.measured < 0.01
            else f"{self.measured:.2g}"
        )


@dataclass(frozen=True)
class Certificate:
    """What was measured of one scheme, and whether it is what the scheme promises."""

    scheme: str
    promised_relative: bool
    checks: tuple[Check, ...]
    defined: bool = True  # does `posbench.reference` define it?

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
        drift = self["shift"].measured
        assert drift is not None
        return "relative" if drift <= EXACT else "absolute" if drift > APART else "unclear"

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)


def certificate_config(scheme: str, overrides: Sequence[str] = ()) -> Config:
    """The small decoder in which a scheme of `conf/scheme` is examined. Raises: ConfigError for an unknown name."""
    return compose([f"scheme={scheme}", *MODEL, *overrides])


def randomise(model: Decoder) -> None:
    """Weights of size 1 / sqrt(fan-in), norms about 1, the scheme's own too: the same numbers on every machine.

    From NumPy's frozen stream by name: torch's normal numbers differ in the last bits between kinds of CPU.
    """
    for name, parameter in model.named_parameters():
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(parameter.shape)
        array = normal / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.2 * normal
        parameter.data = torch.as_tensor(array, dtype=parameter.dtype)


def random_tokens(length: int = LENGTH) -> Tensor:
    """Tokens below `VOCAB`, [1, T] int64, the same on every machine."""
    return torch.from_numpy(np.random.RandomState(0).randint(0, VOCAB, (1, length)).astype(np.int64))


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
def certify(config: Config) -> Certificate:
    """Measure every certificate of `config.scheme` in a decoder of `config.model` with random weights.

    Raises: ConfigError where the scheme refuses its options or the shape.
    """
    trained = build_model(config, VOCAB).eval()
    randomise(trained)
    model = copy.deepcopy(trained).double()
    tokens = random_tokens()
    promised = model.scheme.is_relative
    checks = [Check("shift", shift_drift(model, tokens), EXACT if promised else APART, at_least=not promised)]
    definition = _definition(config)
    if definition is None:
        far = model(tokens, offset=FAR)[0]
        checks += [Check(name, None, EXACT) for name in ("norm", "trip", "kernel")]
        checks += [Check("future", future_drift(model, tokens), EXACT), Check("fp64", None, EXACT)]
    else:
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        near, far = (
            torch.from_numpy(reference.logits(weights, config.model, config.scheme, tokens[0].tolist(), offset))
            for offset in (SHIFT, FAR)
        )
        checks += [
            Check("norm", norm_drift(model), EXACT),
            Check("trip", round_trip_drift(model) if definition.sites else None, EXACT),
            Check("kernel", kernel_drift(model, definition) if {"v", "o"} <= set(definition.sites) else None, EXACT),
            Check("future", future_drift(model, tokens), EXACT),
            Check("fp64", distance(model(tokens, offset=SHIFT)[0], near), EXACT),
        ]
    for name, limit in ROUNDINGS.items():
        errors = dict(low_precision(trained, model, tokens, far, *FORMATS[name]))
        worst = max(errors, key=lambda path: (math.isnan(errors[path]), errors[path]))
        checks.append(Check(name, errors[worst], limit, where=worst))
    return Certificate(config.scheme.name, promised, tuple(checks), defined=definition is not None)


def _definition(config: Config) -> reference.Definition | None:
    try:
        return reference.define(config.scheme)
    except reference.NoDefinitionError:
        return None


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of an entry, in float64."""
    return float((one.double().cpu() - other.double().cpu()).abs().max())


def shift_drift(model: Decoder, tokens: Tensor) -> float:
    """How far the logits move when every position grows by `SHIFT`."""
    return distance(model(tokens), model(tokens, offset=SHIFT))


def future_drift(model: Decoder, tokens: Tensor) -> float:
    """How far logits before t move when all tokens from t on are others, for several t; infinite if those at t stay.

    And when so many follow that attention runs another way.
    """
    before = model(tokens)
    worst = distance(before, model(torch.cat((tokens, tokens.repeat(1, 4)), dim=1))[:, :LENGTH])
    for t in (1, LENGTH // 2, LENGTH - 1):
        other = torch.cat((tokens[:, :t], (tokens[:, t:] + 1) % VOCAB), dim=1)
        after = model(other)
        if torch.equal(before[:, t], after[:, t]):
            return float("inf")
        worst = max(worst, distance(before[:, :t], after[:, :t]))
    return worst


def _heads(model: Decoder) -> dict[str, Tensor]:
    """Random q, k, v, o of the shapes their hooks take, [1, H or Hkv, T, D] float64."""
    shape = model.scheme.shape
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "o": shape.num_heads}
    random = np.random.RandomState(1)
    return {site: torch.from_numpy(random.standard_normal((1, H, LENGTH, shape.head_dim))) for site, H in heads.items()}


def norm_drift(model: Decoder) -> float:
    """How far the hooks change the length of a vector, as a part of it."""
    scheme = model.scheme
    pos = scheme.prepare(torch.arange(LENGTH))
    return max(
        float((getattr(scheme, site)(x, pos).norm(dim=-1) / x.norm(dim=-1) - 1).abs().max())
        for site, x in _heads(model).items()
    )


def round_trip_drift(model: Decoder) -> float:
    """How far the inverse rotation misses the vector that a rotated site began with."""
    scheme = model.scheme
    assert isinstance(scheme, Rotary)
    positions = torch.arange(LENGTH)
    pos, angles = scheme.prepare(positions), scheme.angles(positions)
    x = _heads(model)
    back = {site: rotate(getattr(scheme, site)(x[site], pos), angles, inverse=site != "o") for site in scheme.sites}
    return max(distance(back[site], x[site]) for site in back)


def kernel_drift(model: Decoder, definition: reference.Definition) -> float:
    """How far V with O is from `sum_j a_ij R_(j-i) v_j`."""
    scheme = model.scheme
    x = _heads(model)
    pos = scheme.prepare(torch.arange(LENGTH))
    o = scheme.o(attend(scheme.q(x["q"], pos), scheme.k(x["k"], pos), scheme.v(x["v"], pos), scheme.bias), pos)[0]
    R = [reference.rotation(p, scheme.shape.head_dim, definition.base) for p in range(LENGTH)]

    def turned(site: str, h: int) -> reference.Array:
        rows = x[site][0, h].numpy()
        return np.stack([R[p] @ rows[p] for p in range(LENGTH)]) if site in definition.sites else rows

    worst = 0.0
    for h in range(scheme.shape.num_heads):
        kv = h // (scheme.shape.num_heads // scheme.shape.num_kv_heads)
        weights = reference.attention_weights(turned("q", h), turned("k", kv))
        expected = reference.offset_kernel(weights, x["v"][0, kv].numpy(), definition.base)
        worst = max(worst, distance(o[h], torch.from_numpy(expected)))
    return worst


def low_precision(
    model: Decoder, wide: Decoder, tokens: Tensor, far: Tensor, dtype: torch.dtype, rounding: float
) -> Iterator[tuple[str, float]]:
    """Each other path that can run here, and its error in roundings.

    Arguments: model, in float32; wide, the same in float64; far, the logits of the definition at `FAR`, [T, V].
    """

    def error(found: Tensor, expected: Tensor) -> float:
        difference = found.double().cpu() - expected
        return float(difference.norm() / (expected.norm() or 1.0)) / rounding

    biased = wide.scheme.has_bias
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        narrow = copy.deepcopy(model).to(device)
        narrow.compute_dtype = dtype
        paths: dict[str, tuple[Callable[..., Tensor], int | None]]
        paths = {"masked" if biased and device == "cpu" else "blocks" if biased else "fused": (attend, None)}
        paths |= {"blocks": (attention.blocks, None), "pieces": (attend, PIECE)}
        if biased and wide.scheme.shape.head_dim >= attention.FLEX_FROM:
            paths["flex"] = (attention.flex, None)
        for path, (way, narrow.piece) in paths.items():
            for layer in (module for module in narrow.modules() if isinstance(module, Attention)):
                layer.attend = way
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # that takes a minute
                yield f"{device} {path}", error(narrow(tokens.to(device), offset=FAR)[0], far)
        at = torch.arange(FAR, FAR + LENGTH)
        near, exact = narrow.scheme.prepare(at.to(device)), wide.scheme.prepare(at)
        for site, heads in _heads(wide).items():
            x = heads.to(device, dtype)
            expected = getattr(wide.scheme, site)(x.double().cpu(), exact)
            yield f"{device} hook {site}", error(getattr(narrow.scheme, site)(x, near), expected)


def verify(words: Sequence[str] | None, console: Console) -> bool:
    """Print the certificates of the schemes named (none: every file of `conf/scheme`) as a table. True when all hold.

    Arguments: words, names of schemes and overrides, such as `vo_rope scheme.base=1e6`.
    Raises: ConfigError for a name that is no scheme, or options that it refuses.
    """
    overrides = [word for word in words or () if "=" in word]
    names = [word for word in words or () if "=" not in word] or choices("scheme")
    configs = [certificate_config(name, overrides) for name in names]
    certificates: list[Certificate] = []
    crashes: dict[str, str] = {}
    for name, config in zip(names, configs, strict=True):
        try:
            certificates.append(certify(config))
        except ConfigError:
            raise
        except Exception as error:  # a scheme's own code: whatever it raises, the other rows are worth having
            crashes[name] = f"{type(error).__name__}: {error}"
    if certificates:
        console.print(tabulate(certificates))
    for line in explain(certificates, crashes):
        console.print(line, markup=False, highlight=False, style="red" if line.startswith("FAIL") else None)
    return not crashes and all(certificate.holds for certificate in certificates)


def tabulate(certificates: Sequence[Certificate]) -> Table:
    """One row a scheme, what broke in red; 80 characters wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for name in ("scheme", "promised", "measured"):
        table.add_column(name, no_wrap=True)
    for check in certificates[0].checks:
        table.add_column(check.name, justify="right", vertical="bottom")
    table.add_column("")
    for row in certificates:
        measured = Text(row.measured, style="" if row.measured == row.promised else "bold red")
        cells = [Text(str(check), style="" if check.holds else "bold red") for check in row.checks]
        verdict = Text("ok", style="green") if row.holds else Text("NO", style="bold red")
        table.add_row(row.scheme, row.promised, measured, *cells, verdict)
    return table


def explain(certificates: Sequence[Certificate], crashes: Mapping[str, str]) -> Iterator[str]:
    """What was measured and its limits, a line for each thing that broke, the verdict."""
    yield (
        f"shift: largest change of a logit when all positions grow by {SHIFT}: "
        f"at most {EXACT:g} for a relative scheme, above {APART:g} for an absolute one"
    )
    yield f"norm trip kernel future fp64: largest error in float64, at most {EXACT:g} (fp64: posbench/reference.py)"
    limits = ", ".join(f"{name} {limit:g}" for name, limit in ROUNDINGS.items())
    yield (
        f"fp32 bf16: root-mean-square error at position {FAR:,} in roundings of the format, at most {limits}, the "
        "largest of: logits by fused or masked kernels, in blocks, in pieces, by FlexAttention (a bias); each hook"
    )
    for row in certificates:
        if not row.defined:
            yield (
                f"{row.scheme}: posbench/reference.py has no definition of this kind, "
                "so norm, trip, kernel and fp64 are not measured, and fp32 and bf16 against its own float64 logits"
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
    yield f"{len(failed)} of {total} failed: {', '.join(failed)}" if failed else f"{total}: every certificate holds"


def list_schemes(console: Console, config_dir: Path | None = None) -> None:
    """Print every scheme of `conf/scheme`, and of a folder of the user's, and the kinds that a YAML file may name."""
    from omegaconf import OmegaConf
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("scheme", "kind", "promises"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is")
    own = sorted((config_dir / "scheme").glob("*.yaml")) if config_dir else []
    for path in [*(conf_dir() / "scheme" / f"{name}.yaml" for name in choices("scheme")), *own]:
        name = path.stem
        mapping = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(mapping, dict)
        config = SchemeConfig.from_mapping({str(key): value for key, value in mapping.items()})
        told = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        try:
            scheme = build_scheme(config, Shape(d_model=128, num_heads=2, num_kv_heads=2, head_dim=64))
            promise = "relative" if scheme.is_relative else "absolute"
        except ConfigError as error:  # the other rows are worth having
            promise, told = "", str(error)
        table.add_row(name, config.kind, promise, Text(told))
    console.print(table)
    console.print(f"kinds: {', '.join(SCHEMES)}", markup=False, highlight=False)
