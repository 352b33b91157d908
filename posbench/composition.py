"""From words such as `scheme=vo_rope` to a typed, checked `Config`: where Hydra ends and posbench begins.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config` (so that an unknown field or a wrong
type is refused), then `typed` turns the result into a `Config`, whose own rules check the values.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench.config import Config, ConfigError, nearest


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices(group: str) -> list[str]:
    """The names that `group=` accepts, such as every scheme of `conf/scheme`."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def register_schema() -> None:
    """Tell Hydra the dataclasses, in a group of their own so that `scheme=glob(*)` does not sweep them."""
    ConfigStore.instance().store(group="schema", name="posbench", node=Config, provider="posbench")


def typed(composed: DictConfig) -> Config:
    """The composed mapping as a checked `Config`.

    Raises: ConfigError for an unknown field, a wrong type, a missing value or a value out of its range.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        checked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(plain)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(checked, Config)
    return checked


def compose(overrides: Sequence[str] = ()) -> Config:
    """A typed config from the words of the command line.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`.
    Raises: ConfigError for anything the command line would refuse.
    """
    with _composer():
        try:
            return typed(hydra_compose("config", overrides=list(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error)) from error


@contextmanager
def _composer() -> Iterator[None]:
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="posbench"):
        yield


def explain(error: Exception) -> str:
    """One line of cause, value and remedy for what Hydra or OmegaConf refused, with the nearest valid name."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = error.options or choices(group)
        return f"{group}={name} is not there{nearest(name, known)} (conf/{group} holds {', '.join(known)})"
    if wrong := re.search(r"Could not override '([^']+)'", text):
        key = wrong[1]
        return f"there is no setting {key!r}{nearest(key, _settings())} (posbench train --cfg job shows them all)"
    if wrong := re.search(r"Error merging override (.+)", text):
        cause = str(error.__cause__ or "").splitlines()
        return f"{wrong[1]} is refused: {cause[0] if cause else 'the value does not fit'}"
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        hints = [f"{group}={word}" for group in _GROUPS if word in choices(group)]
        hint = f"; did you mean {hints[0]}?" if hints else ""
        return f"{word!r} is no override: write key=value, such as scheme=vo_rope or train.lr=1e-3{hint}"
    key = getattr(error, "full_key", None)
    where = f" ({key})" if key else ""
    return text.splitlines()[0] + where


_GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "experiment")


def _settings() -> list[str]:
    """Every key that can be overridden, as `group` or `group.field`."""
    register_schema()
    keys = [*_GROUPS]
    mapping = compose().to_mapping()
    for key, value in mapping.items():
        keys += [f"{key}.{field}" for field in value] if isinstance(value, dict) else [key]
    return keys


def complete(incomplete: str) -> list[str]:
    """Hydra's completions of a word of the command line, `scheme=v` -> `scheme=v_rope`, `scheme=vo_rope`."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra._internal.utils import create_config_search_path

    register_schema()
    loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
    found = BashCompletion(loader)._query(config_name="config", line=incomplete)
    return [word for word in found if not word.startswith("schema")]


def run_application(program: str, words: Sequence[str], job: Callable[[DictConfig], object]) -> None:
    """Run `job` as a Hydra application: overrides, `-m` sweeps, `--cfg job`, launchers.

    Hydra takes flags before overrides only, so those are moved to the end.
    Raises: ConfigError for anything Hydra refuses.
    """
    register_schema()
    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not word.startswith("-")]
    sys.argv = [program, *(word for word in words if word not in overrides), *overrides]
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # errors come to us and are explained once, instead of Hydra's own print and exit
    )
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
