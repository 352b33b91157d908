"""Turn overrides such as `scheme=vo_rope train.lr=1e-3` into a checked `Config`.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config`. Errors of Hydra, OmegaConf and YAML
become a `ConfigError`. Hydra is extended in three ways:

  - a scheme may be a class in a file (`scheme=my_scheme.py:Faded`), and so may a task (`data=my_task.py:Sums`);
  - packages that register schemes bring their own `conf/scheme/*.yaml`;
  - values get quotes if Hydra could not read them without (`data.path=~/books`), or would read a text as a number.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from posbench.catalogue.choices import choices, conf_dir, conf_dirs, expand, no_choice, settings_in
from posbench.catalogue.classes import check_known
from posbench.catalogue.own_files import as_recorded, is_class_path, row_of_file, trust_files, with_options
from posbench.composition.setups import setups_named, with_setup
from posbench.config import (
    Config,
    ConfigError,
    DataConfig,
    SchemeConfig,
    TaskConfig,
    is_text,
    keys_of,
    nearest,
    no_setting,
    type_words,
)

VERSION_BASE = "1.3"
GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "experiment")
_TASK_GROUPS = ("schema@_global_", *(f"{group}@_global_.{group}" for group in ("model", "train", "evaluation")))
_OPEN = ("train.optimizer_options", "evaluation.protocol_options")  # settings without a schema
_TASK_EXPERIMENT = "experiment=task"
_DEFAULT_SCHEME = "qk_rope"  # the scheme in conf/config.yaml
_CONFIG_DIR = "--config-dir="

# ---------------------------------------------------------------- the user's own files, and packages' folders


class OwnFiles(ConfigSource):
    """A source of configurations for Hydra that reads `scheme/my_scheme.py:Faded` from the class in this file."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix of this source's address in Hydra's search path."""
        return "own-file"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the settings of a scheme or task whose class is in a file. Raises: ConfigError without the file."""
        group, _, class_path = config_path.partition("/")
        row: dict[str, Any] = dict(row_of_file(class_path, group))
        if group == "data":
            # A task also changes the schema and the defaults of other groups.
            row["defaults"] = [{f"override /{key}": "task"} for key in _TASK_GROUPS]
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(row), {"package": None})

    def is_config(self, config_path: str) -> bool:
        """Return whether the path names a class in a file, such as `scheme/my_scheme.py:Faded`."""
        return config_path.startswith(("scheme/", "data/")) and is_class_path(config_path)

    def is_group(self, config_path: str) -> bool:
        """Return False, because this source has no groups to list."""
        return False

    def available(self) -> bool:
        """Return True, because this source can always be used."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return an empty list, because files are named and never listed."""
        return []


class OwnChoices(SearchPathPlugin):
    """A Hydra plug-in that adds the `conf/` folders of packages, and classes in files, to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders to the search path. Hydra calls this."""
        for folder in conf_dirs()[1:]:
            search_path.append("posbench", f"file://{folder}")
        search_path.append("posbench", f"{OwnFiles.scheme()}://")


# ---------------------------------------------------------------- overrides

_SIGNS = re.compile(r"[^\w/\-+.$%*@?|:\s]", re.ASCII)  # characters that Hydra's grammar cannot read without quotes
_NOT_TEXT = re.compile(r"[-+]?((\d[\d_]*\.?[\d_]*|\.[\d_]+)(e[-+]?[\d_]+)?|inf|nan)|true|false", re.IGNORECASE)


def quoted(text: str, quote: Quote = Quote.single) -> str:
    """Return `text` in quotes, escaped so that Hydra's grammar reads it as this text."""
    return QuotedString(text, quote).with_quotes()


