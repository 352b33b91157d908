"""Build the position scheme of every layer from its YAML in `conf/scheme`, sharing parameters between layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
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
from posbench.schemes.entries import Entry, members_of, parts_of, schemes_in, with_members
from posbench.schemes.rescaling import check_lists
from posbench.schemes.rotary import Rotary

FULL_ATTENTION = "full_attention"  # the members of a scheme that have no window, as transformers calls such layers
WINDOW = "window"  # an option of every scheme: see `Scheme.window`

_OURS = classes_in("posbench.schemes", Scheme)
SCHEMES: Classes[Scheme] = with_packages({"nope": Scheme, **_OURS}, "posbench.schemes")


def scheme_class(kind: str) -> type[Scheme]:
    """Return the scheme class that `kind` names: a registered name, or `my_scheme.py:Faded`.

    Raises: ConfigError for an unknown kind, and for an error in the file.
    """
    cls = class_named(kind, SCHEMES, "scheme.kind", Scheme) if parse_class_path(kind) is None else load(kind, Scheme)
    check_hooks(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__ for the class's
    return cls


class Layers(JointProperties, nn.Module):
    """The position schemes of all layers of a decoder, and their joint properties.

    `shared_with[n]` is the first layer with the scheme of layer `n`.
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
        """Return the scheme whose `embed` the decoder calls on the token embeddings."""
        return self[0]

    @property
    def shape(self) -> Shape:
        """Return the sizes of the decoder."""
        return self.first.shape

    @property
    def group(self) -> str:
        """Return the heading in `posbench schemes`, "alternating layers" if the layers differ."""
        return self.first.group if len(set(self.shared_with)) == 1 else "alternating layers"


def build_scheme(config: SchemeConfig, shape: Shape, seed: int = 0) -> Layers:
    """Build the scheme that `config` describes, for all layers of a decoder of `shape`.

    Arguments: seed, for random numbers that constructors draw.
    Raises: ConfigError for an unknown kind, an unknown or missing option, a value the scheme refuses, a scheme that
    adds to the token embeddings in only some layers, and a scheme that cannot be part of a list or combination.
    """
    for entry in _alternatives(config):
        _check_members(config, entry)
    builder = _Builder(shape, seed)
    entries = layer_entries(config, shape.num_layers)
    keys = [_key(entry) for entry in entries]  # equal for layers with equal configurations
    schemes = [builder.build(entry, n) for n, entry in enumerate(entries)]
    layers = Layers(schemes, entries, [keys.index(key) for key in keys])
    # Token embeddings exist once, before layer 0, so no layer can have its own addition to them.
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


def _alternatives(config: SchemeConfig) -> list[SchemeConfig]:
    """Return the schemes that alternate by layer: those in the list `layers`, or else `config` alone.

    Raises: ConfigError for an unknown option, and for a list in the list.
    """
    if SCHEMES.get(config.kind) is not Interleaved:
        return [config]
    check_options("scheme", config.kind, Interleaved, config.options)
    members = []
    for member in _members(config):
        if SCHEMES.get(member.kind) is Interleaved:
            raise ConfigError(
                f"scheme.layers of {config.name} holds {member.name}, which is itself a list of layers: write its "
                "schemes into the list"
            )
        # A member without a kind of attention has the list's.
        members.append(replace(member, attention=member.attention or config.attention))
    return members


def _check_members(config: SchemeConfig, entry: SchemeConfig) -> None:
    """Raise ConfigError if a scheme combined in `entry`, one layer's scheme in `config`, cannot be part of it.

    One layer has one kind of attention, and only layers can alternate.
    """
    for part in parts_of(entry.options):
        member = SchemeConfig.from_mapping(dict(part))
        # {} means that the member leaves the kind of attention to `entry`.
        if member.attention not in ({}, entry.attention):
            raise ConfigError(
                f"scheme={config.name} holds {member.name}, whose attention is {dict(member.attention)}; the schemes "
                f"of one layer have one kind of attention: set attention beside `of` in {entry.name}, or use a member "
                "without it"
            )
        if SCHEMES.get(member.kind) is Interleaved:
            raise ConfigError(
                f"scheme={entry.name} holds {member.name}, which differs from layer to layer: combine schemes inside "
                "`layers`, such as layers: [{name: both, kind: combined, of: [qk_rope, alibi]}, nope]"
            )


