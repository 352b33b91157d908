"""From words such as `scheme=vo_rope` to a typed, checked `Config`: where Hydra ends and posbench begins.

Hydra composes the YAML files of `conf/` over the dataclasses of `posbench.config` (so that an unknown field or a wrong
type is refused), then `typed` turns the result into a `Config`, whose own rules check the values.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
import hydra._internal.hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from posbench.composition.inert import InertLoader, check_inert, refuse_flags, refuse_folder, refuse_many, refuse_words
from posbench.config import Config, ConfigError, nearest
from posbench.machine.files import write_json
from posbench.machine.signals import Stopped, environment_number


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices(group: str, *folders: Path) -> list[str]:
    """The names that `group=` accepts, such as every scheme of `conf/scheme`, and those of folders of the user's."""
    return sorted({path.stem for folder in (conf_dir(), *folders) for path in (folder / group).glob("*.yaml")})


def register_schema() -> None:
    """Tell Hydra the dataclasses, in a group of their own so that `scheme=glob(*)` does not sweep them."""
    ConfigStore.instance().store(group="schema", name="posbench", node=Config, provider="posbench")


def typed(composed: DictConfig) -> Config:
    """The composed mapping as a checked `Config`.

    Raises: ConfigError for an unknown field, a wrong type, a missing value or a value out of its range, and for what is
    no plain data (`posbench.composition.inert`).
    """
    check_inert(OmegaConf.to_container(composed, resolve=False, throw_on_missing=False))
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    return checked(plain)


def checked(mapping: dict[str, Any]) -> Config:
    """A mapping of plain data, such as a run folder's config.yaml, as a checked `Config`. Raises: as `typed`."""
    check_inert(mapping, resolved=True)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(mapping)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    return config


def compose(overrides: Sequence[str] = ()) -> Config:
    """A typed config from the words of the command line; `--config-dir=FOLDER` adds choices of one's own.

    Example: `compose(["scheme=vo_rope", "model=tiny", "seed=3"])`.
    Raises: ConfigError for anything the command line would refuse.
    """
    folder = [word for word in overrides if word.startswith(_FOLDER)]
    overrides, added = _with_folder(overrides)
    _refuse_words(overrides)
    with _composer():
        try:
            composed = hydra_compose("config", overrides=[*overrides, *added])
        except Exception as error:  # Hydra's, OmegaConf's, YAML's and bare ones
            raise ConfigError(explain(error, [*overrides, *folder])) from error
        return typed(composed)


def sweep_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key that `posbench train -m WORDS` would sweep: the experiment's own, and those in the words.

    Returns: key -> its values as words of the command line, `{"scheme": ["nope", "qk_rope"], "seed": ["0", "1"]}`.
    Raises: ConfigError for what Hydra would refuse.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    folder = [word for word in words if word.startswith(_FOLDER)]
    words, added = _with_folder(words)
    _refuse_words(words)
    try:
        refuse_many(words)
        given = OverridesParser.create().parse_overrides(list(words))
        swept = {o.key_or_group: list(o.sweep_string_iterator()) for o in given if o.is_sweep_override()}
        settled = [str(o.input_line) for o in given if not o.is_sweep_override()]
        with _composer():
            composed = hydra_compose("config", overrides=[*settled, *added], return_hydra_config=True)
        params = dict(OmegaConf.select(composed, "hydra.sweeper.params") or {})
        refuse_many([*(f"{key}={value}" for key, value in params.items()), *words])
        own = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    except Exception as error:  # Hydra's, OmegaConf's, YAML's and bare ones
        raise ConfigError(explain(error, [*words, *folder])) from error
    named = {o.key_or_group for o in given}
    of_experiment = {
        o.key_or_group: list(o.sweep_string_iterator())
        if o.is_sweep_override()
        else [str(o.get_value_element_as_str())]
        for o in own
        if o.key_or_group not in named
    }
    return of_experiment | swept


_FOLDER = "--config-dir="