def hydra_word(word: str) -> str:
    """Return the override with the quotes that Hydra's grammar needs to read it as the user meant it.

    `~/books`, `größe` and `my notes (2020)` get quotes, and so do texts that look like numbers (`experiment_name=1e3`).
    Raises: ConfigError for a list of schemes.
    """
    key, equals, value = word.partition("=")
    # The rates are merged with an experiment's instead of replacing them, and options of one's own classes are not in
    # the schema: `++` tells Hydra both.
    if (key == "train.lr_of" and value.startswith("{")) or key.startswith(_OPEN):
        return f"++{word}"
    # Hydra would silently use the last scheme of a list.
    if key == "scheme" and value.startswith("["):
        names = ",".join(re.findall(r"[^\[\]\s,'\"]+", value))
        raise ConfigError(f"{word} is a list, and a run has one scheme: write scheme={names}, and add -m")
    name = key.lstrip("+")
    takes_text = name in GROUPS or is_text(name)

    # Quote one value, which commas or brackets separate from others, if Hydra would misread it.
    def quoted_part(part: re.Match[str]) -> str:
        text = part[0].strip()
        # Hydra would read these texts as a number, a bool or None.
        is_mistaken = takes_text and (_NOT_TEXT.fullmatch(text) or (name in GROUPS and text == "null"))
        if _SIGNS.search(text) or is_mistaken:
            return quoted(text)
        return part[0]

    with_quoted_parts = key + equals + re.sub(r"[^\[\],]+", quoted_part, value)
    # The user's own quotes, functions, mappings and references stay as they are.
    plain = word if re.search(r"[\"'(){}\\]", value) else with_quoted_parts
    if not takes_text or value[:1] in ("", "'", '"'):
        return plain
    # Try the word as it is first: quotes would turn a sweep over values into one text.
    candidates = [plain, key + equals + quoted(value)]
    if value[0] == "[":
        candidates.insert(1, with_quoted_parts)
    return next(filter(_is_readable, candidates), plain)


