"""Judge schemes against a baseline for scripts (`posbench judge`): a verdict each, and whether to train more seeds.

Without `family`, the verdict is the report's. With `family`, a loop tries up to that many candidates against one
baseline, and looks at each candidate at planned numbers of seeds only (docs/loops.md): at FIRST_SEEDS it can be
dropped, at each of LOOKS it is tested; the first test that decides counts. Bonferroni's correction for all candidates
and looks keeps the chance of any false claim at 5 %. With `confirm`, a winner is tested once, on the seeds CONFIRMING,
which no candidate has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from posbench.analysis.agreement import counts, differences, disagreement, disagreements, finished_runs
from posbench.analysis.cells import as_trained, experiments_of, means, on_the_same_targets
from posbench.analysis.comparison import SeedComparison, baseline_of, build, fewest_seeds
from posbench.analysis.families import confirmed, planned_tests, record_confirmation, record_tests
from posbench.analysis.loss_table import LossTable, compare_table, refuse_options
from posbench.analysis.onset import decayed_points, worth
from posbench.analysis.options import JudgeOptions, is_loss_table
from posbench.analysis.reading import read_runs
from posbench.analysis.search import FIRST_SEEDS, choose_rates
from posbench.analysis.setups import SetupComparison, compare_setups, has_setups
from posbench.analysis.statistics import (
    BELOW_MARGIN,
    CONFIRMING,
    FEWEST_SEEDS,
    WIDE,
    Floats,
    compare,
    interval,
    is_constant,
    verdict,
)
from posbench.config import ConfigError, nearest
from posbench.config.fields import PLANNED_SEEDS
from posbench.config.units import count_of, number, short_length
from posbench.evaluation.protocols import VALIDATION
from posbench.runs import DIED, FINISHED, run_at
from posbench.runs.finding import folder_of, search_folder
from posbench.runs.results import perplexity
from posbench.system.console import Console, json_text
from posbench.system.console import console as new_console
from posbench.system.options import takes

LOOKS = (5, 8)  # numbers of seeds at which a loop tests a candidate
OF_PLACE = ("experiment_name", "runs_dir")  # overrides that say where a run is stored
UNITS = {"loss": "nats per token", "loss per byte": "nats per byte", "order": "nats per token of order beyond 32"}
EXIT_STATUS = {
    "better": 0,
    "worse": 10,
    f"worse{BELOW_MARGIN}": 10,
    "equal": 11,
    "open": 12,
    "failed": 13,
    f"better{BELOW_MARGIN}": 14,
}
SCHEMA = 3  # version of the JSON; the first had next_command and no number, the second no verdicts below the margin
Figures = dict[str, float]  # figures by name; NaN if unknown


@dataclass(frozen=True)
class Judgement:
    """The comparison of one scheme with the baseline, and the next step. Losses and gaps are in nats per token."""

    scheme: str
    baseline: str
    verdict: str  # better, worse, equal, open or failed; "better, below margin" and "worse, below margin"
    reason: str  # why the verdict is what it is
    scope: str  # learning rates at which the verdict holds: this rate, these rates or best rates
    metric: str  # what is judged: loss, or order (what order beyond 32 tokens is worth)
    gap: float  # the scheme's value minus the baseline's, mean over the seeds that both have
    gap_low: float  # lower end of its 95 % interval over seeds, not corrected; NaN for fewer than three seeds
    gap_high: float
    p: float  # corrected p-value of the difference: at most 0.05 if it is decided; NaN if it was not tested
    seeds: list[int]  # of the scheme
    baseline_seeds: list[int]
    family: int | None = None  # number of candidates that the loop may try; None: the verdict is the report's
    confirm: int | None = None  # number of winners that may be confirmed; None without a confirmation
    look: dict[str, int] | None = None  # the last planned look that was reached: number, of, seeds
    go_on: bool = False  # whether the plan is to train more seeds of this scheme
    # They train the seeds up to the next look; empty if there is none, or it is not recorded.
    next_commands: list[list[str]] = field(default_factory=list)
    beyond: dict[str, Any] | None = None  # perplexity at the longest length beyond the training length, with a verdict
    worth_in_tokens: Figures | None = None  # share of the baseline's tokens that gives the same loss: share, low, high
    # Of a confirmation at other sizes or on other texts: {place: verdict, reason, gap, ends}.
    elsewhere: dict[str, Any] = field(default_factory=dict)
    # After the start of a search: the verdict of the experiment's own runs, at their one rate, which is not the claim:
    # verdict, rates, gap, gap_low, gap_high, p, seeds.
    at_one_rate: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def exit_status(self) -> int:
        """Return the exit status of `posbench judge`.

        0 better, 10 worse, 11 equal, 12 open, 13 failed, 14 better by less than the margin.
        """
        return EXIT_STATUS[self.verdict]

    def as_json(self) -> str:
        """Return all fields as a JSON object; unknown and infinite numbers are null."""
        return json_text(asdict(self))

    def __str__(self) -> str:
        if self.verdict == "failed":
            return f"{self.scheme}: failed ({self.reason}); stop"
        outcome = {"equal": "equal to", "open": "open against"}.get(self.verdict, f"{self.verdict} than")
        if self.verdict.endswith(BELOW_MARGIN):
            outcome = f"{self.verdict.removesuffix(BELOW_MARGIN)}, by less than the margin, than"
        gap = f"{number(self.gap, sign=True)} {UNITS[self.metric]}"
        details = []
        if math.isfinite(self.gap_low):
            details.append(f"95 %: {number(self.gap_low, sign=True)} to {number(self.gap_high, sign=True)}")
        if math.isfinite(self.p):
            details.append(f"p {self.p:.2g}")
        details.append(count_of(len({*self.seeds} & {*self.baseline_seeds}), "seed"))
        plan = "go on" if self.go_on else "stop"
        return (
            f"{self.scheme}: {outcome} {self.baseline} at {self.scope}: {gap} ({'; '.join(details)}); "
            f"{self._beyond_text()}{self._elsewhere_text()}{self._one_rate_text()}{plan}"
        )

    def _one_rate_text(self) -> str:
        if self.at_one_rate is None:
            return ""
        rates = " and ".join(f"{rate:g}" for rate in self.at_one_rate["rates"])
        gap = number(self.at_one_rate["gap"], sign=True)
        seeds = count_of(self.at_one_rate["seeds"], "seed")
        return f"at {rates} alone, which is not the claim: {self.at_one_rate['verdict']}, {gap}, {seeds}; "

    def _elsewhere_text(self) -> str:
        texts = []
        for place, judged in self.elsewhere.items():
            texts.append(f"in {Path(place).name} {judged['verdict']}, {number(judged['gap'], sign=True)}; ")
        return "".join(texts)

    def _beyond_text(self) -> str:
        if self.beyond is None:
            return ""
        low, high = self.beyond["gap_low"], self.beyond["gap_high"]
        least, most = self.beyond["gap_least"], self.beyond["gap_most"]
        text = f"{number(self.beyond['gap'], sign=True)} (95 %: {number(low, sign=True)} to {number(high, sign=True)})"
        if most - least > WIDE or not math.isfinite(low):
            text = f"{number(least, sign=True)} to {number(most, sign=True)} (range of seeds)"
        return f"at {short_length(self.beyond['length'])} tokens {self.beyond['verdict']}, {text}; "


@takes(JudgeOptions)
def judge(place: str | Path, *, options: JudgeOptions) -> Judgement:
    """Return how one scheme's runs at `place` compare with the baseline's, as `posbench judge` does.

    Arguments: place, the folder or pack of an experiment; scheme, by default the only one besides the baseline;
    baseline, by default the experiment's; beside, a reference experiment whose runs are added; family, the number of
    candidates that a loop may try against this baseline (None: the report's verdict); confirm, the number of winners
    that may be confirmed on fresh seeds; also, with confirm, other experiments where the winner must be better too;
    metric, loss or order; margin, nats per token below which values count as equal.
    Raises: ConfigError if the scheme or the baseline has no finished run, there are several schemes to judge, or the
    runs cannot share a table.
    """
    judgements, _ = judge_all(place, options)
    if len(judgements) > 1:
        raise ConfigError(f"name one scheme to judge: {', '.join(judgement.scheme for judgement in judgements)}")
    return judgements[0]


def judge_all(
    place: str | Path, options: JudgeOptions, console: Console | None = None
) -> tuple[list[Judgement], dict[str, list[str]]]:
    """Return a judgement of the scheme that `options` name, or of each scheme but the baseline, best first.

    Returns: the judgements, and for each scheme that cannot be judged the lines that say why.
    Raises: ConfigError for the reasons that `judge` gives, or without a scheme to judge.
    """
    if is_loss_table(place):
        return _judged_table(Path(place), options)
    if options.setups:
        return _judged_setups(place, options, console or new_console(stderr=True))
    select = partial(_mark_strays, options=options)
    summary, rows = read_runs([place], options.beside, console or new_console(stderr=True), select)
    c = build(summary, rows, options.baseline, margin=options.equal_below, confirming=bool(options.confirm))
    if options.confirm and c.search:
        raise ConfigError("--confirm is for loops at one learning rate: a search has one test, at its planned seeds")
    if c.wanted_baseline != c.baseline:
        raise ConfigError(f"the baseline {c.wanted_baseline!r} has no finished run here: train it, or name another")
    # A scheme whose runs all died is judged too: it has failed.
    candidates = [scheme for scheme in dict.fromkeys([*c.schemes, *c.failed]) if scheme != c.baseline]
    why_not: dict[str, list[str]] = {}
    for scheme in sorted({*summary["scheme"]} - {*candidates, c.baseline}):
        why_not[str(scheme)] = [line for line in c.left_out if line.startswith(f"{scheme} ")]
    if options.scheme and options.scheme not in candidates:
        hint = f"{nearest(options.scheme, candidates)} ({', '.join(candidates)})"
        failures = "".join(f"\n  {line}" for line in why_not.get(options.scheme, ()))
        raise ConfigError(f"{options.scheme!r} has no finished run to compare with {c.baseline}{hint}{failures}")
    if not candidates:
        failures = "".join(f"\n  {line}" for line in chain(*why_not.values()))
        raise ConfigError(f"no scheme has a finished run to compare with {c.baseline}: train one{failures}")
    # The plan is recorded before its first test, so that later commands cannot plan less.
    if options.family:
        record_tests(_own(summary, Path(place)), c.baseline, options.family * len(_looks(c, options)))
    if options.confirm:
        record_confirmation(_own(summary, Path(place)), c.baseline, str(options.scheme))
    if options.scheme:
        candidates, why_not = [options.scheme], {}
    if options.metric == "order":
        c = _by_order(c, options)
    judgements = [_judgement(c, rows, scheme, options) for scheme in candidates]
    if c.search and options.metric == "loss":
        judgements = [
            replace(judgement, at_one_rate=_at_one_rate(summary, rows, Path(place), judgement, options))
            for judgement in judgements
        ]
    if options.also:
        judgements = [_confirmed_elsewhere(judgements[0], place, options, console)]
    return judgements, why_not


def _judged_table(file: Path, options: JudgeOptions) -> tuple[list[Judgement], dict[str, list[str]]]:
    refuse_options(options, ("beside", "confirm", "also", "setups"))
    if options.metric != "loss":
        raise ConfigError(f"--metric {options.metric} is for runs that posbench trained: a table has losses")
    c = compare_table(file, options.baseline, options.equal_below, options.family or 0)
    candidates = [scheme for scheme in dict.fromkeys([*c.schemes, *c.failed]) if scheme != c.baseline]
    if options.scheme and options.scheme not in candidates:
        raise ConfigError(f"{file} has no {options.scheme!r}{nearest(options.scheme, candidates)}")
    return [_judgement_of_table(c, scheme) for scheme in candidates if options.scheme in (None, scheme)], {}


def _judgement_of_table(c: LossTable, scheme: str) -> Judgement:
    values = c.values.reindex(columns=[scheme, c.baseline])
    gap, low, high = interval((values[scheme] - values[c.baseline]).dropna())
    tested = c.pairs[c.pairs["left"].isin(values) & c.pairs["right"].isin(values)]
    outcome, reason = verdict(c.pairs, scheme, c.baseline), "by the test of all seeds of the table"
    if scheme in c.failed:
        outcome, reason = "failed", f"seed {', '.join(map(str, c.failed[scheme]))} diverged"
    return Judgement(
        scheme=scheme,
        baseline=c.baseline,
        verdict=outcome,
        reason=reason,
        scope=f"{c.scope.removeprefix('at ')} (not known: {c.unknown})",
        metric="loss",
        gap=gap,
        gap_low=low,
        gap_high=high,
        p=float(next(iter(tested["p_claimed"]), math.nan)),
        seeds=values[scheme].dropna().index.to_list(),
        baseline_seeds=values[c.baseline].dropna().index.to_list(),
        warnings=[f"left out: {line}" for line in c.left_out if line.startswith(f"{scheme} ")],
    )


def _judged_setups(
    place: str | Path, options: JudgeOptions, console: Console
) -> tuple[list[Judgement], dict[str, list[str]]]:
    summary, rows = read_runs([place], options.beside, console)
    if not has_setups(summary):
        raise ConfigError(f"--setups: the experiment of {place} has no factors (experiment.setups in its YAML)")
    c = compare_setups(summary, rows, options.baseline, options.equal_below)
    if options.scheme and options.scheme not in c.compared:
        hint = nearest(options.scheme, c.compared)
        raise ConfigError(f"{options.scheme!r} has no gap to {c.baseline} here{hint} ({', '.join(c.compared)})")
    schemes = [options.scheme] if options.scheme else c.compared
    return [_judgement_of_setups(c, scheme) for scheme in schemes], {}


def _judgement_of_setups(c: SetupComparison, scheme: str) -> Judgement:
    gaps = c.of(scheme)
    mean, half = gaps.mean
    reason = f"the test over {count_of(len(gaps.means), 'setup')}, {gaps.ahead} of them below 0"
    if not gaps.freedom:
        reason = "not tested: no setup is replicated by a second seed"
    seeds = {name: sorted(c.runs.loc[c.runs["scheme"] == name, "seed"]) for name in (scheme, c.baseline)}
    warnings = [f"setup {setup}: {scheme} is worse by more than the margin" for setup in gaps.worse_setups]
    return Judgement(
        scheme=scheme,
        baseline=c.baseline,
        verdict=gaps.verdict,
        reason=reason,
        scope="these setups",
        metric="loss" if c.unit == UNITS["loss"] else "loss per byte",
        gap=mean,
        gap_low=mean - half,
        gap_high=mean + half,
        p=gaps.p,
        seeds=seeds[scheme],
        baseline_seeds=seeds[c.baseline],
        warnings=warnings,
    )


def _by_order(c: SeedComparison, options: JudgeOptions) -> SeedComparison:
    if c.long_range_order is None:
        raise ConfigError(
            f"--metric order: no run of {c.title} has results of it: posbench eval {' '.join(experiments_of(c.runs))} "
            "--protocol order"
        )
    order = c.long_range_order.on_all
    values = order.by_seed.reindex(index=c.values.index, columns=c.values.columns)
    second: pd.DataFrame | None = None
    if order.second is not None:
        second = order.second.reindex(index=values.index, columns=values.columns)
    pairs = compare(
        values,
        second,
        options.equal_below,
        c.primary,
        fewest_seeds(c.split_in_two),
        c.planned_tests,
        order.undecided,
        lower_is_better=False,
    )
    return replace(
        c,
        metric="order",
        lower_is_better=False,
        values=values,
        second=second,
        pairs=pairs,
        undecided=order.undecided,
    )


def _at_one_rate(
    summary: pd.DataFrame, rows: pd.DataFrame, place: Path, judgement: Judgement, options: JudgeOptions
) -> dict[str, Any] | None:
    # Return the verdict of the experiment's own runs, without its search, or None if they have several rates.
    names = {judgement.scheme, judgement.baseline}
    is_of_search = summary["path"].map(lambda path: _is_below(path, search_folder(folder_of(place))))
    own_runs = summary[~is_of_search].assign(searched=False)
    if not names <= set(own_runs.loc[own_runs["status"] == FINISHED, "scheme"]):
        return None
    try:
        c = build(own_runs, rows, judgement.baseline, margin=options.equal_below)
    # They have several rates or other settings, so they are no table of their own.
    except ConfigError:
        return None
    screen = _judgement(c, rows, judgement.scheme, options)
    figures = ("verdict", "gap", "gap_low", "gap_high", "p")
    seeds = len({*screen.seeds} & {*screen.baseline_seeds})
    rates = sorted(set(c.runs["train.lr"]))
    return {name: getattr(screen, name) for name in figures} | {"seeds": seeds, "rates": rates}


def _confirmed_elsewhere(
    judgement: Judgement, place: str | Path, options: JudgeOptions, console: Console | None
) -> Judgement:
    elsewhere = {}
    for other_place in options.also:
        # Without `also`, or judging the other place would judge all of them again.
        [judged], _ = judge_all(other_place, replace(options, also=()), console)
        figures = ("verdict", "reason", "gap", "gap_low", "gap_high")
        elsewhere[str(other_place)] = {name: getattr(judged, name) for name in figures}
        # The first experiment in which it is not better decides the verdict.
        name = Path(other_place).name
        if judgement.verdict.startswith("better") and judged.verdict != "better":
            judgement = replace(
                judgement,
                verdict=judged.verdict,
                reason=f"better in {Path(place).name}, but {judged.verdict} in {name}: {judged.reason}",
                go_on=judged.go_on,
                next_commands=judged.next_commands,
            )
    return replace(judgement, elsewhere=elsewhere)


def _own(summary: pd.DataFrame, place: Path) -> list[str]:
    """Return the paths of the runs in `place` and in its search, without those of a reference experiment."""
    folder = folder_of(place)
    search_runs = search_folder(folder)
    return [path for path in summary["path"] if _is_below(path, folder) or _is_below(path, search_runs)]


def _is_below(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)


def _mark_strays(summary: pd.DataFrame, rows: pd.DataFrame, options: JudgeOptions) -> pd.DataFrame:
    """Return the summary, in which runs that cannot share a table with the baseline's are marked as not comparable.

    Raises: ConfigError if the runs learn tasks, the baseline has no finished run, or its own runs differ.
    """
    if has_setups(summary):
        raise ConfigError("the runs of this experiment have different setups: judge them with --setups")
    if (summary.get("data.source", summary["scheme"]) == "task").any():
        raise ConfigError("posbench judge compares losses, and these runs learn tasks: use posbench report")
    validated = as_trained(rows, summary, protocol=VALIDATION.name)
    compared = choose_rates(summary)[0]
    finished, _ = finished_runs(compared)
    runs = pd.concat([finished, compared[compared["status"] == DIED]]).sort_index()
    runs = runs.assign(windows=validated.groupby("run")["windows_digest"].first())
    baseline = options.baseline or baseline_of(finished)

    # Return (setting, text) for each setting that keeps these runs out of one table.
    def differ(runs: pd.DataFrame) -> list[tuple[str, str]]:
        # Beside a reference, a run of its scheme and seed is no error: `join_reference` leaves it out.
        settings = list(differences(runs) if options.beside else disagreements(runs))
        if not settings and runs["windows"].nunique() > 1:
            return [("train.validation_tokens", counts(runs, "windows"))]
        return settings

    # The runs that the others must agree with: the baseline's or, beside a reference experiment, all of its runs.
    is_first = (runs["scheme"] == baseline) & runs.index.isin(finished.index)
    if options.beside:
        reference = folder_of(Path(options.beside))
        is_first = runs["path"].map(lambda path: _is_below(path, reference))
    comparable, reasons = runs[is_first], dict[Any, str]()
    if comparable.empty:
        raise ConfigError(f"the baseline {baseline!r} has no finished run here: train it, or name another")
    if differing := differ(comparable):
        raise ConfigError(
            f"{disagreement('be one baseline', differing)}\nMove the folders of the runs that you do not mean out of "
            "the experiment, or name another scheme with --baseline"
        )
    if not differ(runs):
        return summary
    # One run with other settings must not stop the judgement of all candidates. If two candidates, or two seeds of one,
    # differ only from each other, the first is kept.
    for run in runs.index[~is_first]:
        with_run = pd.concat([comparable, runs.loc[[run]]])
        if differing := differ(with_run):
            settings = [f"{name}: {values}" for name, values in differing]
            reasons[run] = f"it differs in {'; '.join(settings)}"
        else:
            comparable = with_run
    if options.beside and len(reasons) == (~is_first).sum():
        return summary  # the reference refuses them all, with the command that trains a comparable run
    is_stray = summary.index.isin(list(reasons))
    return summary.assign(
        status=summary["status"].mask(is_stray, "not comparable"),
        reason=summary["reason"].astype(object).mask(is_stray, summary.index.to_series().map(reasons)),
    )


def _judgement(c: SeedComparison, rows: pd.DataFrame, scheme: str, options: JudgeOptions) -> Judgement:
    names = [scheme, c.baseline]
    # A scheme whose runs all died has no column of losses; `reindex` gives it one of NaN.
    of_pair = _judged(c.values, options).reindex(columns=names)
    seeds = {name: of_pair[name].dropna().index.to_list() for name in names}
    losses = of_pair.dropna()
    gaps = (losses[scheme] - losses[c.baseline]).to_numpy()
    mean, low, high = interval(gaps)
    looks = _looks(c, options)  # numbers of seeds at which the scheme is tested
    is_loop = bool(options.family or options.confirm)
    # Tests are corrected for all candidates and looks of a loop, else for the report's claimed pairs.
    num_tests = (options.family or options.confirm or 0) * len(looks)
    if not is_loop:
        num_tests = int(c.pairs["p_claimed"].notna().sum())
    deaths = c.failed.get(scheme, {})
    drops: tuple[int, ...] = (FIRST_SEEDS,)  # numbers of seeds at which the scheme can be dropped without a test
    planned = range(max(looks))  # seeds
    if options.confirm:  # a winner cannot be dropped, and only its fresh seeds count
        drops, planned = (), CONFIRMING
        # Every winner that was tested on these seeds counts, also beyond the plan.
        num_tests = max(num_tests, len(confirmed(c.runs["path"], c.baseline)))
    decision = _decision(c, losses, drops, looks, num_tests, options, deaths)
    runs = c.runs[c.runs["scheme"].isin(names)]
    look: dict[str, int] | None = None
    next_commands: list[list[str]] = []
    beyond: dict[str, Any] | None = None
    if is_loop:
        look = _look((*drops, *looks), decision.tested, len(gaps))
    if decision.go_on:
        next_commands = _next_commands(c, names, seeds, planned[: decision.next_look])
    if c.metric == "loss":
        beyond = _beyond(c, rows, names, looks if is_loop else (), num_tests, options)
    return Judgement(
        scheme=scheme,
        baseline=c.baseline,
        verdict=decision.verdict,
        reason=decision.reason,
        scope=c.scope.removeprefix("at "),
        metric=c.metric,
        gap=mean,
        gap_low=low,
        gap_high=high,
        p=decision.p,
        family=options.family,
        confirm=options.confirm,
        look=look,
        seeds=seeds[scheme],
        baseline_seeds=seeds[c.baseline],
        go_on=decision.go_on,
        next_commands=next_commands,
        beyond=beyond,
        worth_in_tokens=_worth(runs, names, options),
        warnings=[*_warnings(c, names, runs, gaps, options), *_warnings_of_seeds(losses.index.to_list(), planned)],
    )


def _judged(table: pd.DataFrame, options: JudgeOptions) -> pd.DataFrame:
    # A candidate that is a variant of the best so far inherits its luck on the seeds of the loop, so a confirmation
    # reads other seeds.
    return table[table.index.isin(CONFIRMING)] if options.confirm else table


@dataclass(frozen=True)
class _Decision:
    verdict: str
    reason: str
    p: float  # corrected; NaN without a test, or if the scheme failed
    tested: int  # seeds of the last test
    next_look: int  # seeds of the next look; 0 after the last
    go_on: bool


def _decision(
    c: SeedComparison,
    losses: pd.DataFrame,
    drops: Sequence[int],
    looks: Sequence[int],
    num_tests: int,
    options: JudgeOptions,
    deaths: Mapping[int, str],
) -> _Decision:
    """Return the verdict on a scheme, and whether to go on.

    Arguments: losses, a column for the scheme and one for the baseline, a row per seed that both have; drops and looks,
    the numbers of seeds at which it can be dropped and is tested; deaths, {seed: reason} of the scheme's dead runs.
    """
    outcome, p, tested = _tested(c, losses, looks, num_tests, options)
    # The first planned number of seeds that is not reached yet.
    next_look = next((look for look in (*drops, *looks) if len(losses) < look), 0)
    if deaths:
        reasons = [f"seed {seed} diverged: {reason}" for seed, reason in deaths.items()]
        return _Decision("failed", "; ".join(reasons), math.nan, tested, next_look, go_on=False)
    if outcome != "open":
        return _Decision(outcome, f"decided by the test of {tested} seeds", p, tested, next_look, go_on=False)
    # Dropped before the first test if it is clearly worse with each of the first seeds.
    is_dropped = False
    if drops and FIRST_SEEDS <= len(losses) < looks[0]:
        gaps = (losses.iloc[:, 0] - losses.iloc[:, 1]).to_numpy()[:FIRST_SEEDS]
        worse_by = gaps if c.lower_is_better else -gaps
        is_dropped = bool((worse_by > options.equal_below).all())
    # More seeds do not help if the baseline has died.
    if c.baseline in c.failed:
        next_look = 0
    # A p that is NaN means that nothing was tested.
    reason = _reason_for_open(c, options, tested if math.isfinite(p) else 0, next_look, is_dropped)
    return _Decision("open", reason, p, tested, next_look, go_on=next_look > 0 and not is_dropped)


def _tested(
    c: SeedComparison, losses: pd.DataFrame, looks: Sequence[int], num_tests: int, options: JudgeOptions
) -> tuple[str, float, int]:
    """Return the verdict of the test (open if there is none), its corrected p (NaN: no test) and its seeds."""
    tests, names = c.pairs, list(losses.columns)
    if options.family or options.confirm:
        # None: no finished search, or the scheme is not in it, because all its runs died.
        second = None
        if c.second is not None and names[0] in c.second:
            second = c.second[names]
        tests = _first_decision(c, losses, second, looks, num_tests, options.equal_below)
    # Pairs may be in either order.
    of_pair = tests[tests["left"].isin(names) & tests["right"].isin(names)]
    tested = int(next(iter(of_pair["seeds"]), 0))
    if not c.can_rank:
        return "open", math.nan, tested
    p = float(next(iter(of_pair["p_claimed"]), math.nan))
    return verdict(tests, *names) or "open", p, tested


def _look(planned: Sequence[int], tested: int, seeds: int) -> dict[str, int]:
    """Return the last planned look that was reached: its number (from 1; 0: none), of how many, and its seeds."""
    # The first look counts as reached by its seeds, even if nothing was tested.
    reached = tested
    if not tested and seeds >= planned[0]:
        reached = planned[0]
    return {"number": sum(look <= reached for look in planned), "of": len(planned), "seeds": reached}


def _worth(runs: pd.DataFrame, names: Sequence[str], options: JudgeOptions) -> Figures | None:
    if options.confirm:
        runs = runs[runs["seed"].isin(CONFIRMING)]
    if runs.empty:
        return None
    shares = worth(decayed_points(runs), *names)
    if shares is None:
        return None
    return dict(zip(("share", "low", "high"), shares, strict=True))


def _looks(c: SeedComparison, options: JudgeOptions) -> tuple[int, ...]:
    # A confirmation has one test, of all its seeds.
    if options.confirm:
        return (len(CONFIRMING),)
    if c.search:
        return (int(c.search.planned),)
    if options.family:
        return LOOKS
    return (int(c.config["experiment"].get("planned_seeds", PLANNED_SEEDS)),)


def _reason_for_open(c: SeedComparison, options: JudgeOptions, tested: int, next_look: int, is_dropped: bool) -> str:
    if is_dropped:
        return f"dropped: worse by more than {options.equal_below:g} nats with each of the first {FIRST_SEEDS} seeds"
    if c.unfinished:
        return "not tested: the search for learning rates is unfinished"
    if next_look and options.confirm:
        return f"not confirmed yet: the test is at {next_look} seeds, {CONFIRMING.start} to {CONFIRMING[-1]}"
    if next_look:
        return f"not decided yet: the next look is at {next_look} seeds"
    if tested:
        return f"not decided by the test of {tested} seeds, the last one"
    return "not tested: see the warnings"


def _first_decision(
    c: SeedComparison,
    losses: pd.DataFrame,
    second: pd.DataFrame | None,
    looks: Sequence[int],
    num_tests: int,
    margin: float,
) -> pd.DataFrame:
    tests = compare(losses.head(0))  # no tests
    # The first look that decides counts: later seeds cannot change it.
    for look in looks:
        if len(losses) >= look and (tests.empty or verdict(tests, *losses.columns) == "open"):
            tests = compare(
                losses.head(look),
                second,
                margin=margin,
                size=num_tests,
                undecided=c.undecided,
                lower_is_better=c.lower_is_better,
            )
    return tests


def _beyond(
    c: SeedComparison,
    rows: pd.DataFrame,
    names: Sequence[str],
    looks: Sequence[int],
    num_tests: int,
    options: JudgeOptions,
) -> dict[str, Any] | None:
    """Return the figures of both schemes at the longest length beyond the training length, or None.

    Arguments: looks, numbers of seeds to test at; empty: test all seeds once.
    """
    cells = c.at(metric="loss", last=0)
    # Both schemes must have been scored at the length.
    cells = cells[(cells["length"] > c.training_length) & cells["scheme"].isin(names)]
    has_both = cells.groupby(["protocol", "length"], observed=True)["scheme"].transform("size") == len(names)
    cells = cells[has_both]
    if cells.empty:
        return None
    # If several protocols scored it, the first by name counts.
    protocol = cells["protocol"].min()
    length = int(cells[cells["protocol"] == protocol]["length"].max())
    scored = on_the_same_targets(as_trained(rows, c.runs, protocol=protocol, metric="loss"), c.runs, {})
    losses = means(scored[scored["length"] == length], ["seed", "scheme"]).unstack()[list(names)].dropna()
    losses = _judged(losses, options)
    if losses.empty:
        return None
    gaps = losses[names[0]] - losses[names[1]]
    mean, low, high = interval(gaps)
    # Without second rates: the test is at the rates of the compared runs. It is corrected as the main verdict is.
    tests = _first_decision(c, losses, None, looks or (len(losses),), num_tests, options.equal_below)
    return {
        "length": length,
        "perplexity": perplexity(float(losses[names[0]].mean())),
        "baseline_perplexity": perplexity(float(losses[names[1]].mean())),
        "gap": mean,
        "gap_low": low,
        "gap_high": high,
        "gap_least": float(gaps.min()),
        "gap_most": float(gaps.max()),
        "verdict": verdict(tests, *names) or "open",
    }


def _next_commands(
    c: SeedComparison, names: Sequence[str], seeds: Mapping[str, Sequence[int]], planned: Sequence[int]
) -> list[list[str]]:
    """Return the commands that train the seeds up to the next look; none if a run does not record its command.

    Arguments: names, the scheme and the baseline; seeds, those that each has; planned, all seeds of the next look.
    """
    common = [seed for seed in seeds[names[0]] if seed in seeds[names[1]]]
    # Seeds that one of them already has come first, so that few runs complete the pairs.
    to_train = list(dict.fromkeys([*common, *seeds[names[0]], *seeds[names[1]], *planned]))[: len(planned)]
    commands, place = list[list[str]](), list[str]()
    for name in names:
        missing = [seed for seed in to_train if seed not in seeds[name]]
        paths = c.runs[c.runs["scheme"] == name]["path"].to_list()
        words = run_at(paths[0]).manifest.command if paths else None
        if words is None:
            return []
        place = place or [word for word in words if _key(word) in OF_PLACE]  # runs beside a reference stay together
        settings = [word for word in words if _key(word) not in (*OF_PLACE, "seed")]
        # With a learning-rate search, the search's own command.
        if c.search and name in c.unfinished:
            searched = [word for word in settings if _key(word) != "scheme.lr"]
            planned_words = []
            # Without these words the search would have the usual number of seeds.
            if c.search.planned != PLANNED_SEEDS:
                planned_words.append(f"seed={','.join(map(str, range(c.search.planned)))}")
            commands.append(["posbench", "tune", *searched, f"experiment_name={c.title}", *planned_words])
        elif missing and not c.search:
            commands.append(["posbench", "train", "-m", *settings, *place, f"seed={','.join(map(str, missing))}"])
    return commands


def _key(word: str) -> str:
    return word.partition("=")[0]


def _warnings(
    c: SeedComparison, names: Sequence[str], runs: pd.DataFrame, gaps: Floats, options: JudgeOptions
) -> Iterator[str]:
    if not c.is_at_best_rates:
        yield f"the verdict holds {c.scope} only: posbench tune finds the best rates of each scheme"
    if c.unfinished:
        yield f"the search for learning rates is unfinished, so nothing is ranked: {', '.join(c.unfinished)}"
    devices = sorted(set(runs["device"]))
    if len(devices) > 1:
        yield f"the runs were trained on different processors ({', '.join(devices)}), so rounding differs too"
    yield from _warnings_of_pair(c, names, gaps)
    winners = confirmed(runs["path"], c.baseline)
    if options.confirm and len(winners) > options.confirm:
        yield (
            f"{len(winners)} winners were confirmed against {c.baseline} ({', '.join(winners)}), more than --confirm "
            f"{options.confirm} plans: the test is corrected for all of them"
        )
    planned = planned_tests(runs["path"], c.baseline)
    tests = (options.family or 0) * len(_looks(c, options))
    if 0 < tests < planned:
        yield (
            f"an earlier --family planned {planned} tests against {c.baseline}, and this one plans {tests}: keep the N "
            "that you fixed before the loop"
        )
    if options.family is None and c.can_rank and not verdict(c.pairs, *names) and len(gaps) >= FEWEST_SEEDS:
        yield "the experiment fixed its pairs before training, and this is not one of them: --family N tests it"
    diverged = runs.dropna(subset="diverged")
    for scheme, seed, reason in diverged[["scheme", "seed", "diverged"]].to_numpy().tolist():
        yield f"{scheme} seed {seed} diverged: {reason}"
    starts = tuple(f"{name} " for name in names)
    for line in c.left_out:
        if line.startswith(starts):
            yield f"left out: {line}"


def _warnings_of_seeds(seeds: Sequence[int], planned: Sequence[int]) -> Iterator[str]:
    # Which seeds a test reads is planned, so that none can be left out after its loss was seen.
    read = list(seeds)[: len(planned)]
    if len(read) >= FEWEST_SEEDS and read != list(planned)[: len(read)]:
        numbers = ", ".join(map(str, read))
        yield (
            f"the test reads seeds {numbers}, and the plan is {planned[0]} to {planned[len(read) - 1]}: train the "
            "missing ones, or say why they are left out"
        )


def _warnings_of_pair(c: SeedComparison, names: Sequence[str], gaps: Floats) -> Iterator[str]:
    if len(gaps) and not gaps.any():
        yield f"{names[0]} has exactly the losses of {names[1]}: it seems to compute the same"
    elif len(gaps) > 1 and is_constant(gaps):
        yield f"{names[0]} and {names[1]} differ by the same amount with every seed, which no noise does: not tested"
    if c.baseline in c.failed:
        numbers = ", ".join(map(str, c.failed[c.baseline]))
        yield f"{c.baseline} failed with seed {numbers}, so its pairs are open"
    for scheme in c.undecidable:
        if scheme in names:
            yield f"{scheme} diverged with a seed at each rate that its search kept, so its pairs are open"
    for scheme in c.late_at_best:
        if scheme in names and c.search:
            counts_at = []
            for rate in c.search.kept(scheme):
                using, seeds = c.search.using_order(scheme, rate)
                counts_at.append(f"{using} of {seeds} seeds at {rate:g}")
            best, at_second = counts_at
            yield f"{scheme} uses long-range order with {best}, its best rate, and {at_second}, so its pairs are open"
