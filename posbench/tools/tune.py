"""Search a learning rate for each scheme of an experiment, on text that no table scores (`posbench tune`).

    runs/demo-tune/lr=0.005/<scheme>/seed=1000/    a pilot: an ordinary run of the experiment, at full length
    runs/demo/rates.csv                            one row per scheme and rate; also in packs and reports of demo

The rule is the same for all schemes (docs/statistics.md). They are trained at half, once and twice `train.lr`. If a
scheme's best rate is the lowest or the highest, the next rate is tried for all. Pilots use seeds that are not in result
tables. Their loss is measured on documents that are held out of the train text (`data.tuning_fraction`), or for tasks
on problems at trained lengths.
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

SEED = 1000  # first seed of the pilots
FACTOR = 2.0  # ratio of neighbouring rates
MOST_WIDER = 3  # number of rates to try beyond the first three, on each side
HOPELESS = 0.5  # nats: a scheme that is this much worse at the lowest or highest rate is not trained beyond it
DISCARDED = "discarded"  # the status of a rate that was not trained for this reason

Rates = dict[float, float]  # learning rate -> loss in nats/token; infinite if the pilot died


@dataclass(frozen=True)
class Tuning:
    """A search for the best learning rate of each scheme of one experiment."""

    words: tuple[str, ...]  # overrides of the experiment
    pilot: tuple[str, ...]  # overrides of a pilot, except its scheme, rate and seed
    schemes: dict[str, str]  # choice of conf/scheme -> name
    folder: Path  # the experiment's folder
    config: Config  # the first scheme's configuration
    seeds: int  # number of pilots per scheme and rate

    def runs(self, scheme: str, lr: float) -> list[Run]:
        """Return the pilot runs of a scheme at learning rate `lr`, one per seed, in folders or packs (zips)."""
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
    """Train the missing pilot runs, print and store the tables of losses by rate; return experiment folder -> table.

    Arguments: words, overrides as after `posbench train -m`; job, trains a run; say, prints what will be trained;
    fraction, the share of the train documents that pilots are scored on; seeds, pilots per scheme and rate, whose mean
    loss counts.
    Raises: ConfigError for words that are refused, and if a pilot neither finished nor diverged.
    """
    swept = sweep_of(words)
    if any(word.startswith("train.from_run=") for word in words):
        raise ConfigError("posbench tune searches rates for runs from their first step: leave out train.from_run")
    refused = [key for key in swept if key not in ("scheme", "seed", "data")]
    tunings = [] if refused else [_tuning(words, swept, data, fraction, seeds) for data in swept.get("data", [""])]
    if len({tuning.folder for tuning in tunings}) < len(tunings):
        refused.append("data (under one experiment_name)")
    if refused:
        raise ConfigError(
            f"posbench tune sweeps learning rates over schemes, so {', '.join(refused)} cannot be swept too: give one "
            "value"
        )
    return {tuning.folder: _search(tuning, job, say, console) for tuning in tunings}


def wider_rates(losses: Mapping[str, Rates], lr: float) -> dict[float, list[str]]:
    """Return learning rate -> schemes to train with it next. Empty if the search is done.

    If a scheme's best rate is the lowest or highest tried (in `losses`), the next rate beyond is tried, for all schemes
    but those that are HOPELESS at that edge, up to MOST_WIDER rates on each side of the first three around `lr`.
    """
    tried = sorted({rate for rates in losses.values() for rate in rates})
    limit = FACTOR ** (1 + MOST_WIDER) * 1.001
    schemes_by_rate = {}
    for edge, rate in ((tried[0], tried[0] / FACTOR), (tried[-1], tried[-1] * FACTOR)):
        is_best = any(best_rate(rates) == edge for rates in losses.values())
        if is_best and lr / limit < rate < lr * limit:
            candidates = [(scheme, rates) for scheme, rates in losses.items() if edge in rates]
            schemes_by_rate[rate] = [s for s, rates in candidates if _is_promising(rates, edge, rate)]
    return schemes_by_rate


def _is_promising(rates: Rates, edge: float, next_rate: float) -> bool:
    """Return True if a scheme should be trained at `next_rate`, beyond its lowest or highest tried rate `edge`.

    If all its pilots diverged, only lower rates are promising.
    """
    lowest_loss = min(rates.values())
    return rates[edge] < lowest_loss + HOPELESS if lowest_loss < math.inf else next_rate < edge


def _tuning(words: Sequence[str], swept: Mapping[str, list[str]], data: str, fraction: float, seeds: int) -> Tuning:
    """Return the search that the overrides `words` describe, with the choice `data` ("" if they do not sweep data)."""
    own_words = [word for word in words if word.partition("=")[0] != "data"] + [f"data={data}"] if data else words
    single = [word.partition("=")[2] for word in words if word.startswith("scheme=")]
    choices = swept.get("scheme", single[-1:] or ["qk_rope"])
    common = [word for word in own_words if word.partition("=")[0] not in ("scheme", "seed")]
    config = compose([*common, "train.branch_tokens=[]", f"scheme={choices[0]}"])  # pilots may be shorter than branches
    folder = Path(config.runs_dir) / config.experiment_name
    pilot = (
        *common,
        f"runs_dir={quoted(f'{folder}-tune')}",
        "experiment_name='lr=${train.lr}'",
        *config.data.tuning_words(fraction),
        "train.branch_tokens=[]",
        "train.lr_of=null",
    )
    schemes = {choice: compose([*pilot, f"scheme={choice}"]).scheme.name for choice in choices}
    return Tuning(tuple(own_words), pilot, schemes, folder, config, seeds)


def _search(tuning: Tuning, job: Callable[[Config], object], say: Say, console: Console) -> pd.DataFrame:
    """Train pilots until each scheme's best rate is inside the tried range or at its limit; return the loss table."""
    lr, choices = tuning.config.train.lr, {name: choice for choice, name in tuning.schemes.items()}
    schemes_by_rate = {rate: list(choices) for rate in (lr / FACTOR, lr, lr * FACTOR)}
    losses: dict[str, Rates] = {name: {} for name in choices}
    seeds = f"seed={','.join(str(SEED + n) for n in range(tuning.seeds))}"
    while schemes_by_rate:
        rates_by_schemes: dict[tuple[str, ...], list[float]] = {}  # one sweep trains all rates for the same schemes
        for rate, names in schemes_by_rate.items():
            rates_by_schemes.setdefault(tuple(names), []).append(rate)
        for schemes, rates in rates_by_schemes.items():
            sweep = [f"scheme={','.join(choices[name] for name in schemes)}", f"train.lr={','.join(map(repr, rates))}"]
            with suppress(Died):  # raised if the only pilot died, or all of them with the same message
                run_application("posbench tune", ["-m", *tuning.pilot, seeds, *sweep], job, say)
            for name in schemes:
                losses[name] |= {rate: _loss(tuning.runs(name, rate)) for rate in rates}
        table = _store(tuning, losses)  # in every pass, in case the process is killed
        schemes_by_rate = wider_rates(losses, lr)
    _show(tuning, losses, table, console)
    return table