def _is_readable(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def with_experiment(words: Sequence[str], *folders: Path) -> list[str]:
    """Return `words`, with `experiment=task` appended if they name a task but no experiment.

    Arguments: folders, the user's configuration folders.
    """
    datasets = []
    for word in words:
        if word.startswith("data="):
            datasets += word.removeprefix("data=").split(",")
    # The default experiment is for text.
    has_experiment = any(word.lstrip("+").startswith("experiment=") for word in words)
    needs_experiment = not has_experiment and any(names_task(name, *folders) for name in datasets)
    return [*words, _TASK_EXPERIMENT] if needs_experiment else [*words]


def names_task(name: str, *folders: Path) -> bool:
    """Return True if a choice of conf/data, or of the user's folders, is a task."""
    file = choices("data", *folders).get(name)
    # A class in a file is a task, because texts have no classes.
    return is_class_path(name) or (file is not None and settings_in(file).get("source") == "task")


# ---------------------------------------------------------------- composing


def register() -> None:
    """Register our plug-ins, sweeper and dataclasses with Hydra."""
    store = ConfigStore.instance()
    for name, data in (("text", OmegaConf.structured(DataConfig)), ("task", _open())):
        schema = OmegaConf.structured(Config)
        schema.scheme, schema.data = _open(), data
        # In a group `schema`, so that `scheme=glob(*)` does not sweep over the dataclasses.
        store.store(group="schema", name=name, node=schema, provider="posbench")
    sweeper = {"_target_": "hydra_plugins.posbench_sweeper.PosbenchSweeper", "params": None}
    store.store(group="hydra/sweeper", name="posbench", node=sweeper, provider="posbench")
    for plugin in (OwnFiles, OwnChoices):
        Plugins.instance().register(plugin)


def _open() -> DictConfig:
    # Without a schema: schemes and tasks have settings of their own.
    return DictConfig({}, flags={"struct": False})


@contextmanager
def _hydra() -> Iterator[ConfigLoader]:
    """Yield Hydra's loader for `conf/`."""
    register()
    # Hydra's state is global: restore the state of an application that is running.
    state, config = GlobalHydra.instance(), HydraConfig.instance()
    outer_hydra, outer_config = state.hydra, config.cfg
    state.clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE, job_name="posbench"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()
        config.cfg = outer_config
        if outer_hydra is not None:
            GlobalHydra.instance().initialize(outer_hydra)


def config_dirs(words: Sequence[str]) -> list[Path]:
    """Return the user's configuration folders, which words such as `--config-dir=FOLDER` name."""
    return [Path(word.partition("=")[2]).expanduser().resolve() for word in words if word.startswith(_CONFIG_DIR)]


@contextmanager
def session(words: Sequence[str] = (), mode: RunMode = RunMode.RUN) -> Iterator[DictConfig]:
    """Yield the configuration that Hydra composes from `words`, including Hydra's own group `hydra`.

    Raises: ConfigError for what Hydra refuses.
    """
    folders = config_dirs(words)
    words = [word for word in words if not word.startswith(_CONFIG_DIR)]
    words = with_experiment(words, *folders)
    if mode is RunMode.RUN:
        words = with_setup(words, setups_named(words, *folders))
    overrides = [hydra_word(word) for word in words]
    if folders:
        search_path = ",".join(quoted(f"file://{folder}") for folder in folders)
        overrides = [f"hydra.searchpath=[{search_path}]", *overrides]  # if given twice, the first counts
    # Hydra's global state is the same here as inside a job.
    with plain_errors(), _hydra() as loader:
        composed = loader.load_configuration("config", overrides, run_mode=mode)
        HydraConfig.instance().set_config(composed)
        yield composed


def compose(overrides: Sequence[str] = ()) -> Config:
    """Return the `Config` for overrides, as on the command line; `--config-dir=FOLDER` adds your own YAML files.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`. Raises: ConfigError for anything it refuses.
    """
    with session(overrides) as composed:
        return checked_config(composed)


def checked_config(composed: DictConfig) -> Config:
    """Return a checked `Config` made from what Hydra composed, while Hydra's session or job is open.

    Raises: ConfigError for an unknown key, a wrong type, a missing value or a value out of its range.
    """
    content = copy.deepcopy(composed)
    with plain_errors():
        scheme = expand(OmegaConf.to_container(content, resolve=False)["scheme"], _row)  # type: ignore[call-overload,index]
        with read_write(content), open_dict(content):
            content.pop("hydra", None)
            content["scheme"] = scheme
        mapping: Any = OmegaConf.to_container(content, resolve=True, throw_on_missing=False)
        OmegaConf.copy_cache(content, composed)  # so that `${now:...}` is the same time everywhere
    keys = keys_of(HydraConfig.get().overrides.task)
    # A user's train.lr overrides the learning rates of an experiment's train.lr_of, and of a scheme's own file.
    if "train.lr" in keys and "train.lr_of" not in keys:
        rates = mapping["train"]["lr_of"] or {}
        typed = {name: rate for name, rate in rates.items() if f"train.lr_of.{name}" in keys}
        mapping["train"]["lr_of"] = typed or None
        if "scheme.lr" not in keys:
            mapping["scheme"].pop("lr", None)
    # Not later, because the scheme may then come from a run or a folder, which must not name files to import.
    trust_files(mapping["scheme"])
    mapping["train"]["optimizer"] = as_recorded(mapping["train"]["optimizer"])
    trust_files(mapping["train"])
    of_files = filter(None, map(with_options, mapping["evaluation"]["protocols"] or ()))
    trust_files([{"kind": class_path} for class_path, _ in of_files])
    check_known("train.optimizer", mapping["train"]["optimizer"], "training/optimizers", "posbench.optimizers")
    # Some settings follow from a task's problems, or from the model that the run continues.
    if mapping["data"].get("source") == "task":
        _compute_windows(mapping)
    if mapping["train"].get("from_run"):
        _continue(mapping)
    with plain_errors():
        config = Config.from_mapping(mapping)
        if config.train.from_run:
            config = _with_trained_positions(config)
    # Runs are named by their scheme, so a user's class must not have the name of a scheme of posbench.
    if is_class_path(config.scheme.kind):
        _check_row_name(config.scheme)
    config.command = tuple(HydraConfig.get().overrides.task)
    return config


def _compute_windows(mapping: dict[str, Any]) -> None:
    """Set `train.context_length` and `data.window` in `mapping`, in tokens, as the task's problems need them.

    Raises: ConfigError if the user gave other numbers.
    """
    from posbench.data import Problems

    mapping["data"]["task"] = as_recorded(mapping["data"]["task"])
    trust_files(mapping["data"])
    task = TaskConfig.from_mapping(mapping["data"])
    problems = Problems(task)
    # How many tokens a model reads of the longest problem in training, and of the longest that may be tested.
    for group, name, length in (("train", "context_length", task.lengths[1]), ("data", "window", task.longest or 0)):
        value, needed = mapping[group].setdefault(name, None), problems.window(length)
        # "???" is OmegaConf's mark of a value that is not given.
        if value not in (None, "???", needed):
            raise ConfigError(
                f"{group}.{name}={value} is given, but a problem of data={task.task} has {needed} tokens to read "
                f"(data.lengths={task.lengths}, data.longest={task.longest}): give {group}.{name}=null"
            )
        mapping[group][name] = needed


def _continue(mapping: dict[str, Any]) -> None:
    """Set model sizes, scheme and tokenizer in `mapping` as the model that `train.from_run` names has them.

    Raises: ConfigError if `train.from_run` names no model, if the user gave sizes, or if posbench cannot use its
    positions or tokenizer and the user gave no others.
    """
    from posbench.data.text.tokenizer import CONVERT
    from posbench.runs.start import start_of
    from posbench.schemes.building import with_option

    words = HydraConfig.get().overrides.task
    keys = {word.lstrip("+").partition("=")[0] for word in words}

    # Return the settings of a group that the user gave, such as `base` for `scheme.base=1e4`, with their values.
    def settings_of(group: str) -> dict[str, Any]:
        names = [key.removeprefix(f"{group}.") for key in keys if key.startswith(f"{group}.")]
        return {name: reduce(getitem, name.split("."), mapping[group]) for name in names}

    if sizes := [word for word in words if word.startswith(("model=", "model."))]:
        raise ConfigError(f"train.from_run decides the model's sizes: leave out {' '.join(sizes)}")
    from_run = mapping["train"]["from_run"]
    source = start_of(from_run, mapping["seed"], mapping["runs_dir"])
    assert source is not None
    mapping["model"] = source.model
    # A Hugging Face folder brings its tokenizer, unless the user chose another. A run has None here: its tokenizer must
    # be the one that `data` and `tokenizer` make.
    if source.tokenizer_file is not None and not keys & {"tokenizer", "tokenizer.kind"}:
        if source.tokenizer_file.is_file() or "tokenizer.path" in keys:
            mapping["tokenizer"] = {"kind": "file", "path": str(source.tokenizer_file)} | settings_of("tokenizer")
        # A task has a tokenizer of its own.
        elif mapping["data"].get("source") != "task":
            from posbench.huggingface.files import tokenizer_files

            existing = tokenizer_files(source.tokenizer_file.parent)
            raise ConfigError(
                f"train.from_run={from_run} has no tokenizer.json{existing}, which says what its token ids mean: give "
                f"tokenizer=file tokenizer.path=.../tokenizer.json ({CONVERT})"
            )
    # The source's scheme, with the options that the user gave, unless the user or an experiment chose a scheme. An
    # experiment's choice differs from the default.
    chosen_scheme = HydraConfig.get().runtime.choices["scheme"]
    if "scheme" not in keys and chosen_scheme == _DEFAULT_SCHEME:
        # Without `lr`: a learning rate of the source's own would replace this run's train.lr.
        source_scheme = {key: value for key, value in source.positions.checked_row(from_run).items() if key != "lr"}
        # A factor after the rescaling it is for.
        for option, value in sorted(settings_of("scheme").items(), key=lambda item: item[0].endswith("factor")):
            source_scheme = with_option(source_scheme, option, value)
        mapping["scheme"] = source_scheme
    if "scheme.name" not in keys:
        # If the source also continued a run, its name is such as `a_then_b`; the last part is its scheme.
        name = mapping["scheme"]["name"].rpartition("_then_")[2]
        mapping["scheme"]["name"] = f"{source.scheme}_then_{name}"
    # The length L of the formulas for positions stays the one that the source was trained at.
    mapping["scheme"].setdefault("trained_length", source.positions.trained_length)


def _with_trained_positions(config: Config) -> Config:
    """Return the configuration with the trained length of the source only if the run's scheme reads it.

    In a longer context, a rescaling without a factor gets context length / trained length.
    """
    from posbench.model.architecture import build_architecture
    from posbench.schemes import Scheme
    from posbench.schemes.entries import with_factor

    context_length, scheme = config.train.context_length, config.scheme
    layers = build_architecture(config).scheme
    reads_length = any(part.reads_length for part in layers.modules() if isinstance(part, Scheme))
    # The trained length is recorded only if it changes what the run computes; None means the context length.
    if scheme.trained_length in (None, context_length) or not reads_length:
        return replace(config, scheme=replace(scheme, trained_length=None))
    row = scheme.to_mapping()
    # Set here, so that evaluation rotates as training did; a factor of the user's stays.
    if context_length > scheme.trained_length:
        row = with_factor(row, context_length / scheme.trained_length)
    return replace(config, scheme=SchemeConfig.from_mapping(row))


def _check_row_name(scheme: SchemeConfig) -> None:
    # Raise ConfigError if a scheme of the user's has the name of a scheme of posbench.
    from posbench.schemes import SCHEMES

    if scheme.name in choices("scheme") or scheme.name in SCHEMES:
        raise ConfigError(
            f"scheme={scheme.kind} has the name {scheme.name!r}, which is already the name of a scheme of posbench: "
            f"give it another one, such as scheme.name=my_{scheme.name}"
        )


def _row(name: str) -> dict[str, Any]:
    # Return the settings of the scheme `name` as Hydra composes them, for a scheme that is named inside another.
    hydra = HydraConfig.get()
    words: Any = OmegaConf.to_container(
        hydra.overrides.hydra, resolve=False
    )  # such as the search path with the user's --config-dir
    loader = GlobalHydra.instance().config_loader()
    composed = loader.load_configuration(hydra.job.config_name, [*words, hydra_word(f"scheme={name}")], RunMode.RUN)
    row: dict[str, Any] = OmegaConf.to_container(composed, resolve=False)["scheme"]  # type: ignore[call-overload,index,assignment]
    return row


# ---------------------------------------------------------------- errors in plain words


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML inside this context into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explanation(error)) from error


