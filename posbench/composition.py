"""From words such as `scheme=vo_rope train.lr=1e-3` to a checked `Config`.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config`, so that an unknown key or a wrong
type is refused; `typed` then makes a `Config` of what it composed, whose own rules check the values. What Hydra,
OmegaConf or YAML refuse becomes a `ConfigError` in plain words.

Three things are added to Hydra, each by a plug-in of a kind that Hydra knows or by a word that it understands:

- a scheme may be a class in a file (`scheme=my_scheme.py:Faded`), wherever the name of a row may stand;
- packages that register schemes bring their own `conf/scheme/*.yaml`;
- words that Hydra's grammar cannot read without quotes (`data.path=~/books`, `experiment_name=größe`) get their quotes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from posbench.config import Config, ConfigError, SchemeConfig, nearest
from posbench.scheme_file import name_files, names_file, row_of_file, tidy

VERSION_BASE = "1.3"
GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "experiment")
_LISTS_OF_ROWS = ("layers", "of")  # the options of a scheme that name rows of conf/scheme
_MEANT = {"rope": "qk_rope", "rotary": "qk_rope", "none": "nope", "absolute": "learned", "relative": "shaw"}

# ---------------------------------------------------------------- the YAML files of choices


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@cache
def _conf_dirs() -> tuple[Path, ...]:
    """`conf_dir()`, and the `conf/` of each package that registers schemes. None of them is imported."""
    modules = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group="posbench.schemes")}
    specs = [find_spec(module) for module in sorted(modules - {"posbench"})]
    folders = [Path(place, "conf") for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return (conf_dir(), *(folder for folder in folders if (folder / "scheme").is_dir()))


def choice_files(group: str, *folders: Path) -> dict[str, Path]:
    """The names that `group=` accepts, in order, and their files: ours, of packages, of `folders`; the first counts."""
    places = [*_conf_dirs(), *folders]
    return dict(sorted({file.stem: file for place in places[::-1] for file in (place / group).glob("*.yaml")}.items()))


def choices(group: str, *folders: Path) -> list[str]:
    """The names that `group=` accepts."""
    return list(choice_files(group, *folders))


def choice_folder(name: str) -> Path:
    """The folder that `--config-dir` names. Raises: ConfigError where it is not one."""
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        raise ConfigError(
            f"--config-dir {name} is not a folder: give one that contains choices, such as FOLDER/scheme/mine.yaml"
        )
    return folder


def description(group: str, name: str, *folders: Path) -> str:
    """The comment in the first line of a choice: what it is, and its source; empty where there is none."""
    file = choice_files(group, *folders).get(name)
    line = file.read_text(encoding="utf-8").partition("\n")[0] if file else ""
    return line.removeprefix("#").strip() if line.startswith("#") else ""


class SchemeFiles(ConfigSource):
    """Hydra's view of schemes in files: it answers to `scheme/my_scheme.py:Faded` with that class's row."""

    @staticmethod
    def scheme() -> str:
        """What its address in Hydra's search path begins with."""
        return "scheme-file"

    def load_config(self, config_path: str) -> ConfigResult:
        """The row. Raises: ConfigError where there is no such file or class."""
        row = OmegaConf.create(row_of_file(config_path.removeprefix("scheme/")))
        return ConfigResult(self.provider, self.full_path(), row, {"package": None})

    def is_config(self, config_path: str) -> bool:
        """Whether that names a file of one's own."""
        return config_path.startswith("scheme/") and names_file(config_path)

    def is_group(self, config_path: str) -> bool:
        """Its files are named and never listed."""
        return False

    def available(self) -> bool:
        """Always."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing."""
        return []


class OwnChoices(SearchPathPlugin):
    """Adds the folders of packages, and schemes in files, to where Hydra looks for choices."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra."""
        for folder in _conf_dirs()[1:]:
            search_path.append("posbench", f"file://{folder}")
        search_path.append("posbench", f"{SchemeFiles.scheme()}://")


# ---------------------------------------------------------------- words

_NEEDS_QUOTES = re.compile(r"[^\[\],]*[^\w/\-+.$%*@?|:\s\[\],][^\[\],]*", re.ASCII)  # what Hydra's grammar cannot read


