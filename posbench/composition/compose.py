"""From words to a typed, checked `Config`.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config` (so that an unknown field or a wrong
type is refused); what it composed must be plain data; then `typed` turns it into a `Config`, whose own rules check
the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from posbench.composition import rows
from posbench.composition.counts import whole_counts
from posbench.composition.explain import explained
from posbench.composition.inert import check_composed, check_inert
from posbench.composition.places import place_of
from posbench.composition.session import composed
from posbench.composition.words import Words, read
from posbench.config import Config, ConfigError


def compose(overrides: Sequence[str] = ()) -> Config:
    """A typed config from the words of the command line; `--config-dir=FOLDER` adds your own choices.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`.
    Raises: ConfigError for anything the command line would refuse.
    """
    words = read(overrides)
    return typed(composition(words), words)


def composition(words: Words) -> DictConfig:
    """What Hydra makes of the words, checked, with its own `hydra` part. Raises: ConfigError."""
    with explained(words):
        mapping = composed(words)
    check_composed(mapping, words.given())
    return mapping


def typed(mapping: DictConfig, words: Words | None = None) -> Config:
    """A composed mapping as a checked `Config`; names of rows in the scheme are replaced by the rows.

    Arguments: words, those it was composed of, for their folder of choices and for messages.
    Raises: ConfigError for an unknown field, a wrong type, a missing value or a value out of its range, and for what is
    not plain data (`posbench.composition.inert`).
    """
    content: Any = OmegaConf.to_container(mapping, resolve=False, throw_on_missing=False)
    content.pop("hydra", None)
    content["scheme"] = rows.expand(content["scheme"], words.folder if words else None)
    check_inert(content)
    with explained(words):
        resolved: Any = OmegaConf.to_container(OmegaConf.create(content), resolve=True, throw_on_missing=False)
    try:
        return checked(resolved)
    except ConfigError as error:
        key, equals, _ = str(error).partition("=")
        raise ConfigError(f"{error}{place_of(key, words) if words and equals else ''}") from error


def checked(mapping: dict[str, Any]) -> Config:
    """A mapping of plain data, such as a run folder's config.yaml, as a checked `Config`. Raises: as `typed`."""
    check_inert(mapping, resolved=True)
    counted = whole_counts(mapping)
    with explained():
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(counted)))
    assert isinstance(config, Config)
    return config
