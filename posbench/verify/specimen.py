"""What is examined: a small grouped-query decoder with random weights under a scheme, and the tokens it reads."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posbench import reference
from posbench.catalogue.choices import read_row
from posbench.composition.compose import compose
from posbench.config import Config, ConfigError
from posbench.model.architecture import check_positions
from posbench.model.decoder import Decoder, build_model
from posbench.schemes import Placement, Scheme

SHIFT = 37  # tokens
FAR = 1 << 20  # tokens: where float32 angles are off by 0.06 radians and bfloat16 positions by thousands
LENGTH = 144  # T: more than one block of the blockwise path; fewer where the scheme is not defined that far
VOCAB = 64
MODEL = (
    "model=tiny",
    "model.d_model=48",
    "model.num_heads=6",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.init_std=0.25",
)


def certificate_config(scheme: str, overrides: Sequence[str] = ()) -> Config:
    """The small decoder in which a scheme of `conf/scheme` is examined, with a layer at least for each of its turns.

    Raises: ConfigError for an unknown name.
    """
    config = _composed(scheme, overrides)
    turns = config.scheme.options.get("layers")
    layers = max(config.model.num_layers, len(turns) if isinstance(turns, list) else 0)
    return replace(config, model=replace(config.model, num_layers=layers))


def _composed(scheme: str, overrides: Sequence[str]) -> Config:
    if any(word.startswith(("-", "+", "~", "scheme")) for word in overrides):
        return compose([f"scheme={scheme}", *MODEL, *overrides])
    return replace(_decoder(tuple(overrides)), scheme=read_row(scheme))


@cache
def _decoder(overrides: tuple[str, ...]) -> Config:
    """The small decoder, composed once for all schemes. Not to be changed."""
    return compose([*MODEL, *overrides])


def randomise(model: Decoder) -> None:
    """Weights of size 1 / sqrt(fan-in), vectors about where they start, or about 1: the same numbers on every machine.

    What a scheme learns is drawn too: a table of zeros would certify nothing. From NumPy's frozen stream by name:
    torch's normal numbers differ in the last bits between kinds of CPU.
    """
    for name, parameter in model.named_parameters():
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(parameter.shape)
        start = parameter.detach().numpy().astype(np.float64)
        about = start if start.all() else 1.0  # 1 for norms; a zero would be drawn as a zero
        array = normal / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else about * (1 + 0.2 * normal)
        parameter.data = torch.as_tensor(array, dtype=parameter.dtype)


def learned(model: Decoder) -> dict[str, nn.Parameter]:
    """What the scheme and the kind of attention learn of their own, and the first layer's projection, by name."""
    ours = (".attention.kind.", "blocks.0.attention.qkv.weight")
    of_kinds = {name: p for name, p in model.named_parameters() if any(part in name for part in ours)}
    return {**dict(model.scheme.named_parameters()), **of_kinds}


def set_kernel(model: Decoder, kernel: Any) -> None:
    """Have attention run on this kernel in every layer; None: on the one it would choose."""
    for kind in model.architecture.kinds:
        kind.kernel = kernel


def random_tokens(length: int = LENGTH) -> Tensor:
    """Tokens below `VOCAB`, [1, T] int64, the same on every machine."""
    return torch.from_numpy(np.random.RandomState(0).randint(0, VOCAB, (1, length)).astype(np.int64))


