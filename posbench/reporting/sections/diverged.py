"""Runs that diverged, and what becomes of them in means and tests."""

from __future__ import annotations

from posbench.reporting.findings import Findings
from posbench.reporting.frame import records
from posbench.runs import DIED


def diverged_words(findings: Findings) -> list[str]:
    """Nothing where no run diverged."""
    runs = findings.frame[findings.frame["diverged"].notna()]
    if runs.empty:
        return []
    schemes = [_scheme_words(findings, str(scheme)) for scheme in dict.fromkeys(runs["scheme"])]
    return [" ".join([f"Diverged: {'; '.join(schemes)}.", *_finished(findings), *_died(findings)])]


def diverged_count(findings: Findings, scheme: str) -> str:
    """`1 of 3 diverged`, empty where none did."""
    runs = findings.frame[findings.frame["scheme"] == scheme]
    count = int(runs["diverged"].notna().sum())
    return f"{count} of {len(runs)} diverged" if count else ""


def _scheme_words(findings: Findings, scheme: str) -> str:
    """`nope, 1 of 3 runs (seed 1 died: the validation loss at step 40 is nan)`."""
    runs = records(findings.frame[findings.frame["scheme"] == scheme])
    which = [f"seed {run['seed']}: {run['diverged'].rstrip('.')}" for run in runs if isinstance(run["diverged"], str)]
    return f"{scheme}, {len(which)} of {len(runs)} runs ({'; '.join(which)})"


def _finished(findings: Findings) -> list[str]:
    """What becomes of diverged runs that have a loss."""
    inside = findings.joined.runs["diverged"].notna().any()
    return ["A diverged run that finished is kept in the means and tests."] * bool(inside)


def _died(findings: Findings) -> list[str]:
    """What becomes of the seeds and schemes of runs that died."""
    died = findings.frame[findings.frame["status"] == DIED]
    if died.empty:
        return []
    words = ["A run that died has no loss."]
    seeds, compared = findings.joined.seeds, died[died["scheme"].isin(findings.schemes)]
    lost = sorted(set(compared["seed"]) - set(seeds))
    if lost:
        words.append(
            f"Every mean, gap and test therefore leaves out seed{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} "
            f"and uses seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} alone, even for pairs whose schemes "
            "have more."
        )
    aside = list(dict.fromkeys(died.loc[~died["scheme"].isin(findings.schemes), "scheme"]))
    if aside:
        words.append(f"Without any test or gap: {', '.join(map(str, aside))}, at the end of the loss table.")
    return words
