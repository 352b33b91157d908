"""Change the rotation settings (RoPE) in the configuration of a transformers model.

Options are named as for posbench's own rotations: `base`, `rescale`, `factor`, and `rescale.KEY` for a key of
`rope_parameters`. `full_attention.rescale=yarn` is for one type of layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import yaml
from torch import Tensor
from transformers import PreTrainedConfig

from posbench.config import ConfigError
from posbench.huggingface.positions import head_width, rotations_in
from posbench.schemes.rescaling import LENGTH, ROPE_TYPES, Rescaling, check_lists, check_values
from posbench.schemes.rotary import inverse_frequencies

_OF_RESCALINGS = {"rope_type", "type", *chain.from_iterable(ROPE_TYPES.values())}
INFINITE = 1e38  # a factor that makes a frequency 0 in float32
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_OPTIONS = ("base", "rescale", "factor")


def change_rotations(
    config: PreTrainedConfig, options: Sequence[str], length: int, trained: int, name: str
) -> dict[str, tuple[str, float]]:
    """Change the rotations in `config` in place; return {layer type: name and factor of its rescaling}.

    Arguments: options, such as `rescale=yarn`; trained, the training length in tokens; name, the model's, for errors.
    Raises: ConfigError if the model has no rotations, or for an option that they do not have.
    """
    parameters = rotations_in(config)
    text = config.get_text_config()
    per_layer = "layer_rope_theta" if getattr(text, "layer_rope_theta", None) else ""
    by_type = _options_by_type(options, parameters, name, per_layer)
    width = head_width(config) if parameters else 0  # without rotations it is not read, and may not be known
    new_settings = {}  # layer type -> its rope_parameters
    methods = {}  # layer type -> name and factor of its rescaling
    for layer_type, settings in parameters.items():
        type_options = by_type.get(layer_type, {})
        new_settings[layer_type], methods[layer_type] = _changed(settings, type_options, width, length, trained, name)
    # Without options, `config` stays as it was read. "" is the type if all layers share one rotation.
    if any(by_type.values()):
        text.rope_parameters = new_settings.get("", new_settings)
    return methods


def _options_by_type(
    options: Sequence[str], parameters: Mapping[str, Any], name: str, per_layer: str
) -> dict[str, dict[str, Any]]:
    """Return {layer type: {option: value}}, such as {"full_attention": {"rescale": "yarn"}}.

    It has an entry for each type in `parameters`; the type is "" if all layers share one rotation. Arguments:
    per_layer, the key of a base for each layer, or "". Raises: ConfigError for an option that the model does not have.
    """
    by_type: dict[str, dict[str, Any]] = {layer_type: {} for layer_type in parameters}
    for option in options:
        option_name, _, value = option.partition("=")
        layer_type, _, rest = option_name.partition(".")
        # `full_attention.rescale` is for one type; the dot in `rescale.beta_fast` comes after an option.
        is_typed = layer_type in LAYER_TYPES
        option_name = rest if is_typed else option_name
        if option_name not in _OPTIONS and not option_name.startswith("rescale."):
            raise ConfigError(
                f"--under {option} is not for {name}: a model of transformers takes rescale=, factor=, base= and "
                "rescale.KEY= (a key of its rope_parameters), also as full_attention.rescale="
            )
        if per_layer:
            raise ConfigError(f"{name} has a base for each layer ({per_layer}): --under {option} cannot change them")
        if not parameters:
            raise ConfigError(f"{name} has no rotations in its config.json, so --under {option} has nothing to change")
        if is_typed and layer_type not in parameters:
            known_types = [known_type for known_type in parameters if known_type]
            described, remedy = "one rotation for all layers", f"leave {layer_type} out"
            if known_types:
                described, remedy = ", ".join(known_types), f"{remedy}, or name one of these"
            raise ConfigError(f"--under {option}: {name} has {described}; {remedy}")
        # An option without a layer type is for all of them.
        target_types = [layer_type] if is_typed else parameters
        for target in target_types:
            by_type[target][option_name] = yaml.safe_load(value)
    return by_type


def _changed(
    parameters: Mapping[str, Any], options: Mapping[str, Any], width: int, length: int, trained: int, name: str
) -> tuple[dict[str, Any], tuple[str, float]]:
    """Return one type of layer's `rope_parameters` with these options, and the name and factor of its rescaling.

    Arguments: parameters, as they are; width, channels of a head; length, of the windows, and trained, both in tokens.
    """
    # What stays whatever the rescaling is.
    common = {key: value for key, value in parameters.items() if key not in _OF_RESCALINGS}
    # A temperature of the queries counts from the original length, whatever the rescaling.
    if "llama_4_scaling_beta" in common and LENGTH in parameters:
        common[LENGTH] = parameters[LENGTH]
    changed = dict(parameters)
    if "base" in options:
        common["rope_theta"] = changed["rope_theta"] = _base(str(options["base"]))
    own_keys = {key.removeprefix("rescale."): value for key, value in options.items() if key.startswith("rescale.")}
    channels = int(width * common.get("partial_rotary_factor", 1.0))  # rotated ones
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", *ROPE_TYPES) and {"rescale", "factor"} & {*options}:
        raise ConfigError(f"{name} has rope_type={kind}, which posbench does not rescale: leave out --under rescale=")
    # Options such as `rescale.beta_fast` change single keys of the model's own rescaling.
    if own_keys:
        if changed.get("rope_type", "default") == "default":
            raise ConfigError(f"{name} has no rescaling to change: --under rescale=yarn gives it one")
        keys = ("rope_type", *ROPE_TYPES.get(changed["rope_type"], ()))
        if wrong := [key for key in own_keys if key not in keys]:
            raise ConfigError(
                f"{name} has rope_type={changed['rope_type']}, which has no {wrong[0]} ({', '.join(keys)})"
            )
        changed |= own_keys
        check_values(changed)
    if "factor" in options and "rescale" not in options:
        raise ConfigError(f"--under factor={options['factor']} needs a rescaling for {name}: add --under rescale=yarn")
    # A whole new rescaling.
    if "rescale" in options:
        value = options["rescale"]
        # `rescale=null` takes the model's own rescaling away.
        if value is None:
            changed = {**common, "rope_type": "default"}
        else:
            rescaling = Rescaling.of(value, options.get("factor"), trained)
            check_lists(rescaling.parameters, channels)
            # A name, such as `yarn`, is a rescaling of posbench; a mapping has the parameters of transformers.
            if isinstance(value, str):
                return _rescaled(rescaling, common, channels, length)
            changed = {**common, **rescaling.parameters}
    kind = str(changed.get("rope_type", "default"))
    factor = changed.get("factor")
    method = "none" if kind == "default" else kind
    return changed, (method, 1.0 if factor is None else float(factor))


def _base(value: str) -> float:
    # YAML reads 1e6 as text.
    with suppress(ValueError):
        if 1 < float(value) < 1e15:
            return float(value)
    raise ConfigError(f"--under base={value} must be a number between 1 and 1e15")


def _rescaled(
    rescaling: Rescaling, common: dict[str, Any], channels: int, length: int
) -> tuple[dict[str, Any], tuple[str, float]]:
    """Return a rescaling of posbench as `rope_parameters`, for windows of `length` tokens, and its name and factor."""
    frequencies = inverse_frequencies(channels, common["rope_theta"])
    rescaled_frequencies = rescaling.inv_freq(frequencies, common["rope_theta"], length)
    temperature = rescaling.temperature(length)
    parameters = as_lists(common, frequencies, rescaled_frequencies, temperature, rescaling.parameters[LENGTH])
    return parameters, (rescaling.name, rescaling.factor_at(length))


def as_lists(
    common: Mapping[str, Any], usual: Tensor, frequencies: Tensor, temperature: float, positions_length: int
) -> dict[str, Any]:
    """Return any frequencies as `rope_parameters` of the type longrope (LongRoPE, arXiv 2402.13753).

    Arguments: common, `rope_theta` and `partial_rotary_factor`; usual, the frequencies that follow from these; both
    are [channel pairs].
    """
    # transformers lacks some rescalings (`ntk`, the ramp of `yarn` by turns), and learned frequencies. The factors of
    # "longrope" divide the frequencies one by one, so all mean the same as for posbench's decoder.
    factors = [min(factor, INFINITE) for factor in (usual / frequencies).tolist()]
    return {
        **common,
        "rope_type": "longrope",
        "short_factor": factors,  # up to the training length
        "long_factor": factors,  # and beyond
        "factor": 1.0,
        "attention_factor": temperature**0.5,  # multiplies q and k
        LENGTH: positions_length,
    }


def is_rescaled(config: PreTrainedConfig) -> bool:
    """Return whether any of the rotations has a rescaling."""
    return any(parameters.get("rope_type", "default") != "default" for parameters in rotations_in(config).values())


def is_dynamic(config: PreTrainedConfig) -> bool:
    """Return whether the frequencies depend on the length of the input, so that a cache of keys is not exact."""
    for parameters in rotations_in(config).values():
        kind = parameters.get("rope_type")
        # `longrope` has one list of factors up to the training length and one beyond.
        if kind == "dynamic" or (kind == "longrope" and parameters["short_factor"] != parameters["long_factor"]):
            return True
    return False
