"""What Hydra, OmegaConf and YAML refused, in plain words: the cause, the value and the remedy in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from posbench.composition.choices import GROUPS, choices
from posbench.composition.places import place_of
from posbench.composition.session import composed
from posbench.composition.words import Words
from posbench.config import ConfigError, nearest

_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


@contextmanager
def explained(words: Words | None = None) -> Iterator[None]:
    """Raise a ConfigError in plain words in place of what is raised within; an OSError of a file stays one.

    Arguments: words, of the command: they say which options the scheme has.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Hydra's, OmegaConf's, YAML's and bare ones
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            raise
        raise ConfigError(explain(error, words or Words())) from error


def explain(error: BaseException, words: Words) -> str:
    """One line of cause, value and remedy, with the nearest valid name."""
    text = str(error) or type(error).__name__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = [name for name in error.options or choices(group) if name != "schema"]
        own = f"put your own into FOLDER/{group} and give --config-dir FOLDER"
        own = f"{words.folder / group} was searched too" if words.folder else own
        return f"{group}={name} does not exist{nearest(name, known)} (conf/{group} contains {', '.join(known)}; {own})"
    if wrong := re.search(r"Could not override '([^']+)'", text):
        return _no_setting(wrong[1], words)
    if wrong := re.search(r"Error merging override (.+)", text):
        return f"{wrong[1]} is refused: {plain(str(error.__cause__ or 'the value does not fit'))}"
    if wrong := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return several_values(wrong[1])
    if isinstance(error, OverrideParseException):
        return _no_override(str(error.override))
    cause = error.__cause__ or error.__context__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return explain(cause, words)
    key = getattr(error, "full_key", None) or ""
    if isinstance(error, MissingMandatoryValue):
        listed = ", ".join(choices(key))
        remedy = f"one of {listed}" if listed else "posbench train --cfg job shows all settings"
        return f"{key} is missing: give {key}=... ({remedy}){place_of(key.rpartition('.')[0], words)}"
    if isinstance(error, ConfigKeyError):
        return _no_setting(key, words) + place_of(key, words)
    place = place_of(key, words)
    return f"{key} is refused: {plain(text)}{place}" if place else plain(text) + (f" ({key})" if key else "")


def several_values(word: str) -> str:
    """The refusal of `seed=0,1` for one run."""
    return f"{word} contains several values: sweep over them with -m, or write a list as [1,2]"


def plain(text: str) -> str:
    """OmegaConf's words about a type in ours."""
    line = text.splitlines()[0]
    if wrong := re.search(r"Value '(.*?)' .*could not be converted to (\w+)", line):
        return f"{wrong[1]!r} is not {_TYPES.get(wrong[2], wrong[2])}"
    if wrong := re.search(r"Value '(.*?)' is not a valid bool", line):
        return f"{wrong[1]!r} is not true or false"
    if "does not support deletion" in line:
        return "a setting cannot be removed, only set: key=value"
    return "it cannot be null" if "not Optional" in line else line


def _no_override(word: str) -> str:
    """That `vo_rope` alone is not an override, with the group that has such a choice."""
    if "=" in word:
        hint = "; put a value with spaces, commas, brackets or letters beyond a-z in quotes: key='\"my value\"'"
    else:
        group = next((group for group in GROUPS if word in choices(group)), None)
        hint = f"; did you mean {group}={word}?" if group else ""
    return f"{word!r} is not an override: write key=value, such as scheme=vo_rope or train.lr=1e-3{hint}"


def _no_setting(key: str, words: Words) -> str:
    """The message for a key that does not exist, with the nearest one."""
    known = _settings(words)
    if key not in known and key in _settings(Words()):  # with the scheme of conf/config.yaml
        return f"the chosen scheme has no option {key!r} (posbench train --cfg job shows those it has)"
    return f"there is no setting {key!r}{nearest(key, known)} (posbench train --cfg job shows them all)"


def _settings(words: Words) -> list[str]:
    """Every key that can be overridden, as `group` or `group.field`; `+scheme.option` where its YAML leaves it out."""
    from posbench.schemes import SCHEMES

    chosen = words.only(word for word in words.overrides if word.startswith("scheme=") and "," not in word)
    try:
        mapping = _mapping(chosen)
        options = list(inspect.signature(SCHEMES[mapping["scheme"]["kind"]]).parameters)[1:]
    except Exception:  # what is wrong with the scheme itself is said in its turn
        mapping, options = _mapping(Words()), []
    keys = [*GROUPS, *(f"+scheme.{option}" for option in options if option not in mapping["scheme"])]
    for key, value in mapping.items():
        keys += [f"{key}.{field}" for field in value] if isinstance(value, dict) else [key]
    return keys


def _mapping(words: Words) -> dict[str, Any]:
    mapping: Any = OmegaConf.to_container(composed(words), resolve=False)
    del mapping["hydra"]
    return dict(mapping)
