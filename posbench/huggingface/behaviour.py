"""Check by behaviour what `read_positions` says about a model of transformers, on a tiny model with random weights.

Every layer is given the same made-up input, so that layers are seen one by one:

    one token changed     which outputs of the layer change: all later ones, those of a window, of a chunk
    all positions grow    the outputs of a layer stay: it sees differences alone
    two tokens exchanged  a layer without position gives the last token the same output
    equal tokens          queries then differ by their rotation and scale alone, so both are measured; and embeddings
                          by the positions that are added to them
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posbench.huggingface.positions import head_width, layers_of, read_positions, skeleton
from posbench.model.positions import (
    ALL,
    CHOSEN,
    CHUNK,
    CONVOLUTION,
    NOTHING,
    STATE,
    WINDOW,
    LayerPositions,
    ModelPositions,
)

T = 12  # tokens of the made-up inputs
_STRIDES = (1, 64, 1024)
_SHIFT = 37  # tokens
_MOVED = 1e-3  # share of the largest output that rounded angles may change
_POSITIONS = [n * stride for stride in _STRIDES for n in (1, 2, 3)]  # of equal tokens
_LAYERS = 8  # of a tiny model; the longest period of a pattern of layers
_ROUNDING = 1e-5  # share of the largest output: many classes have parts in float32
_MOST = 200_000_000  # parameters of a tiny model
_NOTHING = 1e-12  # a smaller share counts as no change
_ANGLES = {torch.float64: 2e-3, torch.float32: 2e-3}  # transformers computes angles in float32
_COARSE = 0.05  # of angles in other number formats
_TINY = {  # size -> keys of configurations
    2: ("num_attention_heads", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"),
    4: (
        "chunk_size",
        "mamba_chunk_size",
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
        "index_n_heads",
    ),
    1: ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "mamba_n_groups", "n_groups"),
    16: ("linear_num_value_heads", "linear_num_key_heads"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"),
    64: ("intermediate_size", "ffn_dim", "n_inner", "lru_width", "mlp_hidden_size", "word_embed_proj_dim"),
    128: ("vocab_size", "vocab_size_per_layer_input"),
    5: ("sliding_window", "attention_window_size", "window_size", "sliding_window_size"),
    6: ("attention_chunk_size",),
    8: ("index_topk",),
    0: ("num_kv_shared_layers",),
}
_INNER = (  # keys of a recurrent layer's heads, of their width, and of the layer's width as a multiple of the model's
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
)


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration with small sizes: widths of heads, kinds of layers and rotations stay."""
    text: Any = config.__class__.from_dict(config.to_dict()).get_text_config()
    text.allow_global_per_layer_attribute_access = True
    heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", 0)
    width = head_width(text) if heads else 0
    kv_heads = getattr(text, "num_key_value_heads", None)
    for size, keys in _TINY.items():
        for key in keys:
            value = getattr(text, key, 0)
            # Some classes have no default for their experts.
            is_missing = value is None and "expert" in key
            if is_missing or (isinstance(value, int) and value > size):
                setattr(text, key, size)
            elif isinstance(value, list):
                setattr(text, key, [size] * len(value))
    if kv_heads:
        text.num_key_value_heads = 2 if kv_heads == heads else 1
    if width:
        text.hidden_size = width * text.num_attention_heads
    elif getattr(text, "hidden_size", 0):
        text.hidden_size = 64
    for heads_key, width_key, times in _INNER:
        if all(isinstance(getattr(text, key, None), int) for key in (heads_key, width_key, times)):
            setattr(text, heads_key, max(1, getattr(text, times) * text.hidden_size // getattr(text, width_key)))
    if isinstance(getattr(text, "mamba_d_ssm", None), int):
        text.mamba_d_ssm = text.mamba_n_heads * text.mamba_d_head
    if layers > _LAYERS:
        for key, value in text.to_dict().items():
            if isinstance(value, list) and len(value) == layers:
                setattr(text, key, value[:_LAYERS])
        text.num_hidden_layers = _LAYERS
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, key, None) is not None:
            setattr(text, key, 0)
    return text


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a tiny model of a configuration, with random weights in float64.

    Raises: ValueError if the class has sizes that are not known here, so that the model is not tiny.
    """
    config = tiny(config)
    parameters = sum(parameter.numel() for parameter in skeleton(config).parameters())
    if parameters > _MOST:
        raise ValueError(f"its smallest model has {parameters / 1e6:.0f} million parameters")
    words = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, **words)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.5 * parameter.shape[-1] ** -0.5)
                # Without this, some classes attend to one token alone.
                elif "q_norm" in name:
                    parameter.mul_(0.1)
    return model.double().eval()


@dataclass
class _Seen:
    """The outputs of a model's layers for a made-up input, and the arguments that their attention received."""

    model: PreTrainedModel
    rows: Tensor | None = None  # the input of every layer
    embedded: Tensor | None = None  # what the first layer would have been given
    outputs: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)  # [B, H, T, D]
    words: dict[int, dict[str, Any]] = field(default_factory=dict)  # other arguments of attention
    layer: int = -1  # the one that runs

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for number, layer in enumerate(layers_of(self.model)):
            handles.append(layer.register_forward_pre_hook(self._before(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._after(number)))
        usual = self.model.config._attn_implementation
        _Attention.seen = self
        # Classes without transformers' interface of attention show no queries.
        with suppress(ValueError):
            self.model.set_attn_implementation(_Attention.name)
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.set_attn_implementation(usual)
            _Attention.seen = None
            for handle in handles:
                handle.remove()

    def _before(self, number: int) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> tuple[Any, Any]:
            self.layer = number
            given = inputs[0] if inputs else words["hidden_states"]
            if self.embedded is None:
                self.embedded = given.detach()
            if self.rows is None:
                generator = torch.Generator().manual_seed(0)
                self.rows = torch.randn(1, *given.shape[1:], generator=generator).to(given)
            rows = self.rows.expand(given.shape)
            if inputs:
                return (rows, *inputs[1:]), words
            return inputs, words | {"hidden_states": rows}

        return hook

    def _after(self, number: int) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            self.outputs[number] = (output[0] if isinstance(output, (tuple, list)) else output).detach()

        return hook


class _Attention:
    """An implementation of attention for transformers that notes what it is given, and calls the class's own."""

    name = "posbench"
    seen: _Seen | None = None

    @staticmethod
    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **words: Any) -> Any:
        seen = _Attention.seen
        assert seen is not None
        seen.queries.setdefault(seen.layer, query.detach())
        seen.words.setdefault(seen.layer, words)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask=attention_mask, **words)


