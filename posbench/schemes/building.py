"""Build the position scheme of every layer from its YAML in `conf/scheme`, sharing parameters between layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from posbench.catalogue.classes import Classes, check_options, class_named, classes_in, option_names, with_packages
from posbench.catalogue.own_files import load, parse_class_path
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes.base import Scheme, Shape, check_hooks, require_integer
from posbench.schemes.composite import Interleaved, JointProperties
from posbench.schemes.rescaling import BY_WINDOW, RopeParameters
from posbench.schemes.rotary import Rotary

WINDOW = "window"  # an option of every scheme: see `Scheme.window`
FULL_ATTENTION = "full_attention"  # the members of a scheme that have no window, as transformers calls such layers

_OURS = classes_in("posbench.schemes", Scheme)
SCHEMES: Classes[Scheme] = with_packages({"nope": Scheme, **_OURS}, "posbench.schemes")


def scheme_class(kind: str) -> type[Scheme]:
    """Return the scheme class that `kind` names: a registered name, or a file and class, `my_scheme.py:Faded`.

    Raises: ConfigError for an unknown kind, and for an error in the file.
    """
    cls = class_named(kind, SCHEMES, "scheme.kind", Scheme) if parse_class_path(kind) is None else load(kind, Scheme)
    check_hooks(cls)
    return cls


class Layers(JointProperties, nn.Module):
    """The position schemes of all layers of a decoder, and the properties that all layers have together.

    Layers with the same scheme share one object. If the scheme has `per_layer` parameters, each layer has its own
    object, and only the other parameters are shared. `shared_with[n]` is the first layer with the scheme of layer `n`.
    """

    def __init__(self, schemes: list[Scheme], entries: list[SchemeConfig], shared_with: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(schemes)
        self.entries = entries  # the configuration of each layer, with its kind of attention
        self.shared_with = shared_with

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __getitem__(self, n: int) -> Scheme:
        scheme = self.layers[n]
        assert isinstance(scheme, Scheme)
        return scheme

    @property
    def parts(self) -> list[Scheme]:
        """Return the scheme of each layer, in order."""
        return list(self)

    @property
    def first(self) -> Scheme:
        """Return the scheme of the first layer, whose method `embed` the decoder calls on the token embeddings."""
        return self[0]

    @property
    def shape(self) -> Shape:
        """Return the sizes of the decoder."""
        return self.first.shape

    @property
    def group(self) -> str:
        """Return the heading for the scheme in `posbench schemes`, which is "alternating layers" if they differ."""
        return self.first.group if len(set(self.shared_with)) == 1 else "alternating layers"


def build_scheme(config: SchemeConfig, shape: Shape, seed: int = 0) -> Layers:
    """Build the scheme that `config` describes and return its modules for all layers of a decoder of `shape`.

    Arguments: seed, for random numbers that constructors draw, combined with the scheme's kind and the layer.
    Raises: ConfigError for an unknown kind, an unknown or missing option, a value the scheme refuses, a scheme that
    adds to the token embeddings in only some layers, and a scheme that cannot be part of a list or combination.
    """
    _check_members(config, config)
    builder = _Builder(shape, seed)
    entries = layer_entries(config, shape.num_layers)
    keys = [_key(entry) for entry in entries]
    schemes = [builder.build(entry, n) for n, entry in enumerate(entries)]
    layers = Layers(schemes, entries, [keys.index(key) for key in keys])
    if "embed" in layers.acts_on and len(set(keys)) > 1:
        name = next(entry.name for entry, scheme in zip(entries, layers, strict=True) if "embed" in scheme.acts_on)
        raise ConfigError(
            f"scheme.layers holds {name}, which adds positions to the token embeddings once, before any layer: use "
            f"schemes that act inside attention, or scheme={name} in all layers"
        )
    return layers


def unused_schemes(config: SchemeConfig, num_layers: int) -> list[str]:
    """Return the names in a list of alternating schemes that none of the first `num_layers` layers uses."""
    layers = {_key(entry) for entry in layer_entries(config, num_layers)}
    return list(dict.fromkeys(entry.name for entry in _alternatives(config) if _key(entry) not in layers))


def _alternatives(entry: SchemeConfig) -> list[SchemeConfig]:
    """Return the schemes that layers alternate between, or only `entry` itself if all layers have the same one.

    Arguments: entry, the configuration of a scheme.
    """
    if not _is_interleaved(entry):
        return [entry]
    return [nested for member in _layers_of(entry) for nested in _alternatives(member)]


def _check_members(config: SchemeConfig, entry: SchemeConfig) -> None:
    """Check the schemes that the scheme `entry` is made of (its members), and the members of these.

    Arguments: config, the whole scheme; entry, `config` or a part of it.
    Raises: ConfigError for a member of a combined scheme with another kind of attention than the whole, and for
    `layers` inside a combined scheme.
    """
    for member in _layers_of(entry) if _is_interleaved(entry) else _members(entry):
        if member.attention not in ({}, entry.attention) and not _is_interleaved(entry):
            raise ConfigError(
                f"scheme={config.name} holds {member.name}, whose attention is {dict(member.attention)}; the schemes "
                f"of one layer have one kind of attention: set attention beside `of` in {entry.name}, or use a member "
                "without it"
            )
        if _is_interleaved(member) and not _is_interleaved(entry):
            raise ConfigError(
                f"scheme={entry.name} holds {member.name}, which differs from layer to layer: combine schemes inside "
                "`layers`, such as layers: [{name: both, kind: combined, of: [qk_rope, alibi]}, nope]"
            )
        _check_members(config, member)


class _Builder:
    """Builder of the scheme objects of one decoder's layers; layers with equal configurations share parameters."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self.first: dict[str, Scheme] = {}  # first scheme built for each `_key`

    def build(self, entry: SchemeConfig, n: int) -> Scheme:
        """Return the scheme of layer `n`, a new object or one shared with an earlier layer.

        Arguments: entry, the configuration of the scheme.
        """
        cls = scheme_class(entry.kind)
        values = dict(entry.options)
        window = None if WINDOW in option_names(cls) else values.pop(WINDOW, None)
        check_options("scheme", entry.kind, cls, values)
        options = {name: self._with_members(value, n, entry.attention) for name, value in values.items()}
        first = self.first.get(_key(entry))
        if first is not None and not cls.per_layer and not _differ(first, options):
            return first
        with torch.random.fork_rng(devices=[]), _default_dtype(torch.float64):
            # Drawn in float64 and rounded once, because float32 draws differ in the last bits between types of CPU.
            torch.manual_seed(seed_of(self.seed, f"{entry.kind}/{n}"))
            scheme = cls(replace(self.shape, attention=_kind_of_attention(entry)), **options).float()
        if isinstance(scheme, Rotary) and isinstance(scheme.rescaling, RopeParameters):
            scheme.rescaling.check_lists(scheme.width)
        if window is not None:
            scheme.window = require_integer(WINDOW, window, 1, "tokens that a query sees")
        if first is None:
            self.first[_key(entry)] = scheme
        elif cls.per_layer is not True:
            members = [name + "." for name, part in scheme.named_modules() if name and isinstance(part, Scheme)]
            for name, parameter in first.named_parameters():
                if name.partition(".")[0] not in (cls.per_layer or ()) and not name.startswith(tuple(members)):
                    module, _, attribute = name.rpartition(".")
                    scheme.get_submodule(module).register_parameter(attribute, parameter)
        return scheme

    def _with_members(self, option: Any, n: int, attention: dict[str, Any]) -> Any:
        """Return the value of an option, or the scheme objects of layer `n` if it is a list of schemes' configurations.

        Equal configurations give one scheme. Arguments: attention, the layer's kind of attention and its options.
        """
        entries = [
            replace(SchemeConfig.from_mapping(dict(member)), attention=attention) for member in entries_in(option)
        ]
        built: dict[str, Scheme] = {}
        for entry in entries:
            built[_key(entry)] = built.get(_key(entry)) or self.build(entry, n)
        return [built[_key(entry)] for entry in entries] if entries else option


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