def _explanation(error: BaseException) -> str:
    # Return the message that explains an error of Hydra, OmegaConf or YAML.
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        return _no_choice(str(error.missing_cfg_file), error.options or [])
    if isinstance(error, OverrideParseException):
        return _no_override(str(error.override))
    file = re.match(r"In '(.+?)'", text)  # Hydra begins some errors with the file that has the cause
    location = f" (in {file[1]}.yaml)" if file else ""
    for pattern, explain in _EXPLANATIONS.items():
        if match := re.search(pattern, text):
            return explain(match[1]) + location
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return no_setting(str(error.full_key))
    if isinstance(error, OmegaConfBaseException):
        return _wrong_value(error)
    # Hydra wraps errors in errors; an unknown one keeps its own text, in one line.
    cause = error.__cause__ or error.__context__
    return text if cause is None else _explanation(cause) + location


def _no_choice(choice: str, known: Sequence[str]) -> str:
    group, _, name = choice.rpartition("/")
    parent, _, inner = group.rpartition("/")
    # A file of `experiment/` names a choice of another group without `override /`, so Hydra looks for it inside
    # `experiment/`.
    if parent and inner in GROUPS:
        return f"'{inner}: {name}' in the defaults of a file of {parent}/: write '- override /{inner}: {name}'"
    if name in ("submitit_local", "submitit_slurm"):
        return f"{group}={name} needs the extra 'cluster': pip install -e '.[cluster]' (there are {', '.join(known)})"
    return no_choice(group, name, known or choices(group))