def _with_folder(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides among the words, and what Hydra is told of a `--config-dir=FOLDER` among them."""
    folders = [Path(word.removeprefix(_FOLDER)) for word in words if word.startswith(_FOLDER)]
    for folder in folders:
        refuse_folder(folder)
    quoted = [str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'") for folder in folders]
    added = [f"hydra.searchpath=['file://{place}']" for place in quoted[-1:]]
    return [word for word in words if not word.startswith(_FOLDER)], added


def _refuse_words(words: Sequence[str]) -> None:
    refuse_words(words)
    _refuse_options(words)
    for word in words:
        group, _, value = word.partition("=")
        if group in _GROUPS and (value == "null" or value.startswith("[")):
            raise ConfigError(f"{word!r}: {group} takes the name of one choice: {', '.join(choices(group))}")


def _refuse_options(words: Sequence[str]) -> None:
    """Of `--model tiny`, which is written `model=tiny`."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        key, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (key.partition(".")[0] in _GROUPS or key in ("seed", "runs_dir")):
            value = value or (following if not following.startswith("-") else "")
            raise ConfigError(f"{word!r} is no option; did you mean {key}={value or '...'}?")


@contextmanager
def _composer() -> Iterator[None]:
    register_schema()
    GlobalHydra.instance().clear()
    folder = str(conf_dir())
    with _inert_hydra(lambda text: None), initialize_config_dir(folder, version_base="1.3", job_name="posbench"):
        yield


def explain(error: Exception, words: Sequence[str] = ()) -> str:
    """One line of cause, value and remedy for what Hydra or OmegaConf refused, with the nearest valid name.

    Arguments: words, of the command, which say what scheme's options there are.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = [name for name in error.options or choices(group) if name != "schema"]
        return f"{group}={name} is not there{nearest(name, known)} (conf/{group} holds {', '.join(known)})"
    if wrong := re.search(r"Could not override '([^']+)'", text):
        return no_setting(wrong[1], words)
    if wrong := re.search(r"Error merging override (.+)", text):
        return f"{wrong[1]} is refused: {_told(str(error.__cause__ or 'the value does not fit'))}"
    if wrong := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{wrong[1]} holds several values: sweep over them with -m, or write a list as [1,2]"
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        hints = [f"; did you mean {group}={word}?" for group in _GROUPS if word in choices(group)]
        if "=" in word:
            hints = ["; put a value with spaces, commas, brackets or letters beyond a-z in quotes: key='\"my value\"'"]
        hint = hints[0] if hints else ""
        return f"{word!r} is no override: write key=value, such as scheme=vo_rope or train.lr=1e-3{hint}"
    key = getattr(error, "full_key", None) or ""
    if isinstance(error, MissingMandatoryValue):
        return (
            f"{key} is missing: give {key}=..., such as one of {', '.join(choices(key)) or 'posbench train --cfg job'}"
        )
    if isinstance(error, ConfigKeyError):
        return no_setting(key, words)
    return _told(text) + (f" ({key})" if key else "")


_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


def _told(text: str) -> str:
    """OmegaConf's words about a type in ours."""
    line = text.splitlines()[0]
    if wrong := re.search(r"Value '(.*?)' .*could not be converted to (\w+)", line):
        return f"{wrong[1]!r} is not {_KINDS.get(wrong[2], wrong[2])}"
    if wrong := re.search(r"Value '(.*?)' is not a valid bool", line):
        return f"{wrong[1]!r} is not true or false"
    if "does not support deletion" in line:
        return "a setting cannot be taken away, only set: key=value"
    return "it cannot be null" if "not Optional" in line else line


def no_setting(key: str, words: Sequence[str] = ()) -> str:
    """That there is no such key, with the nearest."""
    known = _settings(words)
    if key not in known and key in _settings():  # with the scheme of conf/config.yaml
        return f"the scheme that is chosen has no option {key!r} (posbench train --cfg job shows those it has)"
    return f"there is no setting {key!r}{nearest(key, known)} (posbench train --cfg job shows them all)"


_GROUPS = ("scheme", "model", "data", "tokenizer", "train", "evaluation", "tracking", "launch", "experiment")


def _settings(words: Sequence[str] = ()) -> list[str]:
    """Every key that can be overridden, as `group` or `group.field`; `+scheme.option` where its YAML leaves it out."""
    from posbench.schemes import SCHEMES

    register_schema()
    try:
        config = compose([word for word in words if word.startswith(("scheme=", _FOLDER)) and "," not in word])
        options = list(inspect.signature(SCHEMES[config.scheme.kind]).parameters)[1:]
    except (ConfigError, KeyError):  # it is told in its turn
        config, options = compose(), []
    mapping = config.to_mapping()
    keys = [*_GROUPS, *(f"+scheme.{option}" for option in options if option not in mapping["scheme"])]
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


def run_application(
    program: str, words: Sequence[str], job: Callable[[DictConfig], object], say: Callable[[str], object]
) -> list[str]:
    """Run `job` as a Hydra application: overrides, `-m` sweeps, `--cfg job`, launchers.

    Hydra takes flags before overrides only, so those are moved to the end. In a sweep a job that fails does not keep
    the others from running. `say` is told what a sweep will run, each failure when it happens, and all of them again
    where the sweep is interrupted.
    Returns: a line for each job of a sweep that failed.
    Raises: ConfigError for anything Hydra refuses, where two jobs of a sweep would share a run folder, and where every
    job of a sweep raised it; what the job of a single run raises; Stopped for Ctrl-C between two runs.
    """
    register_schema()
    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not word.startswith("-")]
    _refuse_options(words)
    _refuse_words(overrides)
    sys.argv = [program, *(word for word in words if word not in overrides), *overrides]
    given = get_args_parser().parse_args(sys.argv[1:])  # exits with status 2 and its usage for an unknown flag
    refuse_flags(given)
    if given.multirun and environment_number("WORLD_SIZE", 1) > 1:
        raise ConfigError(
            "a sweep (-m) under torchrun: the runs of one process group would meet the next one's. Give each run a "
            "torchrun of its own, or sweep with launch.nproc=..."
        )
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, instead of Hydra's own print and exit
    failures: list[tuple[str, Exception]] = []
    done = 0
    here = (socket.gethostname(), os.getpid())
    journal = f"jobs-{os.getpid()}-{secrets.token_hex(4)}"  # of jobs in processes that a launcher starts

    already_said: set[str] = set()
    is_sweep = given.multirun

    def carried_out(composed: DictConfig) -> None:
        nonlocal done
        name = "a job"
        with suppress(OmegaConfBaseException):  # of a value that refers to nothing: the job says so
            name = "/".join(_names(composed))
        failure: Exception | None = None
        try:
            job(composed)
        except Exception as error:
            failure = error
        except Stopped as stopped:
            if (socket.gethostname(), os.getpid()) == here:
                raise
            failure = RuntimeError(str(stopped))  # one worker was told to stop: the other jobs go on
        if failure and is_sweep and str(failure) not in already_said:
            already_said.add(str(failure))
            say(f"{name}: {failure}")
        if (socket.gethostname(), os.getpid()) != here:
            _journalise(Path(str(composed.runs_dir)) / ".hydra" / journal, name, failure)
            return
        failures.extend([(name, failure)] if failure else [])
        done += 1

    lost: Exception | None = None
    interrupted: BaseException | None = None
    elsewhere: list[tuple[str, Any]] = []
    with _inert_hydra(say) as loaders:
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(carried_out)()
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, MissingConfigException):
                raise
            lost = error  # of a launcher whose worker was killed, say: what the others have told is told too
        except (Stopped, KeyboardInterrupt) as error:
            interrupted = error
        finally:
            elsewhere = [entry for loader in loaders for entry in _read_journal(loader, journal)]
            done += len(elsewhere)
            failures += [entry for entry in elsewhere if entry[1] is not None]
            if done == len(failures):
                for loader in loaders:
                    loader.remove_sweep_folder()
    if interrupted is not None:
        for line in _lines(failures):
            say(f"posbench: {line}")
        if done and isinstance(interrupted, KeyboardInterrupt):
            raise Stopped(signal.SIGINT, "interrupted between two runs: give the same command again to go on")
        raise interrupted
    if lost is not None:
        if not elsewhere:
            folder = [f"{_FOLDER}{given.config_dir}"] if given.config_dir else []
            raise ConfigError(explain(lost, [*overrides, *folder])) from lost
        failures.append(("the launcher", RuntimeError(_told(f"{type(lost).__name__}: {lost}"))))
    shown = given.cfg or given.info or given.hydra_help or given.shell_completion
    if failures and not given.multirun:
        raise failures[0][1]
    if not done and not shown:
        swept = " ".join(word for word in overrides if "," in word or "(" in word)
        raise ConfigError(f"no run comes of {swept}: nothing matches, see the names in conf/")
    if len(failures) == done and len({str(error) for _, error in failures}) == 1:
        raise failures[0][1]  # of the words, not of one job
    return _lines(failures)


