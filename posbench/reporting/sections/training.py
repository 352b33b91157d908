"""The loss curves, and the runs whose gradients spiked."""

from __future__ import annotations

from posbench.reporting.findings import Findings
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.spikes import TIMES

_CAPTION = (
    "Validation loss during training (mean over seeds). Only the last point is the loss of a finished run, because the "
    "learning rate has not decayed before it. `posbench report A B C`, over runs of several budgets, draws gaps "
    "against tokens from finished runs alone."
)


def training(findings: Findings, drawn: list[str]) -> Section | None:
    """Loss curves, with a sentence on the terminal where gradients spiked."""
    shown, words = pictures(drawn, "curves", _CAPTION), spike_words(findings)
    return Section("Training", words, pictures=shown, on_terminal=bool(words)) if shown or words else None


def spike_words(findings: Findings) -> list[str]:
    """The schemes that spiked, with the worst run of each. Nothing where none did."""
    spiked = [each for each in findings.gradients if each.has_spike]
    if not spiked:
        return []
    schemes = []
    for scheme in dict.fromkeys(each.scheme for each in spiked):
        of = [each for each in spiked if each.scheme == scheme]
        worst = max(of, key=lambda each: each.times)
        runs = sum(each.scheme == scheme for each in findings.gradients)
        schemes.append(
            f"{scheme}, {len(of)} of {runs} run{'s' * (runs > 1)} (up to {worst.times:.0f} times, seed {worst.seed}, "
            f"step {worst.step} or shortly before)"
        )
    return [
        f"Gradients spiked: {'; '.join(schemes)}. A spike is a step whose gradient norm, before clipping, is more than "
        f"{TIMES:g} times the usual one: the median, after the warm-up, of the largest norm between two lines of "
        "metrics.jsonl. If one scheme spikes and others do not, the shared learning rate may be too high for it: "
        "`posbench tune` tries others."
    ]


def spikes_text(findings: Findings) -> str:
    """Of the set-up table: the runs that spiked, `none`, or that it is not known."""
    if not findings.gradients:
        return "not recorded"
    spiked = [each for each in findings.gradients if each.has_spike]
    return ", ".join(f"{each.scheme} seed {each.seed}: {each.times:.0f} times" for each in spiked) or "none"