def no_option(word: str, known: Iterable[str] = ()) -> str:
    """Return the error message for an unknown option such as `--word`, with the most similar one."""
    hint = nearest(word, known, 0.75)
    if "=" in word:
        hint = f": settings have no dashes, write {word.lstrip('-')}"
    elif word[2:] in GROUPS:
        hint = f": settings have no dashes, write {word[2:]}=..."
    return f"there is no option {word!r}{hint} (--help lists them)"


def _no_override(word: str) -> str:
    key, equals, value = word.partition("=")
    if word.startswith("-"):
        return no_option(word)
    # It has the form of an override, and Hydra could not read its value.
    if equals:
        inner = value.strip("'\"")  # without quotes that the user gave
        text = shlex.quote(f"{key}={quoted(inner, Quote.double)}")
        return f"{word!r} has quotes, brackets or commas, which are Hydra's syntax: to give a text, write {text}"
    groups = [group for group in GROUPS if word in choices(group)]
    if is_class_path(word):
        groups.append("scheme")
    hint = f"; did you mean {groups[0]}={word}?" if groups else ""
    return f"{word!r} is not an override: write key=value, such as scheme=vo_rope or train.lr=1e-3{hint}"


def _wrong_value(error: OmegaConfBaseException) -> str:
    key = str(error.full_key)
    value = "null" if error.value is None else error.value
    expected = type_words(key)
    # For other errors, OmegaConf's own first line says what is wrong.
    if not isinstance(error, ValidationError) or not expected:
        line = str(error).partition("\n")[0]
        return f"{key}: {line.rpartition('while resolving interpolation: ')[2]}"
    hint = f": write {key}=[{value}]" if expected == "a list" else ""
    if isinstance(value, float) and value.is_integer():
        hint = f": write {key}={int(value)}"
    return f"{key}={value} must be {expected}{hint}"


