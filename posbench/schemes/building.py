"""From a row of a table to the scheme of every layer: classes by name, members, and what layers share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posbench.catalogue.classes import Classes, check_options, class_named, classes_in, option_names, with_packages
from posbench.catalogue.own_files import load, parse_class_path
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes.base import Scheme, Shape, check_hooks, whole
from posbench.schemes.composite import Interleaved, Together

WINDOW = "window"  # an option of every row: see `Scheme.window`


_OURS = classes_in("posbench.schemes", Scheme)
SCHEMES: Classes[Scheme] = with_packages({"nope": Scheme, **_OURS}, "posbench.schemes")


def scheme_class(kind: str) -> type[Scheme]:
    """The class that a row's `kind` names: a registered one, or that of a file, `my_scheme.py:Faded`.

    Raises: ConfigError for an unknown kind, and for what is wrong in the file.
    """
    cls = class_named(kind, SCHEMES, "scheme.kind", Scheme) if parse_class_path(kind) is None else load(kind, Scheme)
    check_hooks(cls)
    return cls


class Layers(Together, nn.Module):
    """The scheme of every layer of a decoder, and what they promise together.

    Layers of one scheme are one object, unless it has parameters in each layer: then each layer has its own, with the
    other parameters in common. `rows[n]` is the first layer that has the scheme of layer `n`.
    """

    def __init__(self, schemes: list[Scheme], rows: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(schemes)
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __getitem__(self, n: int) -> Scheme:
        scheme = self.layers[n]
        assert isinstance(scheme, Scheme)
        return scheme

    @property
    def parts(self) -> list[Scheme]:
        """Those of the layers, in their order."""
        return list(self)

    @property
    def first(self) -> Scheme:
        """The scheme of the first layer, which adds to the token embeddings."""
        return self[0]

    @property
    def shape(self) -> Shape:
        """The decoder's."""
        return self.first.shape

    @property
    def group(self) -> str:
        """Its heading in `posbench schemes`."""
        return self.first.group if len(set(self.rows)) == 1 else "layers"


def build_scheme(config: SchemeConfig, shape: Shape, seed: int = 0) -> Layers:
    """The scheme that `config` names, for every layer of a decoder of `shape`.

    Arguments: seed, of what constructors draw for themselves, which is also a matter of the class and the layer.
    Raises: ConfigError for an unknown kind, an unknown or missing option, a value the scheme refuses, a scheme that
    adds to the token embeddings in some layers alone, and a member that cannot be one (`_check_members`).
    """
    _check_members(config, config)
    builder = _Builder(shape, seed)
    rows = [_row_of_layer(config, n) for n in range(shape.num_layers)]
    keys = [_key(row) for row in rows]
    layers = Layers([builder.build(row, n) for n, row in enumerate(rows)], [keys.index(key) for key in keys])
    if "embed" in layers.acts_on and len(set(keys)) > 1:
        name = next(row.name for row, scheme in zip(rows, layers, strict=True) if "embed" in scheme.acts_on)
        raise ConfigError(
            f"scheme.layers holds {name}, which adds positions to the token embeddings once, before any layer: take "
            "schemes that act inside attention"
        )
    return layers


def unreached(config: SchemeConfig, num_layers: int) -> list[str]:
    """Return the names of the interleaved schemes that none of `num_layers` layers has."""
    layers = {_key(_row_of_layer(config, n)) for n in range(num_layers)}
    return list(dict.fromkeys(row.name for row in _turns(config) if _key(row) not in layers))


def _turns(row: SchemeConfig) -> list[SchemeConfig]:
    """Return the rows that layers take by turns; `row` itself if all layers have it."""
    if not _is_interleaved(row):
        return [row]
    return [turn for member in _members(row) for turn in _turns(member)]


def _check_members(config: SchemeConfig, row: SchemeConfig) -> None:
    """Raises: ConfigError for a member with its own kind of attention, and for interleaved layers within a layer."""
    for member in _members(row):
        if member.attention not in ({}, config.attention):
            raise ConfigError(
                f"scheme={config.name} holds {member.name}, whose attention is {dict(member.attention)}; all layers "
                f"have one kind of attention: give scheme.attention to {config.name}, or take a scheme without it"
            )
        if _is_interleaved(member) and not _is_interleaved(row):
            raise ConfigError(
                f"scheme={row.name} holds {member.name}, which differs from layer to layer: combine schemes inside "
                "`layers`, such as layers: [{name: both, kind: combined, of: [qk_rope, alibi]}, nope]"
            )
        _check_members(config, member)