def _lines(failures: Sequence[tuple[str, Exception]]) -> list[str]:
    told = (ConfigError, _Elsewhere)
    kinds = ["" if isinstance(error, told) else f"{type(error).__name__}: " for _, error in failures]
    return [f"{name}: {kind}{error}" for kind, (name, error) in zip(kinds, failures, strict=True)]


def _names(composed: DictConfig) -> tuple[str, ...]:
    """What names the run folder: experiment, scheme, seed."""
    return tuple(str(OmegaConf.select(composed, key)) for key in ("experiment_name", "scheme.name", "seed"))


def _describe_sweep(jobs: Sequence[tuple[Sequence[str], tuple[str, ...]]]) -> str:
    """`22 runs: 11 schemes x 2 seeds`, of the words and the names of each job.

    Raises: ConfigError where two jobs of different words have one run folder.
    """
    words_of: dict[tuple[str, ...], Sequence[str]] = {}
    for words, names in jobs:
        other = words_of.setdefault(names, words)
        if other == words:
            continue
        keys = [word.partition("=")[0] for word in words if word not in other]
        name = "_".join([names[0], *(f"{key.rpartition('.')[2]}_${{{key}}}" for key in keys)])
        remedy = f"name them apart, such as 'experiment_name={name}' (with the quotes)"
        if any(key in _GROUPS for key in keys):
            remedy = "give each its own call, with experiment_name=... to name it"
        raise ConfigError(
            f"two runs of this sweep would have one folder, {'/'.join(names[:2])}/seed={names[2]}: "
            f"{' '.join(word for word in other if word not in words)} and "
            f"{' '.join(word for word in words if word not in other)}; {remedy}"
        )
    counts = [len(set(values)) for values in zip(*words_of, strict=True)]
    named = [
        f"{count} {what}{'s' * (count > 1)}"
        for count, what in zip(counts, ("experiment", "scheme", "seed"), strict=True)
        if count > 1 or what != "experiment"
    ]
    total = len(words_of)
    return f"{total} run{'s' * (total > 1)}: {(' x ' if math.prod(counts) == total else ', ').join(named)}"


