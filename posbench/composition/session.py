"""Hydra, opened on `conf/` and on the user's folder of choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from posbench.composition.choices import ChoiceFolder, conf_dir
from posbench.composition.counts import SCHEMA
from posbench.composition.inert import SWEEPER
from posbench.composition.words import Words

VERSION_BASE = "1.3"


def register() -> None:
    """Tell Hydra our plug-ins, and our dataclasses: in a group of their own, which `scheme=glob(*)` does not sweep."""
    store = ConfigStore.instance()
    store.store(group="schema", name="posbench", node=SCHEMA, provider="posbench")
    sweeper = {"_target_": SWEEPER, "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="posbench", node=sweeper, provider="posbench")
    Plugins.instance().register(ChoiceFolder)


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Hydra's loader on `conf/`; an application of Hydra's within which we are called goes on afterwards."""
    register()
    state = GlobalHydra.instance()
    outer = state.hydra
    state.clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE, job_name="posbench"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


def composed(words: Words) -> DictConfig:
    """What Hydra makes of the words, its own `hydra` part included, unchecked.

    Raises: Hydra's, OmegaConf's and YAML's errors; ConfigError for the name of a choice that leads elsewhere.
    """
    words.parsed()
    with session():
        return compose("config", overrides=[*words.overrides, *searchpath(words.folder)], return_hydra_config=True)


def searchpath(folder: Path | None) -> list[str]:
    """The override that adds the user's folder of choices."""
    if folder is None:
        return []
    place = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['{ChoiceFolder.scheme()}://{place}']"]