ALL_ATTENTION_FUNCTIONS.register(_Attention.name, _Attention.forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(_Attention.name, eager_mask)


def contradictions(model: PreTrainedModel, table: ModelPositions) -> list[str]:
    """Return what a tiny model contradicts in a table of its positions, a sentence each."""
    found = []
    usual = _run(model, 1)
    if usual.rows is None or usual.embedded is None:
        raise ValueError("its layers are not called one by one")
    # All tokens of these inputs are equal.
    adds_positions = bool((usual.embedded[:, 1:] - usual.embedded[:, :1]).abs().max() > _NOTHING)
    # Other schemes at the embeddings may need different tokens.
    is_known = table.embedding in ("", "learned", "sinusoidal")
    if is_known and adds_positions != bool(table.embedding):
        says = table.embedding or "no"
        found.append(f"{says} positions are said to be added to the embeddings, and equal tokens contradict it")
    # Row j + 1 of the batch has another token at place j.
    changed = usual.rows.repeat(T + 1, *[1] * (usual.rows.ndim - 1))
    other = torch.randn(usual.rows.shape, generator=torch.Generator().manual_seed(1)).to(changed)
    for place in range(T):
        changed[place + 1, place] = other[0, place]
    after_change = _run(model, T + 1, changed)
    exchanged = usual.rows.clone()
    exchanged[:, [T - 3, T - 2]] = usual.rows[:, [T - 2, T - 3]]
    after_exchange = _run(model, 1, exchanged)
    for number, layer in enumerate(table.layers):
        outputs = after_change.outputs[number].flatten(2)
        changes = (outputs[1:] - outputs[:1]).abs().amax(-1).T / outputs.abs().max()  # [t, j]
        if wrong := _wrong_reach(layer, changes):
            found.append(f"layer {number} is said to {layer.sentence}, and {wrong}")
        last = usual.outputs[number][0, -1], after_exchange.outputs[number][0, -1]
        uses_order = bool((last[0] - last[1]).abs().max() > _ROUNDING * last[0].abs().max())
        if layer.sees in (ALL, WINDOW, CHUNK) and uses_order not in _expected_order(layer):
            says = "differs" if uses_order else "is the same"
            found.append(
                f"layer {number} is said to {layer.sentence}, and its output {says} if two tokens are exchanged"
            )
        if (words := after_change.words.get(number)) is not None:
            found += _wrong_words(number, layer, words)
            if layer.sees == STATE:
                found.append(f"layer {number} is said to {layer.sentence}, and its class calls attention")
    return found


def _run(model: PreTrainedModel, batch: int, rows: Tensor | None = None, positions: Tensor | None = None) -> _Seen:
    length = T if positions is None else positions.shape[1]
    tokens = torch.full((batch, length), 2, device=model.device)
    words = {} if positions is None else {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    seen = _Seen(model, rows)
    with seen.watching():
        model(input_ids=tokens, use_cache=False, **words)
    return seen


def _wrong_reach(layer: LayerPositions, changes: Tensor) -> str:
    """Return how a layer's output depends on other tokens than its description says, or "".

    Arguments: changes, [t, j] how much the output at t changes if token j does, as a share.
    """
    t = torch.arange(T)[:, None]
    j = torch.arange(T)[None]
    earlier = j <= t
    width = layer.width or T
    expected = {
        WINDOW: earlier & (t - j < width),
        CONVOLUTION: earlier & (t - j < width),
        CHUNK: earlier & (t // width == j // width),
        NOTHING: t == j,
    }.get(layer.sees, earlier)
    # A state forgets, and chosen tokens are chosen by content, so these may read less.
    needed = expected
    if layer.sees in (STATE, CHOSEN) or layer.has_state:
        needed = t - j == 1
    if (wrong := (changes > _ROUNDING) & ~expected).any():
        return f"its output {wrong.nonzero()[-1, 0]} depends on token {wrong.nonzero()[-1, 1]}"
    if (wrong := (changes < _NOTHING) & needed).any():
        return f"its output {wrong.nonzero()[-1, 0]} does not depend on token {wrong.nonzero()[-1, 1]}"
    return ""


def _expected_order(layer: LayerPositions) -> tuple[bool, ...]:
    """Return what an exchange of two tokens may do to a layer's last output."""
    # Only keys and values tell tokens apart by their place: rotated queries or outputs alone do not.
    turns = layer.rotation is not None and bool(set(layer.rotation.sites) & {"k", "v"})
    if turns or layer.other == "ALiBi" or layer.has_state:
        return (True,)
    # Other schemes may do nothing before they are trained.
    return (True, False) if layer.other else (False,)


def _wrong_words(number: int, layer: LayerPositions, words: dict[str, Any]) -> list[str]:
    found = []
    if "s_aux" in words and (words["s_aux"] is not None) != layer.has_sink:
        found.append(f"layer {number}: a sink is {'not ' if layer.has_sink else ''}reported, and its class differs")
    if "softcap" in words and words["softcap"] != layer.cap:
        found.append(f"layer {number}: its cap is {words['softcap']}, and {layer.cap} is reported")
    return found


def wrong_rotations(model: PreTrainedModel, config: PreTrainedConfig, methods: Any = None) -> list[str]:
    """Return the layers whose queries turn or grow otherwise than `read_positions` says, a sentence each.

    Equal tokens at the positions s, 2s and 3s have queries x1, x2, x3 with x1 + x3 = 2 cos(s w) x2 in each channel,
    where w is its frequency, 0 if it is not rotated. A layer whose queries are not seen is left out.
    """
    table = read_positions(model, config, _POSITIONS[-1] + 1, methods)
    if table.longest is not None or not any(layer.rotation for layer in table.layers):
        return []
    positions = torch.tensor([_POSITIONS], device=model.device)
    first = _run(model, 1, None, positions)
    assert first.rows is not None
    equal = torch.randn((4, 1, *first.rows.shape[2:]), generator=torch.Generator().manual_seed(2)).to(first.rows)
    seen = _run(model, 4, equal.expand(-1, len(_POSITIONS), *equal.shape[2:]), positions.expand(4, -1))
    found, tolerance = [], _ANGLES.get(model.dtype, _COARSE)
    for number, queries in seen.queries.items():
        layer = table.layers[number]
        if layer.sees == CHOSEN or queries.shape[2] != len(_POSITIONS):
            continue
        norms = queries.double().norm(dim=-1, keepdim=True)
        scale = torch.ones(1) if layer.query_scale is None else layer.query_scale.at(torch.tensor(_POSITIONS))
        growth = (norms / norms[:, :, :1])[0, 0, :, 0].cpu()
        if not torch.allclose(growth, (scale / scale[0]).double().expand_as(growth), atol=tolerance):
            found.append(f"layer {number}: its queries grow by {growth[-1]:.4g} up to position {_POSITIONS[-1]}")
        unit = queries.double() / norms
        for n, stride in enumerate(_STRIDES):
            x1, x2, x3 = unit[:, :, 3 * n : 3 * n + 3].unbind(2)  # [B, H, D]
            cosines = (x2 * (x1 + x3)).sum((0, 1)) / (2 * (x2 * x2).sum((0, 1)))
            differences = cosines.cpu().sort()[0] - _cosines(layer, stride, len(cosines))
            if differences.abs().max() > tolerance:
                found.append(f"layer {number} is said to {layer.sentence}, and its queries turn otherwise")
                break
    return found


def moved_layers(model: PreTrainedModel) -> list[str]:
    """Return the layers whose output changes if all positions grow, though it should not, a sentence each."""
    table = read_positions(model, model.config, _POSITIONS[-1] + 1)
    if table.longest is not None or not any(layer.rotation for layer in table.layers):
        return []
    found, positions = [], torch.tensor([_POSITIONS])
    usual = _run(model, 1, None, positions)
    shifted = _run(model, 1, usual.rows, positions + _SHIFT)
    for number, layer in enumerate(table.layers):
        change = (shifted.outputs[number] - usual.outputs[number]).abs().max() / usual.outputs[number].abs().max()
        # What grows with the position, or with the length of the input, may change.
        grows = layer.query_scale is not None or (layer.rotation is not None and layer.rotation.method == "dynamic")
        if change > _MOVED and not grows:
            found.append(f"layer {number} is said to {layer.sentence}, and its output changes if all positions grow")
    return found


def _cosines(layer: LayerPositions, stride: int, channels: int) -> Tensor:
    """Return the cosine of the angle that each channel of a head turns by in `stride` tokens, sorted; 1 if it stays."""
    cosines = torch.ones(channels, dtype=torch.float64)
    if layer.rotation is not None:
        turned = (stride * layer.rotation.frequencies.double().cpu()).cos().repeat_interleave(2)
        cosines[: len(turned)] = turned[:channels]
    return cosines.sort()[0]