class _Builder:
    """Builds the schemes of one decoder, so that layers share what they should."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self.first: dict[str, Scheme] = {}  # of each row

    def build(self, row: SchemeConfig, n: int) -> Scheme:
        """The scheme of layer `n`, which has this row."""
        cls = scheme_class(row.kind)
        given = dict(row.options)
        window = None if WINDOW in option_names(cls) else given.pop(WINDOW, None)
        check_options("scheme", row.kind, cls, given)
        options = {name: self._with_members(value, n) for name, value in given.items()}
        first = self.first.get(_key(row))
        if first is not None and not cls.per_layer and not _differ(first, options):
            return first
        with torch.random.fork_rng(devices=[]), _default_dtype(torch.float64):
            # Rounded once: float32 draws differ in their last bits between kinds of CPU.
            torch.manual_seed(seed_of(self.seed, f"{row.kind}/{n}"))
            scheme = cls(self.shape, **options).float()
        if window is not None:
            scheme.window = whole(WINDOW, window, 1, "tokens that a query sees")
        if first is None:
            self.first[_key(row)] = scheme
        elif cls.per_layer is not True:
            members = [name + "." for name, part in scheme.named_modules() if name and isinstance(part, Scheme)]
            for name, parameter in first.named_parameters():
                if name.partition(".")[0] not in (cls.per_layer or ()) and not name.startswith(tuple(members)):
                    place, _, last = name.rpartition(".")
                    scheme.get_submodule(place).register_parameter(last, parameter)
        return scheme

    def _with_members(self, option: Any, n: int) -> Any:
        """The option, with schemes in place of a list of their mappings; equal ones are one scheme."""
        if not rows_in(option):
            return option
        built: dict[str, Scheme] = {}
        for member in rows_in(option):
            row = SchemeConfig.from_mapping(dict(member))
            built[_key(row)] = built.get(_key(row)) or self.build(row, n)
        return [built[_key(SchemeConfig.from_mapping(dict(member)))] for member in rows_in(option)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seed_of(seed: int, name: str) -> int:
    """A seed for one name, from that of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def _differ(first: Scheme, options: Mapping[str, Any]) -> bool:
    """Whether any member of a scheme is another one in this layer."""
    members = {member for value in options.values() if isinstance(value, list) for member in value}
    return any(isinstance(member, Scheme) and member not in first.modules() for member in members)


def _row_of_layer(row: SchemeConfig, n: int) -> SchemeConfig:
    """The row of layer `n`: of interleaved ones a member's."""
    if not _is_interleaved(row):
        return row
    check_options("scheme", row.kind, Interleaved, row.options)
    members = _members(row)
    if not members:
        raise ConfigError("scheme.layers must be a list of schemes, such as scheme.layers=[qk_rope,nope]")
    return _row_of_layer(members[n % len(members)], n)


def _is_interleaved(row: SchemeConfig) -> bool:
    return SCHEMES.get(row.kind) is Interleaved


def _members(row: SchemeConfig) -> list[SchemeConfig]:
    """Return the rows in the options of `row`."""
    return [SchemeConfig.from_mapping(dict(member)) for option in row.options.values() for member in rows_in(option)]


def _key(row: SchemeConfig) -> str:
    """What makes two rows the same scheme."""
    return json.dumps({"kind": row.kind, **row.options}, sort_keys=True, default=str)


def rows_in(option: Any) -> list[Mapping[str, Any]]:
    """The option where it is a list of schemes, none otherwise."""
    are_rows = isinstance(option, list) and all(isinstance(each, Mapping) and "kind" in each for each in option)
    return option if are_rows else []


def takes_option(row: Mapping[str, Any], option: str) -> bool:
    """Whether a scheme, in the flat form of its YAML, has the option, or one of those that it is made of has."""
    return _has(row, option) or any(takes_option(member, option) for value in row.values() for member in rows_in(value))


def with_option(row: Mapping[str, Any], option: str, value: Any) -> dict[str, Any]:
    """The row with its option set; where it has none such, those that it is made of have theirs set."""
    if _has(row, option) or not takes_option(row, option):
        return {**row, option: value}

    def changed(member: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_option(member, option, value) if takes_option(member, option) else member

    return {name: list(map(changed, rows_in(part))) if rows_in(part) else part for name, part in row.items()}


def _has(row: Mapping[str, Any], option: str) -> bool:
    kind = str(row.get("kind"))
    if parse_class_path(kind) is None and kind not in SCHEMES:
        return False
    cls = scheme_class(kind)
    return option in option_names(cls) or (option == WINDOW and cls is not Interleaved)
