"""`posbench tune`: a learning rate for each scheme of an experiment, searched alike, on text that no table scores.

    runs/demo-tune/lr=0.005/<scheme>/seed=1000/    a pilot: an ordinary run of the experiment, at full length
    runs/demo/rates.csv                            a row a scheme and rate; in packs and reports of demo

The rule (docs/statistics.md): all schemes are trained at half, once and twice `train.lr`. Where the best rate of one of
them is the lowest or the highest, the next one is tried for all. A pilot has a seed that is not scored. Its loss is of
documents that are taken out of the train text (`data.tuning_fraction`), or of problems at trained lengths.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from posbench.composition.compose import compose, quoted
from posbench.composition.sweep import run_application, sweep_of
from posbench.config import Config, ConfigError
from posbench.config.units import count_of
from posbench.reporting.statistics import best_rate
from posbench.reporting.tables import rate_table
from posbench.runs import DIED, FINISHED, Run, run_at, state_of
from posbench.runs.pack import RATES
from posbench.system.console import Say, plain_table
from posbench.system.files import write_text
from posbench.training import Died

SEED = 1000  # of the first pilots; further ones have the next
FACTOR = 2.0  # between two rates
MOST_WIDER = 3  # rates beyond the first three, on each side
HOPELESS = 0.5  # nats: a row that is as much worse at the lowest or highest rate is not trained beyond it
DISCARDED = "discarded"  # the status of a rate that was not trained for that reason

Rates = dict[float, float]  # learning rate -> loss in nats/token; infinite where the pilot died


@dataclass(frozen=True)
class Tuning:
    """What is tuned: an experiment's words, its schemes and where the pilots are."""

    words: tuple[str, ...]  # of the experiment
    pilot: tuple[str, ...]  # the words that make a pilot, but for its scheme, rate and seed
    schemes: dict[str, str]  # choice of conf/scheme -> name
    folder: Path  # of the experiment
    config: Config  # of the first scheme
    seeds: int  # of pilots

    def runs(self, scheme: str, lr: float) -> list[Run]:
        """The pilots of a scheme at a rate, in folders or packs."""
        folder = self.folder.with_name(f"{self.folder.name}-tune") / f"lr={lr!r}" / scheme
        return [run_at(folder / f"seed={SEED + n}") for n in range(self.seeds)]


def tune(
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Say,
    console: Console,
    fraction: float = 0.05,
    seeds: int = 1,
) -> dict[Path, pd.DataFrame]:
    """Train the pilots that are missing, print and store the tables, and return them by the experiments' folders.

    Arguments: words, as after `posbench train -m`; job, what trains a run; say, called with what a sweep will run;
    fraction, the part of the train documents that pilots are scored on; seeds, of pilots, whose mean losses choose.
    Raises: ConfigError for words that are refused, and where a pilot was neither finished nor died.
    """
    swept = sweep_of(words)
    if any(word.startswith("train.from_run=") for word in words):
        raise ConfigError("posbench tune searches rates of runs from their first step: leave out train.from_run")
    several = [key for key in swept if key not in ("scheme", "seed", "data")]
    tunings = [] if several else [_tuning(words, swept, data, fraction, seeds) for data in swept.get("data", [""])]
    if len({tuning.folder for tuning in tunings}) < len(tunings):
        several.append("data (under one experiment_name)")
    if several:
        raise ConfigError(
            f"posbench tune sweeps learning rates over schemes, so {', '.join(several)} cannot be swept too: give one "
            "value"
        )
    return {tuning.folder: _search(tuning, job, say, console) for tuning in tunings}


def wider_rates(losses: Mapping[str, Rates], lr: float) -> dict[float, list[str]]:
    """Rate -> the schemes to train at it next: beyond the lowest or highest rate, where that is the best of a scheme.

    All schemes but those that are HOPELESS there. Empty where every best rate lies inside, or at the limit.
    """
    tried = sorted({rate for rates in losses.values() for rate in rates})
    limit = FACTOR ** (1 + MOST_WIDER) * 1.001
    wanted = {}
    for edge, rate in ((tried[0], tried[0] / FACTOR), (tried[-1], tried[-1] * FACTOR)):
        is_best = any(best_rate(rates) == edge for rates in losses.values())
        if is_best and lr / limit < rate < lr * limit:
            near = [(scheme, rates) for scheme, rates in losses.items() if edge in rates]
            wanted[rate] = [s for s, rates in near if _is_promising(rates, edge, rate)]
    return wanted


def _is_promising(rates: Rates, edge: float, beyond: float) -> bool:
    """Whether a scheme is trained beyond its lowest or highest rate; lower ones are tried where all pilots died."""
    lowest = min(rates.values())
    return rates[edge] < lowest + HOPELESS if lowest < math.inf else beyond < edge


