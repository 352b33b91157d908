"""`posbench tune`: the learning rate that suits each scheme of an experiment, on text that is used for nothing else.

    runs/demo-tune/lr=0.005/<scheme>/seed=1000/    a pilot: an ordinary run of the experiment
    runs/demo-tune/rates.csv                       one row a pilot: scheme, lr, loss, status

A pilot has a seed that is not scored, and its losses are of documents that are taken out of the train text
(`data.tuning_fraction`): validation and test text is not read at all. Every scheme is trained at half, once and twice
`train.lr`. Where the best rate of a scheme is the lowest or the highest that was tried, the next one is tried too.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from posbench.composition import compose
from posbench.config import Config, ConfigError
from posbench.console import plain_table
from posbench.machine.files import write_text
from posbench.runs import DIED, FINISHED, Run, state_of
from posbench.sweep import run_application, sweep_of
from posbench.training import Died

SEED = 1000  # of every pilot
FACTOR = 2.0  # between two rates
MOST_WIDER = 3  # rates beyond the first three, on each side

Rates = dict[float, float]  # learning rate -> loss in nats/token; infinite where the pilot died


@dataclass(frozen=True)
class Tuning:
    """What is tuned: an experiment's words, its schemes and where the pilots are."""

    given: tuple[str, ...]  # the words of the experiment, without its schemes and seeds
    pilot: tuple[str, ...]  # the words that make a run of it a pilot
    schemes: dict[str, str]  # choice of conf/scheme -> name
    folder: Path
    experiment: str
    lr: float  # the experiment's own
    is_task: bool

    def run(self, scheme: str, lr: float) -> Run:
        """The pilot of a scheme at a rate."""
        return Run(self.folder / f"lr={lr!r}" / self.schemes[scheme] / f"seed={SEED}")


def tune(
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Callable[[str], object],
    console: Console,
    fraction: float = 0.05,
) -> dict[str, Rates]:
    """Train the pilots that are missing, print and store the table, and return the losses by scheme and rate.

    Arguments: words, as after `posbench train -m`; job, what trains a run; say, told what a sweep will run;
    fraction, the part of the train documents that pilots are scored on.
    Raises: ConfigError for words that are refused, and where a pilot was neither finished nor died.
    """
    tuning = _tuning(words, fraction)
    wanted = {scheme: [tuning.lr / FACTOR, tuning.lr, tuning.lr * FACTOR] for scheme in tuning.schemes}
    losses: dict[str, Rates] = {scheme: {} for scheme in tuning.schemes}
    while wanted:
        together: dict[tuple[float, ...], list[str]] = {}  # schemes that want the same rates: one sweep trains them
        for scheme, rates in wanted.items():
            together.setdefault(tuple(rates), []).append(scheme)
        for of_sweep, schemes in together.items():
            _train(tuning, schemes, of_sweep, job, say)
        for scheme, rates in wanted.items():
            losses[scheme] |= {lr: _loss(tuning.run(scheme, lr)) for lr in rates}
        _store(tuning, losses)  # what a kill leaves
        wanted = {s: [wider] for s, found in losses.items() if (wider := wider_rate(found, tuning.lr)) is not None}
    _show(tuning, losses, console)
    return losses


def best_rate(rates: Rates) -> float:
    """The rate of the lowest loss; of equal ones the lowest rate."""
    return min(sorted(rates), key=lambda lr: rates[lr])


def wider_rate(rates: Rates, lr: float) -> float | None:
    """The next rate to try where the best is the lowest or highest so far; None where it is not, or at the limit."""
    best = best_rate(rates)
    limit = FACTOR ** (1 + MOST_WIDER) * 1.001
    if best == min(rates) and best / FACTOR > lr / limit:
        return best / FACTOR
    if best == max(rates) and best * FACTOR < lr * limit:
        return best * FACTOR
    return None