def _several_values(word: str) -> str:
    key, _, value = word.partition("=")
    hint = ""
    if type_words(key) == "a list":
        hint = f"; for one list write {key}=[{value}]"
    if is_text(key):
        hint = "; for one text write " + shlex.quote(f"{key}={quoted(value, Quote.double)}")
    return f"{word} names several values: add -m to train a run for each (posbench train -m {shlex.quote(word)}){hint}"


# Errors of Hydra and OmegaConf that can be recognised only by their text: pattern -> our message for its group.
_EXPLANATIONS: dict[str, Callable[[str], str]] = {
    r"Could not override '([^']*)'": no_setting,
    r"Could not delete from config. '([^']*)' does not exist": no_setting,
    r"Interpolation key '(.*)' not found": no_setting,
    r"Ambiguous value for argument '(.*)' 1\. ": _several_values,
    r"Sweep parameters '(.*)' requires": _several_values,
    r"does not support deletion full_key: (\S+)": "{} cannot be left out: give it another value".format,
    r"issing mandatory value: (?:\w+ full_key: )?(\w+\.\w+)": "{} is not given: it needs a value".format,
    r"not a subclass of (.*)Config\. value": lambda name: f"{name.lower()} is a group: write {name.lower()}.KEY=VALUE",
}


# ---------------------------------------------------------------- completion


def complete(incomplete: str) -> list[str]:
    """Return the completions of an incomplete override: [`scheme=v_rope`, `scheme=vo_rope`] for `scheme=v`."""
    with _hydra() as loader:
        words = _Completion(loader).words(incomplete)
    return [word for word in words if not word.startswith("schema")]


class _Completion(DefaultCompletionPlugin):
    # Hydra's own shells print their completions.

    def words(self, line: str) -> list[str]:
        return list(self._query(config_name="config", line=line))