def _tuning(words: Sequence[str], swept: Mapping[str, list[str]], data: str, fraction: float, seeds: int) -> Tuning:
    """What the words name, for one of the swept tasks."""
    of_data = [word for word in words if word.partition("=")[0] != "data"] + [f"data={data}"] if data else words
    named = [word.partition("=")[2] for word in words if word.startswith("scheme=")]
    choices = swept.get("scheme", named[-1:] or ["qk_rope"])
    given = [word for word in of_data if word.partition("=")[0] not in ("scheme", "seed")]
    config = compose([*given, "train.branch_tokens=[]", f"scheme={choices[0]}"])  # pilots may be shorter than branches
    folder = Path(config.runs_dir) / config.experiment_name
    pilot = (
        *given,
        f"runs_dir={quoted(f'{folder}-tune')}",
        "experiment_name='lr=${train.lr}'",
        *config.data.tuning_words(fraction),
        "train.branch_tokens=[]",
        "train.lr_of=null",
    )
    schemes = {choice: compose([*pilot, f"scheme={choice}"]).scheme.name for choice in choices}
    return Tuning(tuple(of_data), pilot, schemes, folder, config, seeds)


def _search(tuning: Tuning, job: Callable[[Config], object], say: Say, console: Console) -> pd.DataFrame:
    """Train pilots until every scheme's best rate lies inside of those tried, or at the limit."""
    lr, choices = tuning.config.train.lr, {name: choice for choice, name in tuning.schemes.items()}
    wanted = {rate: list(choices) for rate in (lr / FACTOR, lr, lr * FACTOR)}
    losses: dict[str, Rates] = {name: {} for name in choices}
    seeds = f"seed={','.join(str(SEED + n) for n in range(tuning.seeds))}"
    while wanted:
        together: dict[tuple[str, ...], list[float]] = {}  # rates for the same schemes: one sweep trains them
        for rate, names in wanted.items():
            together.setdefault(tuple(names), []).append(rate)
        for of_sweep, rates in together.items():
            sweep = [f"scheme={','.join(choices[name] for name in of_sweep)}", f"train.lr={','.join(map(repr, rates))}"]
            with suppress(Died):  # the only pilot, or all of them in the same words
                run_application("posbench tune", ["-m", *tuning.pilot, seeds, *sweep], job, say)
            for name in of_sweep:
                losses[name] |= {rate: _loss(tuning.runs(name, rate)) for rate in rates}
        found = _stored(tuning, losses)  # what a kill leaves
        wanted = wider_rates(losses, lr)
    _show(tuning, losses, found, console)
    return found


def _loss(pilots: Sequence[Run]) -> float:
    """Their mean. Raises: ConfigError where one was cut off, or its words were refused."""
    losses = []
    for pilot in pilots:
        state, loss = state_of(pilot), None
        if state not in (FINISHED, DIED):
            raise ConfigError(
                f"{pilot.path} is {state}: see its message above, and run the same command again to resume"
            )
        if state == FINISHED:
            loss = pilot.manifest.loss
        losses.append(math.inf if loss is None else loss)
    return math.fsum(losses) / len(losses)


def _stored(tuning: Tuning, losses: Mapping[str, Rates]) -> pd.DataFrame:
    """Write the schemes' rows of `rates.csv`, one for each rate, and return them. Those of other schemes stay."""
    rows = []
    for rate in sorted({rate for rates in losses.values() for rate in rates}):
        for scheme, rates in losses.items():
            loss = rates.get(rate, math.nan)
            status = DISCARDED if math.isnan(loss) else FINISHED if math.isfinite(loss) else DIED
            rows.append({"scheme": scheme, "train.lr": rate, "loss": loss, "status": status, "seeds": tuning.seeds})
    frame = pd.DataFrame(rows).replace(math.inf, math.nan)
    frame = frame.sort_values("scheme", key=lambda names: names.map(list(losses).index), kind="stable")
    path = tuning.folder / RATES
    before = pd.read_csv(path) if path.exists() else frame
    others = before[~before["scheme"].isin(list(losses))]
    write_text(path, pd.concat([others, frame] if len(others) else [frame]).to_csv(index=False))
    return frame


def _show(tuning: Tuning, losses: Mapping[str, Rates], found: pd.DataFrame, console: Console) -> None:
    """The table, what it does not say, and the command for runs at each scheme's best rate."""
    table = rate_table(found.assign(experiment="", trained_at=math.nan)).drop(columns="trained at")
    shown = plain_table(*table.columns)
    for row in table.to_numpy().tolist():
        shown.add_row(*row)
    console.print(shown)
    own = ",".join(f"{s}:{best_rate(rates)!r}" for s, rates in losses.items() if min(rates.values()) < math.inf)
    for line in (
        f"Validation loss of pilots of {count_of(tuning.seeds, 'seed')}, nats/{tuning.config.data.tuned_on}. "
        "A difference as small as those between seeds means nothing.",
        f"wrote {tuning.folder / RATES}",
        "To train each scheme at its best rate:",
        f"  posbench train -m {shlex.join([*tuning.words, f'train.lr_of={{{own}}}'])}",
    ):
        console.out(line)
