"""From words such as `scheme=vo_rope` to a typed, checked `Config`: where Hydra ends and posbench begins.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config` (so that an unknown field or a wrong
type is refused), then `typed` turns the result into a `Config`, whose own rules check the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench.config import Config, ConfigError


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
        schema = OmegaConf.structured(Config)
        checked = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(plain)))
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    assert isinstance(checked, Config)
    return checked


def _first_line(error: OmegaConfBaseException) -> str:
    where = f" ({error.full_key})" if getattr(error, "full_key", None) else ""
    return str(error).splitlines()[0] + where


def compose(overrides: Sequence[str] = ()) -> Config:
    """A typed config from the words of the command line.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`.
    Raises: ConfigError for anything the command line would refuse.
    """
    from hydra.errors import HydraException

    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="posbench"):
            return typed(hydra_compose("config", overrides=list(overrides)))
    except HydraException as error:
        raise ConfigError(str(error)) from error
