"""What each scheme's own learning rate changes: pilots of `posbench tune`, and runs at each scheme's best rate.

Beside an experiment `demo` lie `demo-tune/rates.csv`, the losses of the pilots, and `demo-own/`, the runs of the
schemes whose best rate is not the shared one. Schemes for which the shared rate is the best have these runs already.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posbench.config import ConfigError
from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.frame import records, results
from posbench.reporting.gathering import OWN, gather
from posbench.reporting.joining import Joined, join
from posbench.reporting.measure import Measurement, measure
from posbench.reporting.statistics import Floats, Pair
from posbench.runs import FINISHED, holds_runs, run_at

if TYPE_CHECKING:
    import pandas as pd

    from posbench.config import Config

Test = Callable[[Floats, list[str]], list[Pair]]  # losses [seeds, schemes] and names -> every pair
Pilots = dict[str, dict[float, float]]  # scheme -> learning rate -> loss, nats/token; infinite where the pilot died


@dataclass(frozen=True)
class OwnRates:
    """Pilots, and the experiment's losses with every scheme at its own best rate. Empty where there are none."""

    shared: float  # the experiment's learning rate
    pilots: Pilots
    rates: dict[str, float] = field(default_factory=dict)  # of the runs at own rates, by scheme
    measurements: dict[str, Measurement] = field(default_factory=dict)  # of the validation split, by scheme
    pairs: list[Pair] = field(default_factory=list)

    def best(self, scheme: str) -> float:
        """The rate of the lowest pilot loss; NaN where there is none."""
        losses = self.pilots.get(scheme)
        return min(sorted(losses), key=lambda lr: losses[lr]) if losses else math.nan

    def is_at_edge(self, scheme: str) -> bool:
        """Whether that is the lowest or the highest rate that was tried."""
        return self.best(scheme) in (min(self.pilots[scheme]), max(self.pilots[scheme]))

    def gain(self, scheme: str) -> float:
        """By how much the best pilot is better than the one at the shared rate."""
        losses = self.pilots.get(scheme, {})
        return losses.get(self.shared, math.nan) - losses[self.best(scheme)] if losses else math.nan


def own_rates(folder: Path, joined: Joined, config: Config, test: Test, notes: list[str]) -> OwnRates | None:
    """What lies beside the experiment in `folder`; None where nothing does.

    Arguments: joined and config, of the experiment; test, as its pairs are tested; notes, what has to be left out.
    """
    place = folder.resolve()
    pilots = _pilots(place.with_name(f"{place.name}-tune") / "rates.csv", notes)
    own = place.with_name(f"{place.name}-own")
    if not holds_runs(own):
        return OwnRates(config.train.lr, pilots) if pilots else None
    rates, runs = _runs(joined, results(own), config.train.lr)
    if joined.baseline is None or joined.baseline not in rates or len(rates) < 2:
        notes.append(f"{own} is not shown: it has no finished runs at schemes' own rates with the baseline among them.")
        return OwnRates(config.train.lr, pilots) if pilots else None
    together = join(runs, joined.baseline)
    notes += [f"At its own rate, {each.scheme} seed {each.seed} is left out: {each.why}." for each in together.left_out]
    held, _ = gather({(row["scheme"], row["seed"]): run_at(row["path"]) for row in records(together.runs)}, [])[OWN]
    held = {key: [result for result in each if result.protocol == VALIDATION.name] for key, each in held.items()}
    there = {m.scheme: m for m in measure(held, together, config.train.context_length, notes)}
    names = list(there)
    losses = np.array([there[name].losses for name in names]).T
    return OwnRates(
        shared=config.train.lr,
        pilots=pilots,
        rates={name: rates[name] for name in names},
        measurements=there,
        pairs=test(losses, names),
    )


def _runs(joined: Joined, own: pd.DataFrame, shared: float) -> tuple[dict[str, float], pd.DataFrame]:
    """The rate of each scheme, as `train.lr_of` of the runs in `own` says, and its runs there.

    Where that is the shared rate the runs are the experiment's.
    """
    import pandas as pd

    finished = own[own["status"] == FINISHED]
    rates: dict[str, float] = {}
    for run in records(finished):
        train = run_at(run["path"]).config.train
        rates |= {scheme: float(lr) for scheme, lr in (train.lr_of or {}).items()}
    at_shared = [scheme for scheme, lr in rates.items() if lr == shared]
    parts = [joined.runs[joined.runs["scheme"].isin(at_shared)], finished[~finished["scheme"].isin(at_shared)]]
    runs = pd.concat([part for part in parts if not part.empty] or parts, ignore_index=True)
    there = set(runs["scheme"]) if len(runs) else set()
    return {scheme: lr for scheme, lr in rates.items() if scheme in there}, runs


def _pilots(file: Path, notes: list[str]) -> Pilots:
    """What `posbench tune` stored. A file that is none is named in `notes`."""
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        pilots: Pilots = {}
        for row in rows:
            loss = float(row["loss"]) if row["loss"] else math.inf
            pilots.setdefault(row["scheme"], {})[float(row["lr"])] = loss
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        notes.append(f"{file} cannot be read ({type(error).__name__}: {error}): `posbench tune` writes it again.")
        return {}
    return pilots


def verdicts(pairs: list[Pair]) -> dict[frozenset[str], str]:
    """Pair -> the scheme that is decided to be better, `equal`, or `open`."""
    words: Mapping[tuple[bool, bool], str] = {(False, False): "open", (False, True): "equal"}
    return {
        frozenset((pair.left, pair.right)): pair.left if pair.is_decided else words[pair.is_decided, pair.is_equivalent]
        for pair in pairs
    }