def seed_of(seed: int, name: str) -> int:
    """Return an integer below 2 ** 56 that depends only on a run's `seed` and on `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def _differ(first: Scheme, options: Mapping[str, Any]) -> bool:
    """Return True if a layer needs a scheme object other than `first`, because it combines schemes that `first` lacks.

    Arguments: first, the scheme object of an earlier layer with the same configuration; options, {option: value} of the
    layer's scheme, in which a list may hold scheme objects.
    """
    members = {member for value in options.values() if isinstance(value, list) for member in value}
    return any(isinstance(member, Scheme) and member not in first.modules() for member in members)


def layer_entries(config: SchemeConfig, num_layers: int) -> list[SchemeConfig]:
    """Return the configuration of each layer's scheme and attention, for a decoder of `num_layers` layers.

    A list of schemes that alternate between layers gives layer n its number n modulo their count. A scheme in the list
    without `attention` has the attention of the list. Raises: ConfigError for an empty list or an unknown option.
    """
    return [_entry_of_layer(config, n) for n in range(num_layers)]


def _entry_of_layer(entry: SchemeConfig, n: int) -> SchemeConfig:
    if not _is_interleaved(entry):
        return entry
    check_options("scheme", entry.kind, Interleaved, entry.options)
    layers = _layers_of(entry)
    if not layers:
        raise ConfigError("scheme.layers must be a list of schemes, such as scheme.layers=[qk_rope,nope]")
    return _entry_of_layer(layers[n % len(layers)], n)


def _layers_of(entry: SchemeConfig) -> list[SchemeConfig]:
    """Return the schemes in a list of alternating schemes; one without a kind of attention has the list's."""
    return [replace(member, attention=member.attention or entry.attention) for member in _members(entry)]