@cache
def settings() -> list[str]:
    """Every key of a configuration: `train`, `train.lr`."""
    groups = {**get_type_hints(Config), "scheme": SchemeConfig}
    inner = [f"{group}.{each.name}" for group, cls in groups.items() if is_dataclass(cls) for each in fields(cls)]
    return [*groups, *inner]


def hydra_word(word: str) -> str:
    """An override with quotes around `~/books` and `größe`, which Hydra's grammar cannot read without.

    Words with quotes, functions, mappings or references stay as they are.
    """
    key, equals, value = word.partition("=")
    if re.search(r"[\"'(){}\\]", value):
        return word
    return key + equals + _NEEDS_QUOTES.sub(lambda part: f"'{part[0].strip()}'", value)


def read_words(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """The words as Hydra reads them, without `--config-dir FOLDER`, and that folder.

    Raises: ConfigError where it is not a folder, and for `--model tiny`, which is written `model=tiny`.
    """
    remaining: list[str] = []
    folder: Path | None = None
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        following = left[0] if left and not left[0].startswith("-") else ""
        if flag in ("--config-dir", "-cd"):
            folder = choice_folder(value if equals else following)
            left = left if equals else left[1:]
        elif flag.startswith("--") and flag[2:].partition(".")[0] in settings():
            raise ConfigError(f"{word!r} is not an option; did you mean {flag[2:]}={value or following or '...'}?")
        else:
            remaining.append(word if word.startswith("-") else hydra_word(word))
    return remaining, folder


# ---------------------------------------------------------------- composing


def register() -> None:
    """Tell Hydra our plug-ins, our sweeper and our dataclasses: in a group that `scheme=glob(*)` does not sweep."""
    schema = OmegaConf.structured(Config)
    schema.scheme = DictConfig({}, flags={"struct": False})  # a scheme's options are its class's: no `+` is needed
    store = ConfigStore.instance()
    store.store(group="schema", name="posbench", node=schema, provider="posbench")
    sweeper = {"_target_": "hydra_plugins.posbench_sweeper.PosbenchSweeper", "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="posbench", node=sweeper, provider="posbench")
    for plugin in (SchemeFiles, OwnChoices):
        Plugins.instance().register(plugin)


@contextmanager
def _hydra() -> Iterator[ConfigLoader]:
    """Hydra's loader on `conf/`; an application of Hydra's within which we are called goes on afterwards."""
    register()
    state, config = GlobalHydra.instance(), HydraConfig.instance()
    outer, outer_config = state.hydra, config.cfg
    state.clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE, job_name="posbench"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()
        config.cfg = outer_config
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


@contextmanager
def session(words: Sequence[str] = (), mode: RunMode = RunMode.RUN) -> Iterator[DictConfig]:
    """What Hydra composes of the words, its own `hydra` part included; within, Hydra is as it is within a job."""
    overrides, folder = read_words(words)
    with explained(), _hydra() as loader:
        if folder is not None:
            others: list[Any] = [each for each in parse(overrides) if each.key_or_group == "hydra.searchpath"]
            places: Any = [place for each in others for place in each.value()] + [f"file://{folder.resolve()}"]
            quoted = ",".join(QuotedString(place, Quote.single).with_quotes() for place in places)
            overrides = [f"hydra.searchpath=[{quoted}]", *overrides]  # the first counts
        composed = loader.load_configuration("config", overrides, run_mode=mode)
        HydraConfig.instance().set_config(composed)
        yield composed


def parse(words: Sequence[str]) -> list[Override]:
    """The `Override`s that Hydra reads in words. Raises: Hydra's OverrideParseException."""
    overrides: list[Override] = OverridesParser.create().parse_overrides(list(words))
    return overrides


def compose(overrides: Sequence[str] = ()) -> Config:
    """A typed config from the words of the command line; `--config-dir=FOLDER` adds your own choices.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`.
    Raises: ConfigError for anything that the command line would refuse.
    """
    with session(overrides) as composed:
        return typed(composed)


def typed(composed: DictConfig) -> Config:
    """What Hydra composed as a checked `Config`, within the session or the job of Hydra that it belongs to.

    Raises: ConfigError for an unknown key, a wrong type, a missing value or a value out of its range.
    """
    content = copy.deepcopy(composed)
    with explained():
        scheme = expand(OmegaConf.to_container(content, resolve=False)["scheme"])  # type: ignore[call-overload,index]
        with read_write(content), open_dict(content):
            content.pop("hydra", None)
            content["scheme"] = tidy(scheme)
        mapping: Any = OmegaConf.to_container(content, resolve=True, throw_on_missing=False)
        OmegaConf.copy_cache(content, composed)  # so that `${now:...}` is one time everywhere
    config = checked(mapping)
    name_files(config.scheme.to_mapping())
    if names_file(config.scheme.kind):
        _check_row_name(config.scheme)
    return config


def checked(mapping: dict[str, Any]) -> Config:
    """A mapping of plain data, such as a run folder's config.yaml, as a checked `Config`; `${...}` in it is text.

    Raises: as `typed`.
    """
    with explained():
        plain = OmegaConf.create(_without_references(mapping))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    assert isinstance(config, Config)
    return config


def _without_references(value: Any) -> Any:
    """`value` with each `${` escaped, so that OmegaConf looks nothing up."""
    if isinstance(value, dict):
        return {key: _without_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_references(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _check_row_name(scheme: SchemeConfig) -> None:
    """Raises: ConfigError where the row of a file has the name of one of ours, whose results it would be taken for."""
    from posbench.schemes import SCHEMES

    if scheme.name in choices("scheme") or scheme.name in SCHEMES:
        raise ConfigError(
            f"scheme={scheme.kind} would be the row {scheme.name!r}, which is the name of a scheme of conf/scheme: "
            f"give it another one, such as scheme.name=my_{scheme.name}"
        )


def expand(scheme: Any, within: tuple[str, ...] = ()) -> Any:
    """A scheme's mapping with the rows themselves in place of their names in `layers` and `of`.

    So a run folder's `layers: [{name: qk_rope, kind: rotary, ...}, {name: nope, ...}]` needs no other file. Mappings in
    those lists stay, with theirs expanded. A kind that is a class in a file is looked up there, and names its row.

    Arguments: within, the names of the rows that this one is part of.
    Raises: ConfigError for an unknown row, and for a row that contains itself.
    """
    if not isinstance(scheme, dict):
        return scheme
    if names_file(scheme.get("kind")):
        row = row_of_file(scheme["kind"])
        scheme = {"name": row["name"], **scheme, "kind": row["kind"]}
    rows: dict[str, Any] = {}  # a row that is named twice is read once

    def part(value: Any) -> Any:
        if not isinstance(value, str):
            return expand(value, within)
        if value in within:
            raise ConfigError(
                f"the scheme {value!r} contains itself: {' -> '.join((*within, value))}; break that circle"
            )
        if value not in rows:
            hydra = HydraConfig.get()
            words: Any = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
            loader = GlobalHydra.instance().config_loader()
            composed = loader.load_configuration(
                hydra.job.config_name, [*words, hydra_word(f"scheme={value}")], RunMode.RUN
            )
            row: Any = OmegaConf.to_container(composed, resolve=False)
            rows[value] = expand(row["scheme"], (*within, value))
        return rows[value]

    return {
        option: [part(value) for value in values] if option in _LISTS_OF_ROWS and isinstance(values, list) else values
        for option, values in scheme.items()
    }


def read_row(name: str, *folders: Path) -> SchemeConfig:
    """A row of `conf/scheme` or of `folders`, or of a file of one's own, without a whole configuration around it.

    Raises: ConfigError for an unknown name, and for what its file says wrongly.
    """
    if names_file(name):
        row = tidy(row_of_file(name))
        name_files(row)
        return SchemeConfig.from_mapping(row)
    files = choice_files("scheme", *folders)
    if name not in files:
        raise ConfigError(no_scheme(name, files))
    with explained():
        content: Any = OmegaConf.to_container(OmegaConf.load(files[name]))
    if any(option in content for option in _LISTS_OF_ROWS):
        with session([f"--config-dir={folder}" for folder in folders]):
            content = expand(content)
    return SchemeConfig.from_mapping(content)


# ---------------------------------------------------------------- what was refused, in plain words

_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


@contextmanager
def explained() -> Iterator[None]:
    """Raise a ConfigError in plain words in place of what is raised within; an OSError of a file stays one."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Hydra's, OmegaConf's, YAML's and bare ones
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            raise
        raise ConfigError(explain(error)) from error


def explain(error: BaseException) -> str:
    """One line of cause, value and remedy, with the nearest valid name."""
    text = str(error) or type(error).__name__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_choice(str(error.missing_cfg_file), error.options or ())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OverrideParseException):
        return _no_override(str(error.override))
    if wrong := re.search(r"Could not override '([^']*)'", text):
        return _no_setting(wrong[1])
    if wrong := re.search(r"Error merging override (.+)", text):
        return f"{wrong[1]} is refused: {_plain(str(error.__cause__ or 'the value does not fit'))}"
    if wrong := re.search(r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires", text):
        return f"{wrong[1] or wrong[2]} contains several values: sweep over them with -m, or write a list as [1,2]"
    cause = error.__cause__ or error.__context__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        file = re.match(r"In '(.+?)':", text)
        return explain(cause) + (f" (in {file[1]}.yaml)" if file else "")
    key = getattr(error, "full_key", None) or ""
    if isinstance(error, MissingMandatoryValue):
        remedy = f"one of {', '.join(choices(key))}" if choices(key) else "posbench train --cfg job shows all settings"
        return f"{key} is missing: give {key}=... ({remedy})"
    if isinstance(error, ConfigKeyError):
        return _no_setting(key)
    if text.startswith("Config group override must be"):
        return f"one of {', '.join(f'{group}=' for group in GROUPS)} is null: give it the name of a choice"
    return _plain(text) + (f" ({key})" if key else "")


def _plain(text: str) -> str:
    """OmegaConf's words about a type in ours."""
    line = text.splitlines()[0]
    if wrong := re.search(r"Value '(.*?)' .*could not be converted to (\w+)", line):
        return f"{wrong[1]!r} is not {_TYPES.get(wrong[2], wrong[2])}"
    if wrong := re.search(r"Value '(.*?)' is not a valid bool", line):
        return f"{wrong[1]!r} is not true or false"
    if "does not support deletion" in line:
        return "a setting cannot be removed, only set: key=value"
    return "it cannot be null" if "not Optional" in line else line


def _no_choice(path: str, options: Sequence[str]) -> str:
    group, _, name = path.rpartition("/")
    known = [option for option in options or choices(group) if option != "schema"]
    if not group:
        return f"there is no root {path}.yaml{nearest(name, known)}: leave --config-name out, or give its folder too"
    if group == "scheme":
        return no_scheme(name, known)
    return (
        f"{group}={name} does not exist{nearest(name, known)} (conf/{group} contains {', '.join(known)}; put your own "
        f"into FOLDER/{group} and give --config-dir FOLDER)"
    )


def no_scheme(name: str, known: Iterable[str]) -> str:
    """That `scheme=rope` does not exist, with the scheme that was probably meant."""
    hint = nearest(_MEANT.get(name, name), known)
    return (
        f"scheme={name} does not exist{hint} (posbench schemes lists them; one of your own is a class in a file, "
        "scheme=my_scheme.py:Name, or FOLDER/scheme/mine.yaml with --config-dir FOLDER)"
    )


def _no_override(word: str) -> str:
    """That `vo_rope` alone is not an override, with the group that has such a choice."""
    if "=" in word:
        hint = "; put a value with spaces, commas, brackets or quotes in quotes: key='\"my value\"'"
    else:
        group = next((group for group in GROUPS if word in choices(group)), "scheme" if names_file(word) else None)
        hint = f"; did you mean {group}={word}?" if group else ""
    return f"{word!r} is not an override: write key=value, such as scheme=vo_rope or train.lr=1e-3{hint}"


def _no_setting(key: str) -> str:
    return f"there is no setting {key!r}{nearest(key, settings())} (posbench train --cfg job shows them all)"


# ---------------------------------------------------------------- completion


def complete(incomplete: str) -> list[str]:
    """Hydra's completions of a word: `scheme=v` -> `scheme=v_rope`, `scheme=vo_rope`."""
    with _hydra() as loader:
        words = _Completion(loader).words(incomplete)
    return [word for word in words if not word.startswith("schema")]


class _Completion(DefaultCompletionPlugin):
    """A shell of our own: completions as a list, where those of Hydra's shells print them."""

    def words(self, line: str) -> list[str]:
        return list(self._query(config_name="config", line=line))