def _loss(pilots: Sequence[Run]) -> float:
    """Return the pilots' mean loss, nats/token, infinity if one diverged. Raises: ConfigError if one is unfinished."""
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


def _store(tuning: Tuning, losses: Mapping[str, Rates]) -> pd.DataFrame:
    """Write these schemes' rows of `rates.csv`, one per scheme and rate, and return them. Other schemes' rows stay."""
    rows = []
    for rate in sorted({rate for rates in losses.values() for rate in rates}):
        for scheme, rates in losses.items():
            loss = rates.get(rate, math.nan)
            status = DISCARDED if math.isnan(loss) else FINISHED if math.isfinite(loss) else DIED
            rows.append({"scheme": scheme, "train.lr": rate, "loss": loss, "status": status, "seeds": tuning.seeds})
    frame = pd.DataFrame(rows).replace(math.inf, math.nan)
    frame = frame.sort_values("scheme", key=lambda names: names.map(list(losses).index), kind="stable")
    path = tuning.folder / RATES
    previous = pd.read_csv(path) if path.exists() else frame
    unchanged = previous[~previous["scheme"].isin(list(losses))]
    write_text(path, pd.concat([unchanged, frame] if len(unchanged) else [frame]).to_csv(index=False))
    return frame


def _show(tuning: Tuning, losses: Mapping[str, Rates], rates: pd.DataFrame, console: Console) -> None:
    """Print the table of losses by rate, notes on it, and the command that trains each scheme at its best rate."""
    frame = rate_table(rates.assign(experiment="", trained_at=math.nan)).drop(columns="trained at")
    table = plain_table(*frame.columns)
    for row in frame.to_numpy().tolist():
        table.add_row(*row)
    console.print(table)
    best = ",".join(f"{s}:{best_rate(tried)!r}" for s, tried in losses.items() if min(tried.values()) < math.inf)
    for line in (
        f"Validation loss of pilots of {count_of(tuning.seeds, 'seed')}, nats/{tuning.config.data.tuned_on}. "
        "Differences no larger than the differences between seeds mean nothing.",
        f"wrote {tuning.folder / RATES}",
        "To train each scheme at its best rate:",
        f"  posbench train -m {shlex.join([*tuning.words, f'train.lr_of={{{best}}}'])}",
    ):
        console.out(line)