def _journalise(journal: Path, name: str, failure: Exception | None) -> None:
    """A file for a job that ended in another process than the sweep's: lines of a common one can tear on a network."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    own = isinstance(failure, ConfigError)
    told = {"name": name, "kind": None if failure is None else type(failure).__name__, "own": own, "text": str(failure)}
    write_json(journal.with_name(f"{journal.name}-{time.time_ns()}-{secrets.token_hex(4)}.json"), told)


def _read_journal(loader: InertLoader, name: str) -> list[tuple[str, Any]]:
    """The name of each job in the journal, and its failure or None; the journal is taken away."""
    files = sorted(loader.sweep_folder.glob(f"{name}-*.json")) if loader.sweep_folder else []
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in files:
        file.unlink()
    return [
        (job["name"], job["kind"] and (ConfigError(job["text"]) if job["own"] else _Elsewhere(**job))) for job in told
    ]


class _Elsewhere(Exception):
    """A job's error that was no ConfigError, as its process told it."""

    def __init__(self, kind: str, text: str, **rest: Any) -> None:
        super().__init__(f"{kind}: {text}")


@contextmanager
def _inert_hydra(say: Callable[[str], object]) -> Iterator[list[InertLoader]]:
    """Hydra with our loader in place of its own; a sweep is described before its first job. Yields: the loaders."""
    loaders: list[InertLoader] = []

    def make(config_search_path: ConfigSearchPath) -> InertLoader:
        loaders.append(InertLoader(config_search_path))
        return loaders[-1]

    def check(sweeper: Any, batch: Sequence[Sequence[str]]) -> None:
        """In place of Hydra's, which composes a batch's jobs to see that it can: all batches, with the first."""
        if sweeper.batch_index == 1:
            compose_job = sweeper.hydra_context.config_loader.load_sweep_config
            jobs = [words for words_of_batch in sweeper.overrides for words in words_of_batch]
            composed = [compose_job(sweeper.config, list(words)) for words in jobs]  # all, before one is asked
            named = [(words, _names(job)) for words, job in zip(jobs, composed, strict=True)]
            if named:
                say(_describe_sweep(named))

    validate = Sweeper.validate_batch_is_legal
    Sweeper.validate_batch_is_legal = check  # type: ignore[method-assign,assignment]
    original = hydra._internal.hydra.ConfigLoaderImpl
    hydra._internal.hydra.ConfigLoaderImpl = make  # type: ignore[misc,assignment]
    try:
        yield loaders
    finally:
        hydra._internal.hydra.ConfigLoaderImpl = original  # type: ignore[misc]
        Sweeper.validate_batch_is_legal = validate  # type: ignore[method-assign]