def _tuning(words: Sequence[str], fraction: float) -> Tuning:
    """What the words name. Raises: ConfigError for a sweep of other things."""
    swept = sweep_of(words)
    several = ", ".join(key for key in swept if key not in ("scheme", "seed"))
    if several:
        raise ConfigError(
            f"posbench tune sweeps learning rates over schemes, so {several} cannot be swept too: give one value"
        )
    named = [word.partition("=")[2] for word in words if word.startswith("scheme=")]
    choices = swept.get("scheme", named[-1:] or ["qk_rope"])
    given = tuple(word for word in words if word.partition("=")[0] not in ("scheme", "seed"))
    config = compose([*given, "train.branch_tokens=[]", f"scheme={choices[0]}"])  # pilots may be shorter than branches
    folder = Path(config.runs_dir) / f"{config.experiment_name}-tune"
    pilot = (
        f"seed={SEED}",
        f"runs_dir='{folder}'",
        "experiment_name='lr=${train.lr}'",
        *([] if config.is_task else [f"data.tuning_fraction={fraction}"]),
        "train.branch_tokens=[]",
        "train.lr_of=null",
    )
    schemes = {choice: compose([*given, *pilot, f"scheme={choice}"]).scheme.name for choice in choices}
    return Tuning(given, pilot, schemes, folder, config.experiment_name, config.train.lr, config.is_task)


def _train(
    tuning: Tuning,
    schemes: Sequence[str],
    rates: Sequence[float],
    job: Callable[[Config], object],
    say: Callable[[str], object],
) -> None:
    """One sweep. Finished pilots are left alone, and those that die are found by their manifests."""
    sweep = [f"scheme={','.join(schemes)}", f"train.lr={','.join(map(repr, rates))}"]
    try:
        run_application("posbench tune", ["-m", *tuning.given, *tuning.pilot, *sweep], job, say)
    except Died:  # the only pilot, or all of them in the same words
        return


def _loss(pilot: Run) -> float:
    """Raises: ConfigError where the pilot was cut off, or its words were refused."""
    state = state_of(pilot)
    if state not in (FINISHED, DIED):
        raise ConfigError(f"{pilot.path} is {state}: see its message above, and give the same command again to resume")
    loss = pilot.manifest.loss
    return math.inf if state == DIED or loss is None else loss


def _store(tuning: Tuning, losses: dict[str, Rates]) -> None:
    rows = ["scheme,lr,loss,status"]
    for scheme, rates in losses.items():
        name = tuning.schemes[scheme]
        for lr, loss in sorted(rates.items()):
            rows.append(f"{name},{lr!r},{loss!r},{FINISHED}" if math.isfinite(loss) else f"{name},{lr!r},,{DIED}")
    write_text(tuning.folder / "rates.csv", "\n".join(rows) + "\n")


def _show(tuning: Tuning, losses: dict[str, Rates], console: Console) -> None:
    """The table, what it does not say, and the command for runs at each scheme's own rate."""
    scored = (
        "answer, on problems whose accuracy is not scored"
        if tuning.is_task
        else ("token, on text that no experiment is scored on")
    )
    lines = [
        f"Validation loss of one pilot each (seed {SEED}), nats/{scored}. "
        "This is one seed: a difference as small as those between seeds means nothing.",
        f"wrote {tuning.folder / 'rates.csv'}",
    ]
    differing = [scheme for scheme, rates in losses.items() if best_rate(rates) != tuning.lr]
    if differing:
        own = ",".join(f"{tuning.schemes[scheme]}:{best_rate(rates)!r}" for scheme, rates in losses.items())
        name = f"experiment_name={tuning.experiment}-own"
        command = [*tuning.given, name, f"scheme={','.join(differing)}", f"train.lr_of={{{own}}}"]
        lines.append("To train each scheme at its own rate, which a report of the experiment then shows too:")
        lines.append(f"  posbench train -m {' '.join(map(shlex.quote, command))}")
    tried = sorted({lr for rates in losses.values() for lr in rates})
    gains = ("better than\nthe next", f"better than\n{tuning.lr:g}")
    table = plain_table("scheme", *map("{:g}".format, tried), "best", *gains)
    for scheme, rates in losses.items():
        best = best_rate(rates)
        others = [loss for lr, loss in rates.items() if lr != best]
        cells = [_cell(rates[lr]) if lr in rates else "" for lr in tried]
        edge = " (edge)" * (best in (min(rates), max(rates)))
        by = [_cell(min(others) - rates[best]), _cell(rates[tuning.lr] - rates[best])]
        table.add_row(tuning.schemes[scheme], *cells, f"{best:g}{edge}", *by)
    console.print(table)
    for line in lines:
        console.out(line)


def _cell(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "died"