def _kind_of_attention(entry: SchemeConfig) -> str:
    return str(entry.attention.get("kind", "softmax"))


def _is_interleaved(entry: SchemeConfig) -> bool:
    return SCHEMES.get(entry.kind) is Interleaved


def _members(entry: SchemeConfig) -> list[SchemeConfig]:
    """Return the configurations of the schemes that `entry`, a scheme's configuration, is made of.

    The list is empty if it is not made of others.
    """
    members = [member for option in entry.options.values() for member in entries_in(option)]
    return [SchemeConfig.from_mapping(dict(member)) for member in members]


def _key(entry: SchemeConfig) -> str:
    """Return a string of a scheme's kind, options and kind of attention, which does not depend on its name."""
    attention = _kind_of_attention(entry)
    return json.dumps({"kind": entry.kind, "attention": attention, **entry.options}, sort_keys=True, default=str)


def entries_in(option: Any) -> list[Mapping[str, Any]]:
    """Return the value of an option if it is a list of schemes (mappings with a kind), otherwise an empty list."""
    is_list = isinstance(option, list) and all(isinstance(item, Mapping) and "kind" in item for item in option)
    return option if is_list else []


def takes_option(entry: Mapping[str, Any], option: str) -> bool:
    """Return True if a scheme, or a scheme that it is made of, has the option named `option`.

    Arguments: entry, the scheme as the mapping in its YAML file.
    """
    members = [member for value in entry.values() for member in entries_in(value)]
    return _has_option(entry, option) or any(takes_option(member, option) for member in members)


def with_option(entry: Mapping[str, Any], option: str, value: Any) -> dict[str, Any]:
    """Return a copy of the mapping `entry`, a scheme as in its YAML file, with `option` set to `value`.

    If the scheme is made of other schemes, and they have the option but the whole does not, it is set in each of them.
    """
    if _has_option(entry, option) or not takes_option(entry, option):
        return {**entry, option: value}

    def changed(member: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_option(member, option, value) if takes_option(member, option) else member

    return {name: list(map(changed, entries_in(part))) if entries_in(part) else part for name, part in entry.items()}


def with_option_in_full_attention(entry: Mapping[str, Any], option: str, value: Any) -> dict[str, Any]:
    """Return a copy of `entry`, a scheme as in its YAML file, with `option` set where a query sees all earlier tokens.

    These are the schemes that `entry` is made of, or itself, that have the option and no window.
    Raises: ConfigError if there are none.
    """

    def changed(part: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(part)
        for name, value_of_name in part.items():
            if members := entries_in(value_of_name):
                new[name] = [changed(member) for member in members]
        if _has_option(part, option) and part.get(WINDOW) is None:
            new[option] = value
        return new

    scheme = changed(entry)
    if scheme == entry:
        raise ConfigError(
            f"{FULL_ATTENTION}.{option}={value}: no layer of {entry.get('name')} without a window takes {option}: give "
            f"{option}={value} for all of its layers"
        )
    return scheme


def without_option(entry: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return a copy of `entry`, a scheme as in its YAML file, without `option` in it and in the schemes it is made of.

    Arguments: option, its name.
    """
    changed = {}
    for name, part in entry.items():
        members = [without_option(member, option) for member in entries_in(part)]
        if name != option:
            changed[name] = members or part
    return changed


def with_factor(entry: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a copy of `entry`, a scheme as in its YAML file, in which rescaled rotations have a fixed `factor`.

    Rotations that have a factor keep it, and so do those whose factor always follows the window.
    """
    changed = {}
    for name, part in entry.items():
        members = [with_factor(member, factor) for member in entries_in(part)]
        changed[name] = members or part
    method = entry.get("rescale")
    follows_window = not isinstance(method, str) or method in BY_WINDOW
    if not follows_window and entry.get("factor") is None:
        changed["factor"] = factor
    return changed


def _has_option(entry: Mapping[str, Any], option: str) -> bool:
    kind = str(entry.get("kind"))
    if parse_class_path(kind) is None and kind not in SCHEMES:
        return False
    cls = scheme_class(kind)
    return option in option_names(cls) or (option == WINDOW and cls is not Interleaved)
