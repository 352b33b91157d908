"""The foot of the loss table: n-gram models, which are not schemes and are not ranked."""

from __future__ import annotations

from collections.abc import Sequence

from posbench.reporting.findings import Findings
from posbench.reporting.ngrams import NgramLine
from posbench.reporting.statistics import Interval
from posbench.reporting.tables import DASH, UNSURE, decimals, number, plus_minus

_CALLED = {2: "bigram", 3: "trigram"}


def ngram_rows(findings: Findings, headers: Sequence[str]) -> list[list[str]]:
    """A row an order, with a dash in each column that only a scheme can fill."""
    rows = []
    for line in findings.ngrams:
        cells = {
            "scheme": line.name,
            "position": "last token" if line.order == 2 else f"last {line.order - 1} tokens",
            "loss\nnats/token": plus_minus(line.loss.mean, line.loss.half_width),
            f"gap to {findings.baseline}\nnats/token": plus_minus(line.gap.mean, line.gap.half_width, sign=True),
            "seeds": str(len(line.seeds)),
            "bits\nper byte": bits_text(line.bits_per_byte, line.loss),
        }
        rows.append([cells.get(header, DASH) for header in headers])
    return rows


def ngram_words(findings: Findings) -> list[str]:
    """What those rows are, and which schemes' models are worse than the bigram and the trigram."""
    if not findings.ngrams:
        return []
    line = findings.ngrams[0]
    words = (
        "Kneser-Ney n is not a scheme and is not ranked: it predicts a token from the n - 1 tokens before it. Its "
        f"counts come from the windows that these models were trained on ({line.tokens:,.0f} tokens, each once), and "
        "it is scored on the same targets."
    )
    return [" ".join([words, *(_standing(each) for each in findings.ngrams if each.order in _CALLED)])]


def _standing(line: NgramLine) -> str:
    """`Worse than the trigram: nope, q_rope.`"""
    called = f"the {_CALLED[line.order]}"
    if not (line.worse or line.open):
        return f"Every scheme's model is better than {called}."
    if not (line.better or line.open):
        return f"Every scheme's model is worse than {called}."
    said = [f"Worse than {called}: {', '.join(line.worse)}."] if line.worse else [f"No model is worse than {called}."]
    if line.open:
        said.append(f"Not significantly different from {called}: {', '.join(line.open)}.")
    return " ".join(said)


def bits_text(bits_per_byte: float, loss: Interval) -> str:
    """Bits per byte with the decimals that the interval of the loss allows."""
    return number(bits_per_byte, min(decimals(loss.half_width * bits_per_byte / loss.mean), UNSURE))