class _Builder:
    """Builder of the schemes of one decoder's layers; layers with equal configurations share parameters."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self.first: dict[str, Scheme] = {}  # first scheme built for each `_key`

    def build(self, entry: SchemeConfig, n: int) -> Scheme:
        """Return the scheme of layer `n`, new or shared with an earlier layer."""
        cls = scheme_class(entry.kind)
        values = dict(entry.options)
        # `window` is an option of every scheme: the constructor gets it only if the class declares it.
        window = None if WINDOW in option_names(cls) else values.pop(WINDOW, None)
        check_options("scheme", entry.kind, cls, values)
        options = {name: self._with_members(value, n, entry.attention) for name, value in values.items()}
        first = self.first.get(_key(entry))
        if first is not None and not cls.per_layer and not _differ(first, options):
            # Without parameters of its own, a layer reuses the object, which then prepares positions once.
            return first
        with torch.random.fork_rng(devices=[]), _default_dtype(torch.float64):
            # Drawn in float64 and rounded once, because float32 draws differ in the last bits between types of CPU.
            torch.manual_seed(seed_of(self.seed, f"{entry.kind}/{n}"))
            scheme = cls(replace(self.shape, attention=_kind_of_attention(entry)), **options).float()
        # Checked here, because subclasses of Rotary set their width after its constructor.
        if isinstance(scheme, Rotary) and scheme.rescaling is not None:
            check_lists(scheme.rescaling.parameters, scheme.width)
        if window is not None:
            scheme.window = require_integer(WINDOW, window, 1, "tokens that a query sees")
        # Share every parameter with the first such layer, except what is per layer or belongs to a member scheme.
        if first is None:
            self.first[_key(entry)] = scheme
        elif cls.per_layer is not True:
            # Members come from `self.build` too, so they share their own parameters.
            members = [name + "." for name, part in scheme.named_modules() if name and isinstance(part, Scheme)]
            for name, parameter in first.named_parameters():
                # `per_layer` is False, or the names of the parameters that each layer has for itself.
                if name.partition(".")[0] not in (cls.per_layer or ()) and not name.startswith(tuple(members)):
                    module, _, attribute = name.rpartition(".")
                    scheme.get_submodule(module).register_parameter(attribute, parameter)
        return scheme

    def _with_members(self, option: Any, n: int, attention: dict[str, Any]) -> Any:
        """Return the list of schemes `option` built for layer `n`; any other option as it is."""
        entries = [
            replace(SchemeConfig.from_mapping(dict(member)), attention=attention) for member in schemes_in(option)
        ]
        # Equal configurations give one scheme.
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
    """Return an integer below 2 ** 56 that depends only on `seed` and `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def _differ(first: Scheme, options: Mapping[str, Any]) -> bool:
    """Return True if `options` hold a member scheme that `first` lacks: one with parameters for each layer."""
    members = {member for value in options.values() if isinstance(value, list) for member in value}
    return any(isinstance(member, Scheme) and member not in first.modules() for member in members)


def layer_entries(config: SchemeConfig, num_layers: int) -> list[SchemeConfig]:
    """Return the configuration of each layer's scheme and attention.

    Raises: ConfigError for an empty list or an unknown option.
    """
    members = _alternatives(config)
    if not members:
        raise ConfigError("scheme.layers must be a list of schemes, such as scheme.layers=[qk_rope,nope]")
    # Schemes in a list alternate: layer n has number n modulo their count.
    return [members[n % len(members)] for n in range(num_layers)]


def _kind_of_attention(entry: SchemeConfig) -> str:
    return str(entry.attention.get("kind", "softmax"))


def _members(entry: SchemeConfig) -> list[SchemeConfig]:
    return [SchemeConfig.from_mapping(dict(member)) for member in members_of(entry.options)]


def _key(entry: SchemeConfig) -> str:
    """Return a text that is equal for layers with equal schemes, whatever the names of their YAML files."""
    attention = _kind_of_attention(entry)
    return json.dumps({"kind": entry.kind, "attention": attention, **entry.options}, sort_keys=True, default=str)


def with_options(entry: Entry, words: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a scheme with changed options, such as `["rescale=yarn", "factor=4"]`. See `with_option`."""
    from omegaconf import OmegaConf

    scheme = dict(entry)
    # A factor after the rescaling it is for.
    for word in sorted(words, key=lambda word: "factor=" in word):
        name = word.partition("=")[0]
        scheme = with_option(scheme, name, OmegaConf.select(OmegaConf.from_dotlist([word]), name))
    return scheme


def with_option(entry: Entry, option: str, value: Any) -> dict[str, Any]:
    """Return a copy of a scheme with an option set, in the scheme or else in its members that have the option.

    `rescale.beta_fast` is a key of a mapping, and `full_attention.rescale` only for parts without a window. A new
    `rescale` drops the `factor` of the previous one. Raises: ConfigError if no part without a window has the option.
    """
    is_scoped = option.startswith(f"{FULL_ATTENTION}.")
    path = option.removeprefix(f"{FULL_ATTENTION}.")
    name, _, key = path.partition(".")
    is_taken = False

    def changed(part: Entry) -> dict[str, Any]:
        nonlocal is_taken
        if is_scoped and part.get(WINDOW) is not None:
            return dict(part)
        lacks_mapping = bool(key) and not isinstance(part.get(name), Mapping)
        if lacks_mapping or not has_option(part, name):
            return with_members(part, changed)
        is_taken = True
        return _with_value(part, name, key, value)

    scheme = changed(entry)
    if is_taken:
        return scheme
    if is_scoped:
        raise ConfigError(
            f"{option}={value}: no layer of {entry.get('name')} without a window takes {path}: give {path}={value} for "
            "all of its layers"
        )
    # An option that no part has is refused when the scheme is built.
    return _with_value(entry, name, key, value)


def _with_value(entry: Entry, name: str, key: str, value: Any) -> dict[str, Any]:
    changed = dict(entry)
    if name == "rescale" and not key:
        changed.pop("factor", None)
    if key:
        previous = entry.get(name)
        value = {**(previous if isinstance(previous, Mapping) else {}), key: value}
    return {**changed, name: value}


def has_option(entry: Mapping[str, Any], option: str) -> bool:
    """Return whether the class of a scheme has this option."""
    kind = str(entry.get("kind"))
    if parse_class_path(kind) is None and kind not in SCHEMES:
        return False
    cls = scheme_class(kind)
    return option in option_names(cls) or (option == WINDOW and cls is not Interleaved)