@dataclass(frozen=True)
class Specimen:
    """A scheme in its decoder. What several certificates need is computed once."""

    config: Config
    narrow: Decoder  # weights in float32, as runs have them
    wide: Decoder  # the same weights in float64
    tokens: Tensor  # [1, T]
    compiled: bool = False  # are compiled blocks examined too?

    @classmethod
    def of(cls, config: Config, compiled: bool = False) -> Specimen:
        """With random weights. Raises: ConfigError where the scheme refuses its options or the shape."""
        narrow = build_model(config, VOCAB).eval()
        randomise(narrow)
        longest = narrow.scheme.longest
        if longest is not None and longest < 2 * SHIFT:
            raise ConfigError(
                f"scheme={config.scheme.name} is defined up to {longest} tokens, too few to be certified: give "
                f"train.context_length={2 * SHIFT} or more"
            )
        length = LENGTH if longest is None else min(LENGTH, longest - SHIFT)
        return cls(config, narrow, copy.deepcopy(narrow).double(), random_tokens(length), compiled)

    @property
    def length(self) -> int:
        """T, tokens."""
        return self.tokens.shape[1]

    @property
    def far(self) -> int:
        """`FAR`, or as far out as the tokens fit in where the scheme is not defined there."""
        longest = self.wide.scheme.longest
        return FAR if longest is None else min(FAR, longest - self.length)

    @property
    def promises_relative(self) -> bool:
        return bool(self.wide.scheme.is_relative)

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Two sequences and positions of their own, which leave some out: [2, T] int64 both."""
        reach, random = self.wide.scheme.longest or 4 * self.length, np.random.RandomState(3)
        drawn = [np.sort(random.choice(reach - 1, self.length - 1, replace=False)) for _ in range(2)]
        positions = torch.from_numpy(np.array([[*row, reach - 1] for row in drawn]))  # both reach as far
        return torch.cat((self.tokens, self.tokens.flip(1))), positions

    @cached_property
    def text_only(self) -> str:
        """Why the scheme cannot have positions of each sequence's own; empty if it can."""
        try:
            check_positions(self.wide.architecture)
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def settings(self) -> tuple[str, ...]:
        """How positions may come: counted (text), each sequence's own (positions), counted in each document."""
        if self.text_only:
            return ("text",)
        return ("text", "positions", *(["documents"] if self.wide.architecture.kinds[0].takes_windows else []))

    @cached_property
    def schemes(self) -> list[Scheme]:
        """The distinct schemes of the layers, in float64."""
        return list(dict.fromkeys(self.wide.scheme))

    @cached_property
    def is_defined(self) -> bool:
        """Whether `posbench.reference` defines this scheme and this kind of attention."""
        try:
            reference.logits(self._weights, self.config, self.tokens[0, :1].tolist())
        except reference.NoDefinitionError:
            return False
        return True

    def defined_logits(self, offset: int) -> Tensor:
        """Of the definition, [T, V] float64; of the decoder itself in float64 where there is none."""
        if not self.is_defined:
            return self.wide(self.tokens, offset=offset)[0]
        return torch.from_numpy(reference.logits(self._weights, self.config, self.tokens[0].tolist(), offset))

    @cached_property
    def far_logits(self) -> Tensor:
        """`defined_logits` at `far`."""
        return self.defined_logits(self.far)

    @property
    def _weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy() for name, tensor in self.wide.state_dict().items()}

    @cached_property
    def heads(self) -> dict[str, Tensor]:
        """Random q, k, v, o of the shapes their hooks take, [1, H or Hkv, T, D] float64."""
        shape = self.wide.scheme.shape
        counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "o": shape.num_heads}
        random = np.random.RandomState(1)
        return {
            site: torch.from_numpy(random.standard_normal((1, H, self.length, shape.head_dim)))
            for site, H in counts.items()
        }

    @cached_property
    def stream(self) -> Tensor:
        """A random stream behind a norm, [1, T, C] float64."""
        random = np.random.RandomState(2)
        return torch.from_numpy(random.standard_normal((1, self.length, self.config.model.d_model)))

    def places(self, scheme: Scheme, first: int = 0, device: str = "cpu") -> dict[str, Any]:
        """What the hooks q, k, v and o of a scheme get as `pos`, from the position `first` on."""
        at = self._at(scheme, first, device)
        dtype = next((p.dtype for p in scheme.parameters()), torch.float64)
        _, pos, of_keys = self.wide.architecture.kinds[0].placed(self.stream.to(device, dtype), scheme, at, None)
        return {"q": pos, "k": of_keys, "v": of_keys, "o": pos}

    @cached_property
    def has_bias(self) -> bool:
        """Whether any layer adds to its scores."""
        for scheme in self.schemes:
            at = self._at(scheme, 0, "cpu")
            gates, pos, of_keys = self.wide.architecture.kinds[0].placed(self.stream, scheme, at, None)
            q, k = scheme.q(self.heads["q"], pos), scheme.k(self.heads["k"], of_keys)
            if scheme.bias(q, k, gates, at) is not None:
                return True
        return False

    def _at(self, scheme: Scheme, first: int, device: str) -> Placement:
        positions = torch.arange(first, first + self.length, device=device)
        return Placement(scheme.prepare(positions, self.length), first, first, self.length)
