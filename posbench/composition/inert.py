"""What a configuration may not say: it is data, and names no code, asks no environment and holds no credential.

Hydra can build whatever `_target_` names (callbacks, logging, launchers), and OmegaConf can look values up
(`${oc.env:HOME}`). posbench needs neither. What Hydra composed is therefore checked before Hydra acts on it: the
configuration of a command, that of each job of a sweep, and a run folder's config.yaml.
Everything here raises ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from posbench.composition.credentials import has_telling_form, scrub, variables_in
from posbench.config import ConfigError

SWEEPER = "hydra_plugins.posbench_sweeper.PosbenchSweeper"
_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")  # ${experiment.name}: another value of the same configuration
_FIELD = re.compile(r"\$\{(?!hydra\b)\w[\w.\[\]]*\}")  # ... of posbench's own: Hydra's tell of the machine
_HYDRAS = re.compile(r"[+~]*hydra\b")
_MOST_REFERENCES = 16
_PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")  # of Hydra, and of installed packages
_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# Hydra's own settings that decide what runs and what is written where, as conf/config.yaml has them.
_SETTLED: dict[str, Any] = {
    "callbacks": {},
    "job_logging": _LOGGING,
    "hydra_logging": _LOGGING,
    "job.env_copy": [],
    "job.env_set": {},
    "job.chdir": False,
    "run.dir": ".",
    "output_subdir": None,
    "sweep": {"dir": "${runs_dir}/.hydra", "subdir": "."},
    "sweeper._target_": SWEEPER,
}


def check_composed(composed: DictConfig, given: Iterable[tuple[str, Any]]) -> None:
    """Hold what Hydra composed, with its own `hydra` part, to plain data and to the settings of conf/config.yaml.

    Arguments: given, the keys and values of the command line: a launcher takes text from there alone.
    """
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    hydra = plain.pop("hydra")
    for key, value in _leaves(hydra, "hydra"):
        _refuse_lookup(key, value)
    for name, settled in _SETTLED.items():
        value = reduce(getitem, name.split("."), hydra)
        if value != settled:
            raise ConfigError(
                f"hydra.{name}={scrub(value)!r}, which a YAML file sets, could run code or write elsewhere: remove it "
                "(an experiment may set hydra.sweeper.params and hydra.launcher)"
            )
    _check_sweep(hydra["sweeper"]["params"] or {})
    target_of_launcher = hydra["launcher"].get("_target_")
    for plugin in (hydra["launcher"], hydra["sweeper"]):
        if not str(target := plugin.pop("_target_")).startswith(_PLUGINS):
            refuse_code("_target_", f"_target_={target}")
        for key, value in _leaves(plugin):
            refuse_code(key, f"{key}={value!r}")
    _refuse_launcher_text(hydra["launcher"], target_of_launcher, given)
    check_inert(plain)


def _check_sweep(params: dict[str, Any]) -> None:
    """Hold the sweep that a file names to fields of posbench: its values become words, which may say more."""
    for key, value in params.items():
        if _HYDRAS.match(key):
            raise ConfigError(
                f"hydra.sweeper.params.{key} would change Hydra itself: give {key}=... on the command line"
            )
        _refuse_lookup(f"hydra.sweeper.params.{key}", value, allowed=_FIELD)


def _refuse_launcher_text(launcher: dict[str, Any], target: Any, given: Iterable[tuple[str, Any]]) -> None:
    """Refuse text in a launcher's settings, which becomes lines of a shell (setup) or options of a job.

    Numbers of settings that the plug-in has may stand in a file; its own defaults and what the command line says may be
    text.
    """
    on_command_line = {key for name, value in given for key, _ in _leaves(value, name)}
    defaults = dict(_leaves(_defaults_of_launcher(target)))
    for key, value in _leaves(launcher):
        name = f"hydra.launcher.{key}"
        is_number = key in defaults and not isinstance(value, str)
        if not (is_number or defaults.get(key) == value or name in on_command_line):
            name = name if name.isprintable() else ascii(name)
            raise ConfigError(
                f"{name}={value!r}, which a YAML file sets, could become a command of a job: remove it there, and give "
                f"it on the command line if you mean it ({name}=...); files may set only numbers of a launcher"
            )


def _defaults_of_launcher(target: Any) -> dict[str, Any]:
    """The settings that the plug-in of that class registered with Hydra; none where nobody did."""
    store = ConfigStore.instance()
    for name in store.list("hydra/launcher"):
        node: Any = OmegaConf.to_container(store.load(f"hydra/launcher/{name}").node, resolve=False)
        if node.pop("_target_", None) == target:
            return dict(node)
    return {}


def check_inert(mapping: Any, resolved: bool = False) -> None:
    """Hold a configuration to plain data. `resolved`: no `${...}` may be left, else those of other fields may stand.

    A credential is refused where `credentials.scrub` knows one, without showing it.
    """
    if (references := sum(str(value).count("${") for _, value in _leaves(mapping))) > _MOST_REFERENCES:
        raise ConfigError(
            f"{references} references to other fields (${{...}}) in one configuration are too many (at most "
            f"{_MOST_REFERENCES}): write the values instead"
        )
    for key, value in _leaves(mapping):
        if isinstance(value, int) and abs(value) >= 1 << 64:
            raise ConfigError(f"{key} is out of range: give a number of at most 64 bits")
        refuse_code(key, f"{key}={value!r}")
        _refuse_lookup(key, value, None if resolved else _REFERENCE)
        _refuse_credential(key, value, resolved)


def _refuse_lookup(key: str, value: Any, allowed: re.Pattern[str] | None = _REFERENCE) -> None:
    """`allowed`: the references that may stand; None: none."""
    if isinstance(value, str) and "${" in (value if allowed is None else allowed.sub("", value)):
        raise ConfigError(
            f"{key}={value!r} would look a value up when it is read: write the value itself "
            "(only another field, such as ${experiment.name}, may be in braces)"
        )


def _refuse_credential(key: str, value: Any, resolved: bool) -> None:
    """`resolved`: what was read from a run folder is not held to the reader's environment."""
    for text in (key, value):
        if not isinstance(text, str):
            continue
        if has_telling_form(text):
            raise ConfigError(
                f"{scrub(key)} contains what looks like a key or a password, and configurations are written to files "
                "and to the tracker: remove it (hf auth login and wandb login keep theirs elsewhere)"
            )
        if not resolved and (variables := variables_in(text)):
            raise ConfigError(
                f"{scrub(key)} contains the value of {variables[0]} in the environment, which may be a secret, and "
                "configurations are written to files and to the tracker: remove it. If it is not a secret, run the "
                f"command without that variable: env -u {variables[0]} posbench ..."
            )


def refuse_code(text: str, shown: str) -> None:
    """Refuse `_target_`, by which Hydra would call what it names."""
    if "_target_" in text:
        raise ConfigError(
            f"{shown} names code to run (_target_), which a configuration may not: remove it. A scheme of your own is "
            "a class in a package that is installed, see docs/adding-a-scheme.md"
        )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
        if not value:
            yield key, None
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
