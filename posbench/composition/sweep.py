"""What a sweep would run: the values of each key, the words of each job, and which run folders they would have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from posbench.composition.choices import GROUPS
from posbench.composition.compose import composition, typed
from posbench.composition.explain import explained
from posbench.composition.session import session
from posbench.composition.words import Words, parse, read, refuse_words
from posbench.config import ConfigError

_MOST_JOBS = 10_000  # of a sweep: the words of all of them stand in memory

Names = tuple[str, ...]  # experiment, scheme, seed: what names a run folder


def sweep_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key that `posbench train -m WORDS` would sweep.

    Those in the words, and those of an experiment that they name.

    Returns: key -> its values as words of the command line, `{"scheme": ["nope", "qk_rope"], "seed": ["0", "1"]}`.
    Raises: ConfigError for what Hydra would refuse.
    """
    given = read(words)
    with explained(given):
        overrides = given.parsed()
        params = params_of(composition(given.only(settled(overrides))), given)
        with session() as loader:
            values = swept_values(params, given, loader)
    fixed = {override.get_key_element() for override in overrides if not override.is_sweep_override()}
    return {key: [word.partition("=")[2] for word in of_key] for key, of_key in values.items() if key not in fixed}


def settled(overrides: Sequence[Override]) -> list[str]:
    """The words that hold for every job: those that name one value."""
    return [str(override.input_line) for override in overrides if not override.is_sweep_override()]


def params_of(composed: DictConfig, words: Words) -> dict[str, str]:
    """The sweep of the experiment that the words name, `hydra.sweeper.params`.

    The default experiment's is not taken: `posbench train -m seed=0,1` is two runs. Of `hydra.sweeper.params` then
    those that the words give themselves remain.
    """
    params = dict(OmegaConf.select(composed, "hydra.sweeper.params") or {})
    if words.name_an_experiment:
        return params
    keys = [word.lstrip("+").partition("=")[0] for word in words.overrides]
    return {key: value for key, value in params.items() if f"hydra.sweeper.params.{key}" in keys}


def swept_values(params: Mapping[str, str], words: Words, loader: ConfigLoader) -> dict[str, list[str]]:
    """Key -> its words, one a value, `{"seed": ["seed=0", "seed=1"]}`; the last word of a key decides.

    Arguments: params, the experiment's own sweep; loader, which lists the choices that a `glob(*)` stands for.
    Raises: ConfigError for words that are refused and for more than 10,000 jobs; Hydra's errors.
    """
    own = [f"{key}={value}" for key, value in params.items()]
    refuse_words(own)
    last: dict[str, Override] = {}
    for override in parse([*own, *words.overrides], words.folder):
        override.config_loader = loader
        last[override.get_key_element()] = override
    sizes = {key: count for key, override in last.items() if (count := _count(override)) != 1}
    if (jobs := math.prod(sizes.values())) > _MOST_JOBS:
        raise ConfigError(
            f"a sweep of {jobs:,.0f} jobs ({', '.join(f'{count:,.0f} of {key}' for key, count in sizes.items())}) is "
            f"more than {_MOST_JOBS:,}: sweep over fewer values, or sweep in parts"
        )
    return {
        key: [f"{key}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for key, override in last.items()
    }


def jobs_of(values: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The words of each job: every combination of values, the last key's changing fastest."""
    return [list(words) for words in itertools.product(*values.values())]


def branch_words(composed: DictConfig, words: Words) -> list[list[str]]:
    """The words that make each branch of a job that is a trunk; none of a job that will be refused when it runs."""
    if not OmegaConf.select(composed, "train.branch_tokens"):
        return []
    try:
        return typed(composed, words).branch_words()
    except ConfigError:
        return []


def names_of(composed: DictConfig) -> Names:
    """What names the run folder: experiment, scheme, seed. Raises: OmegaConf's, for a reference to nothing."""
    return tuple(str(OmegaConf.select(composed, key)) for key in ("experiment_name", "scheme.name", "seed"))


def run_name(composed: DictConfig) -> str:
    """`demo/vo_rope/seed=0`: the run's folder below the runs folder. Raises: as `names_of`."""
    experiment, scheme, seed = names_of(composed)
    return f"{experiment}/{scheme}/seed={seed}"


def describe(jobs: Sequence[tuple[Sequence[str], Names]]) -> str:
    """`22 runs: 11 schemes x 2 seeds`, of the words and the names of each job.

    Raises: ConfigError where two jobs of different words have one run folder.
    """
    words_of: dict[Names, Sequence[str]] = {}
    for words, names in jobs:
        other = words_of.setdefault(names, words)
        if other != words:
            raise _clash(names, other, words)
    counts = [len(set(values)) for values in zip(*words_of, strict=True)]
    named = [
        f"{count} {what}{'s' * (count > 1)}"
        for count, what in zip(counts, ("experiment", "scheme", "seed"), strict=True)
        if count > 1 or what != "experiment"
    ]
    total = len(words_of)
    return f"{total} run{'s' * (total > 1)}: {(' x ' if math.prod(counts) == total else ', ').join(named)}"


def _clash(names: Names, one: Sequence[str], other: Sequence[str]) -> ConfigError:
    """The refusal of two jobs of one run folder, with a way to name them apart."""
    keys = [word.partition("=")[0] for word in other if word not in one]
    name = "_".join([names[0], *(f"{key.rpartition('.')[2]}_${{{key}}}" for key in keys)])
    remedy = f"give them different names, such as 'experiment_name={name}' (with the quotes)"
    if any(key in GROUPS for key in keys):
        remedy = "give each its own command, with experiment_name=... to name it"
    return ConfigError(
        f"two runs of this sweep would share the folder {'/'.join(names[:2])}/seed={names[2]}: "
        f"{' '.join(word for word in one if word not in other)} and "
        f"{' '.join(word for word in other if word not in one)}; {remedy}"
    )


def _count(override: Override) -> float:
    """How many values it names, counted without listing them."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if isinstance(value, RangeSweep) and value.start is not None and value.stop is not None and value.step:
        return max(0.0, math.ceil(min((float(value.stop) - float(value.start)) / float(value.step), 1e300)))
    return 1
