"""Build what certificates examine: a small grouped-query decoder with random weights, and its tokens."""

from __future__ import annotations

import copy
import inspect
import traceback
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posbench import reference
from posbench.attention import Softmax
from posbench.attention.kernels import Scoring, attend
from posbench.catalogue.choices import read_row
from posbench.composition.compose import compose
from posbench.config import Config, ConfigError
from posbench.model.architecture import check_positions
from posbench.model.decoder import Decoder, build_model
from posbench.schemes import Bias, Placement, Scheme
from posbench.schemes.base import evaluate_bias
from posbench.schemes.earlier import EarlierRows

SHIFT = 37  # tokens
FAR = 1 << 20  # a position at which float32 angles are off by 0.06 radians and bfloat16 positions by thousands
LENGTH = 144  # T, tokens: more than one block of the kernel `blocks`; less if the scheme is not defined that far
VOCAB = 64
USUAL_SCORE = 48.0  # all schemes of conf/scheme have smaller scores, with random weights
MODEL = (
    "model=tiny",
    "model.d_model=48",
    "model.num_heads=6",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.init_std=0.25",
)


def certificate_config(scheme: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the small decoder with a scheme of `conf/scheme`.

    Raises: ConfigError if no scheme has this name.
    """
    config = _composed(scheme, overrides)
    by_layer = config.scheme.options.get("layers")
    layers = config.model.num_layers
    if isinstance(by_layer, list):
        layers = max(layers, len(by_layer))
    # At least one layer for each scheme in a list of alternating ones.
    return replace(config, model=replace(config.model, num_layers=layers))


def _composed(scheme: str, overrides: Sequence[str]) -> Config:
    if any(word.startswith(("-", "+", "~", "scheme")) for word in overrides):
        return compose([f"scheme={scheme}", *_words(overrides)])
    # Without Hydra if possible: `_decoder` composes once for all schemes.
    return replace(_decoder(tuple(overrides)), scheme=read_row(scheme))


@cache
def _decoder(overrides: tuple[str, ...]) -> Config:
    # Composed once; callers must not change it.
    return compose(_words(overrides))


def _words(overrides: Sequence[str]) -> list[str]:
    # Other data, such as a task, may decide the length of its windows.
    has_data = any(word.startswith("data=") for word in overrides)
    return [*MODEL, *overrides] if has_data else [*MODEL, "train.context_length=128", *overrides]


def randomise(model: Decoder) -> None:
    """Set all weights to random numbers, also those of the scheme: a table of zeros would certify nothing.

    Matrices get numbers of size 1 / sqrt(fan-in), vectors their start (or 1 if that has zeros) times 1 +- 0.2.
    """
    for name, parameter in model.named_parameters():
        # NumPy's numbers are the same on every machine; torch's differ in their last bits between CPUs.
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(parameter.shape)
        start = parameter.detach().numpy().astype(np.float64)
        center = start if start.all() else 1.0  # a center of zero would give zeros
        array = center * (1 + 0.2 * normal)
        if parameter.ndim > 1:
            array = normal / parameter.shape[-1] ** 0.5
        parameter.data = torch.as_tensor(array, dtype=parameter.dtype)


def learned(model: Decoder) -> dict[str, nn.Parameter]:
    """Return the parameters of the scheme, the kind of attention, and layer 0's projection to q, k and v."""
    parameters = dict(model.scheme.named_parameters())
    for name, parameter in model.named_parameters():
        if ".attention.kind." in name or "blocks.0.attention.qkv.weight" in name:
            parameters[name] = parameter
    return parameters


def set_kernels(model: Decoder, kernels: Sequence[Any]) -> None:
    """Make attention use the function `kernels[n]` in layer n, or choose by itself if it is None."""
    for kind, kernel in zip(model.architecture.kinds, kernels, strict=True):
        kind.kernel = kernel


def random_tokens(length: int = LENGTH) -> Tensor:
    """Return random tokens below `VOCAB`, [1, T] int64, the same on every machine."""
    return torch.from_numpy(np.random.RandomState(0).randint(0, VOCAB, (1, length)).astype(np.int64))


def _largest_score(q: Tensor, k: Tensor, bias: Bias | None, scale: float, window: int | None) -> float:
    """Return the largest |q . k| scale + |bias| of a query and a key whose softmax weight is 1 % or more."""
    B, H, T, _ = q.shape
    products = scale * q @ k.repeat_interleave(H // k.shape[1], dim=1).mT
    b, h, i, j = torch.meshgrid(*map(torch.arange, (B, H, T, T)), indexing="ij")
    added = torch.zeros_like(products)
    if bias is not None:
        added = evaluate_bias(bias, b, h, i, j)
    is_hidden = (j > i) | (i - j >= (window or T))
    weights = (products + added).masked_fill(is_hidden, -torch.inf).softmax(-1)
    return float((products.abs() + added.abs())[weights >= 0.01].amax())


def rounding_in(model: Decoder, tokens: Tensor) -> str:
    """Return a sentence with the line of a scheme at which a float64 `model` rounds numbers, or ""."""
    casts = _Casts({inspect.getfile(type(part)) for part in model.scheme.modules() if isinstance(part, Scheme)})
    # Rounded numbers may meet float64 ones in the same product, which torch refuses.
    with suppress(RuntimeError), casts:
        model(tokens)
    return casts.sentence


class _Casts(TorchDispatchMode):
    """A mode that finds the first cast of float64 numbers to fewer digits by a line of `files`: see `sentence`."""

    def __init__(self, files: set[str]) -> None:
        super().__init__()
        self.files, self.sentence = files, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype")
        is_narrower = to in (torch.float32, torch.bfloat16, torch.float16)
        if func is torch.ops.aten._to_copy.default and is_narrower and args[0].dtype == torch.float64:
            # The innermost line in a scheme's file.
            for frame in reversed(traceback.extract_stack()):
                if frame.filename in self.files and not self.sentence:
                    name = str(to).removeprefix("torch.")
                    self.sentence = (
                        f"{frame.filename}, line {frame.lineno}: your hook rounds to {name}: use x.to(self.w.dtype), "
                        "with a parameter w, so that float64 stays float64"
                    )
        return func(*args, **kwargs)


@dataclass(frozen=True)
class RandomModel:
    """A small decoder with random weights under one scheme; results that tests share are computed once."""

    config: Config
    narrow: Decoder  # weights in float32, as in runs
    wide: Decoder  # the same weights in float64
    tokens: Tensor  # [1, T]
    compiled: bool = False  # whether compiled blocks are examined too

    @classmethod
    def build(cls, config: Config, compiled: bool = False) -> RandomModel:
        """Build the decoder and its tokens.

        Raises: ConfigError if the scheme refuses its options or the decoder's shape.
        """
        narrow = build_model(config, VOCAB).eval()
        randomise(narrow)
        longest = narrow.scheme.longest
        if longest is not None and longest < 2 * SHIFT:
            raise ConfigError(
                f"scheme={config.scheme.name} is defined up to {longest} tokens, too few to be certified: set "
                f"train.context_length={2 * SHIFT} or more"
            )
        length = LENGTH if longest is None else min(LENGTH, longest - SHIFT)
        return cls(config, narrow, copy.deepcopy(narrow).double(), random_tokens(length), compiled)

    @property
    def length(self) -> int:
        """Return T, the number of tokens."""
        return self.tokens.shape[1]

    @property
    def far(self) -> int:
        """Return the first token's position in tests far out: `FAR`, or less if the scheme has a longest input."""
        longest = self.wide.scheme.longest
        return FAR if longest is None else min(FAR, longest - self.length)

    @property
    def promises_relative(self) -> bool:
        return bool(self.wide.scheme.is_relative)

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of two sequences and their positions, which have gaps: int64 [2, T] each."""
        reach, random = self.wide.scheme.longest or 4 * self.length, np.random.RandomState(3)
        drawn = [np.sort(random.choice(reach - 1, self.length - 1, replace=False)) for _ in range(2)]
        positions = torch.from_numpy(np.array([[*row, reach - 1] for row in drawn]))  # both end at the same position
        return torch.cat((self.tokens, self.tokens.flip(1))), positions

    @cached_property
    def text_only(self) -> str:
        """Return why the scheme cannot have different positions in each sequence of a batch, or ""."""
        try:
            check_positions(self.wide.architecture)
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the ways to give positions that the scheme supports, of "text", "positions" and "documents"."""
        if self.text_only:
            return ("text",)
        if all(kind.takes_windows for kind in self.wide.architecture.kinds):
            return ("text", "positions", "documents")
        return ("text", "positions")

    @property
    def sensitivity(self) -> float:
        """Return how much more roundings change the logits than with softmax attention in all layers."""
        return max(kind.sensitivity for kind in self.wide.architecture.kinds)

    @cached_property
    def logits(self) -> Tensor:
        """Return the float64 decoder's logits, [T, V].

        Raises: ConfigError, with the line, if the scheme rounds numbers so that their types differ.
        """
        try:
            return self.wide(self.tokens)[0]
        except RuntimeError as error:
            if not self.rounding:
                raise
            raise ConfigError(f"{self.rounding} ({error})") from error

    @cached_property
    def rounding(self) -> str:
        """Return a sentence with the line of a scheme that rounds float64 numbers to fewer digits, or ""."""
        return rounding_in(self.wide, self.tokens)

    @cached_property
    def score_scale(self) -> float:
        """Return how much larger the scores of softmax attention are than `USUAL_SCORE`, at least 1."""
        # Rounding errors of float64 grow in proportion to the scores of keys with a visible weight.
        model = copy.deepcopy(self.wide)
        largest = [USUAL_SCORE]  # then of each layer with a softmax

        def watched(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            largest.append(_largest_score(q, k, scoring.bias, scoring.scale, scoring.window))
            return attend(q, k, v, scoring)

        kernels = [watched if isinstance(kind, Softmax) else None for kind in model.architecture.kinds]
        set_kernels(model, kernels)
        model(self.tokens)
        return max(largest) / USUAL_SCORE

    @cached_property
    def schemes(self) -> list[Scheme]:
        """Return the distinct schemes of the layers, in float64."""
        return list(dict.fromkeys(self.wide.scheme))

    @cached_property
    def is_defined(self) -> bool:
        """Return whether `posbench.reference` defines this scheme and this kind of attention."""
        try:
            reference.logits(self._weights, self.config, self.tokens[0, :1].tolist())
        except reference.NoDefinitionError:
            return False
        return True

    def defined_logits(self, offset: int) -> Tensor:
        """Return the logits by `posbench.reference`, [T, V] float64, or the float64 decoder's own without a definition.

        Arguments: offset, position of the first token.
        """
        if not self.is_defined:
            return self.wide(self.tokens, offset=offset)[0]
        return torch.from_numpy(reference.logits(self._weights, self.config, self.tokens[0].tolist(), offset))

    @cached_property
    def far_logits(self) -> Tensor:
        """Return the correct logits, [T, V] float64, with the first token at position `far`."""
        return self.defined_logits(self.far)

    @property
    def _weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy() for name, tensor in self.wide.state_dict().items()}

    @cached_property
    def heads(self) -> dict[str, Tensor]:
        """Return random queries, keys, values and outputs by name, [1, H or Hkv, T, D] float64."""
        shape = self.wide.scheme.shape
        counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "o": shape.num_heads}
        random = np.random.RandomState(1)
        heads = {}
        for site, H in counts.items():
            rows = random.standard_normal((1, H, self.length, shape.head_dim))
            heads[site] = torch.from_numpy(rows)
        return heads

    @cached_property
    def stream(self) -> Tensor:
        """Return random hidden states, like those after a layer's norm, [1, T, C] float64."""
        random = np.random.RandomState(2)
        return torch.from_numpy(random.standard_normal((1, self.length, self.config.model.d_model)))

    def hook_positions(self, scheme: Scheme, first: int = 0, device: str = "cpu") -> dict[str, Any]:
        """Return the argument `pos` of each of the scheme's methods q, k, v and o, from position `first` on."""
        at = self._at(scheme, first, device)
        dtype = next((p.dtype for p in scheme.parameters()), torch.float64)
        # Any layer's kind serves: all of them compute gates and positions alike.
        _, pos, key_pos = self.wide.architecture.kinds[0].gates_and_positions(
            self.stream.to(device, dtype), scheme, at, None
        )
        return {"q": pos, "k": key_pos, "v": key_pos, "o": pos}

    def kernels(self, model: Decoder) -> dict[str, list[Any]]:
        """Return {name: the kernel of each layer} of the ways in which `model` can compute its attention."""
        device = model.embedding.weight.device
        choices = [kind.kernels(self.schemes, self.has_bias, device) for kind in model.architecture.kinds]
        names = dict.fromkeys(chain.from_iterable(choices))
        of_layers = {}
        for name in names:
            # A layer whose kind lacks a kernel of that name has None, its default.
            of_layers[name] = [choice.get(name) for choice in choices]
        return of_layers

    @cached_property
    def has_bias(self) -> bool:
        """Return whether any layer adds a bias to its scores."""
        # Any layer's kind serves: all of them compute gates and positions alike.
        for scheme in self.schemes:
            at = self._at(scheme, 0, "cpu")
            gates, pos, key_pos = self.wide.architecture.kinds[0].gates_and_positions(self.stream, scheme, at, None)
            q = scheme.call_hook("q", self.heads["q"], pos, EarlierRows())
            k = scheme.call_hook("k", self.heads["k"], key_pos, EarlierRows())
            # A hook `bias` may return None.
            if scheme.bias(q, k, gates, at) is not None:
                return True
        return False

    def _at(self, scheme: Scheme, first: int, device: str) -> Placement:
        positions = torch.arange(first, first + self.length, device=device)
        return Placement(scheme.prepare(positions, self.length), first, first, self.length)
