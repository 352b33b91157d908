"""The figures of a report as CSV: one row an observation, numbers in full, losses and gaps in nats/token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.findings import Findings
from posbench.reporting.measure import Measurement
from posbench.reporting.statistics import NOTHING, Pair
from posbench.reporting.tables import csv_text, printable
from posbench.reporting.trend import Trend, link_verdict

if TYPE_CHECKING:
    import pandas as pd


def frames(findings: Findings) -> dict[str, pd.DataFrame]:
    """File name -> what it holds: measurements, runs, pairs, costs, published orders, n-grams, other texts, probes."""
    files = {"table.csv": measurements(findings), "runs.csv": findings.frame, "pairs.csv": pairs(findings)}
    files |= {"costs.csv": costs(findings), "against.csv": against(findings), "ngrams.csv": ngrams(findings)}
    files |= {"rates.csv": rates(findings), "texts.csv": texts(findings)}
    files |= {f"{protocol}.csv": frame for protocol, frame in findings.probes.items()}
    return {name: frame for name, frame in files.items() if not frame.empty or name in ("table.csv", "runs.csv")}


def rates(findings: Findings) -> pd.DataFrame:
    """rates.csv: one row a scheme and learning rate that was tried or trained at.

    `pilot_loss` is that of a pilot; `gap`, `gap_low` and `gap_high` stand at the scheme's own rate, every scheme at its
    own.
    """
    import pandas as pd

    own = findings.rates
    rows = []
    for scheme in findings.schemes if own else []:
        assert own is not None
        pilots, m = own.pilots.get(scheme, {}), own.measurements.get(scheme)
        for lr in sorted({*pilots, *([own.rates[scheme]] if m else [])}):
            is_own = m is not None and lr == own.rates[scheme]
            gap = m.gap if m is not None and is_own else NOTHING
            row = {"scheme": scheme, "lr": lr, "is_shared": lr == own.shared, "is_own": is_own}
            row |= {"pilot_loss": pilots.get(lr, math.nan), "loss": m.loss.mean if m and is_own else math.nan}
            rows.append({**row, "gap": gap.mean, "gap_low": gap.low, "gap_high": gap.high})
    return pd.DataFrame(rows)


def trend_frames(trend: Trend) -> dict[str, pd.DataFrame]:
    """trend.csv: one row an experiment and scheme. links.csv: one row an experiment and link of the published chain.

    Losses and gaps are those of table.csv; `difference` is that of the second scheme of a link less the first.
    """
    import pandas as pd

    rows, links = [], []
    for point in trend.points:
        where = {"experiment": point.name, "parameters": point.parameters, "tokens": point.tokens, "lr": point.lr}
        for scheme, m in point.losses.items():
            row = {**where, "scheme": scheme, "seeds": len(m.seeds), "loss": m.loss.mean}
            row |= {"gap": m.gap.mean, "gap_low": m.gap.low, "gap_high": m.gap.high}
            rows.append({**row, "gap_documents": m.gap_documents, "gap_joint": m.gap_joint})
        for better, sign, worse in trend.links:
            verdict, interval = link_verdict(point.findings, better, sign, worse)
            link = {**where, "better": better, "sign": sign, "worse": worse, "verdict": verdict}
            links.append({**link, "difference": interval.mean, "low": interval.low, "high": interval.high})
    return {"trend.csv": pd.DataFrame(rows), **({"links.csv": pd.DataFrame(links)} if links else {})}


def measurements(findings: Findings) -> pd.DataFrame:
    """table.csv: one row a scheme, protocol and length.

    `loss` is the mean over `seeds` seeds, `loss_low` and `loss_high` its 95 % interval over seeds; `gap` the same of
    the paired difference to the baseline. `loss_documents` and `gap_documents` are half the 95 % interval that the
    choice of documents leaves, `gap_joint` of that over seeds and documents together. `change` is the loss less that
    at the training length, paired by seed and document. `gap_p`, by the rule of the ranking, `gap_p_plain`, by the
    paired t-test, and `gap_p_holm`, corrected over the family, are of the pair with the baseline and stand where it was
    tested.
    """
    import pandas as pd

    tests = {
        name: pair
        for pair in findings.pairs
        for name in (pair.left, pair.right)
        if findings.baseline in (pair.left, pair.right)
    }
    rows = []
    for m in findings.measurements:
        is_tested = m.protocol == VALIDATION.name and m.scheme != findings.baseline
        rows.append(_figures(m, _gap_tests(tests.get(m.scheme) if is_tested else None)))
    return pd.DataFrame(rows)


def texts(findings: Findings) -> pd.DataFrame:
    """texts.csv: table.csv of texts that the runs were not trained on, where nothing is tested.

    `overlap` is the share of the split's 13-grams of words that also occur in the text trained on.
    """
    import pandas as pd

    rows = []
    for text in findings.texts:
        for m in text.measurements:
            overlap = text.overlaps.get(m.split)
            rows.append({"text": text.name, **_figures(m, {}), "overlap": math.nan if overlap is None else overlap})
    return pd.DataFrame(rows)


def _figures(m: Measurement, gap_tests: Mapping[str, float]) -> dict[str, Any]:
    """A row, with the tests of its gap behind it."""
    return {
        "scheme": m.scheme,
        "protocol": m.protocol,
        "split": m.split,
        "length": m.length,
        "seeds": len(m.seeds),
        "loss": m.loss.mean,
        "loss_low": m.loss.low,
        "loss_high": m.loss.high,
        "gap": m.gap.mean,
        "gap_low": m.gap.low,
        "gap_high": m.gap.high,
        **gap_tests,
        "loss_documents": m.loss_documents,
        "gap_documents": m.gap_documents,
        "gap_joint": m.gap_joint,
        "change": m.change.mean,
        "change_low": m.change.low,
        "change_high": m.change.high,
        "change_documents": m.change_documents,
        "bits_per_byte": m.bits_per_byte,
        "perplexity": m.perplexity,
        "targets": m.targets,
        "windows": m.windows,
        "documents": m.documents,
    }


def ngrams(findings: Findings) -> pd.DataFrame:
    """ngrams.csv: one row an order of the Kneser-Ney models, in the columns of table.csv.

    `better`, `worse` and `open` name the schemes whose models are better than it, worse, and not told apart from it, by
    the 95 % interval over seeds of the paired difference, each by itself.
    """
    import pandas as pd

    rows = [
        {
            "model": line.name,
            "n": line.order,
            "seeds": len(line.seeds),
            "loss": line.loss.mean,
            "loss_low": line.loss.low,
            "loss_high": line.loss.high,
            "gap": line.gap.mean,
            "gap_low": line.gap.low,
            "gap_high": line.gap.high,
            "bits_per_byte": line.bits_per_byte,
            "tokens": line.tokens,
            "targets": line.targets,
            **{name: " ".join(getattr(line, name)) for name in ("better", "worse", "open")},
        }
        for line in findings.ngrams
    ]
    return pd.DataFrame(rows)


def _gap_tests(pair: Pair | None) -> dict[str, float]:
    """The p-values of a scheme's pair with the baseline."""
    if pair is None:
        return {"gap_p": math.nan, "gap_p_plain": math.nan, "gap_p_holm": math.nan}
    return {"gap_p": pair.p, "gap_p_plain": pair.p_plain, "gap_p_holm": pair.p_holm}


def pairs(findings: Findings) -> pd.DataFrame:
    """pairs.csv: every pair of schemes by validation loss, with its test."""
    import pandas as pd

    rows = []
    for pair in findings.pairs:
        row = asdict(pair)
        interval, spread = row.pop("interval"), row.pop("spread")
        row |= {
            "test_sd": spread["sd"],
            "test_freedom": pair.spread.freedom(pair.seeds),
            "difference": interval["mean"],
            "low": interval["low"],
            "high": interval["high"],
            "decided": pair.is_decided,
            "equal": pair.is_equivalent,
            "smallest_visible": pair.smallest_visible,
            "seeds_to_decide": pair.seeds_to_decide,
            "seeds_to_equate": pair.seeds_to_equate,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def costs(findings: Findings) -> pd.DataFrame:
    """costs.csv: one row a scheme; `gap`, `gap_low` and `gap_high` are those at `equal_compute_flops`.

    `is_estimate`: the scheme or the baseline trained on beyond that point. NaN where all took the same FLOPs.
    """
    import pandas as pd

    equal, rows = findings.equal_compute, []
    for scheme in findings.schemes:
        cost, gap = findings.costs[scheme], equal.gaps[scheme] if equal else NOTHING
        row = asdict(cost) | {"tokens_per_parameter": cost.tokens_per_parameter}
        row |= {"equal_compute_flops": equal.flops if equal else math.nan}
        row |= {"gap": gap.mean, "gap_low": gap.low, "gap_high": gap.high}
        rows.append(row | {"is_estimate": bool(equal and equal.is_estimate(scheme, findings.baseline))})
    return pd.DataFrame(rows)


def against(findings: Findings) -> pd.DataFrame:
    """against.csv: one row a published column: how far its order and ours agree.

    `tau_lowest` and `tau_highest` are the range of Kendall's tau of single seeds; `tau` is that of the means over seeds
    and `p` its p-value against no relation. `reversed` counts the pairs in the other order here.
    """
    import pandas as pd

    rows = [
        {
            "published": c.published.name,
            "measurement": c.measurement.what,
            "ours": c.where,
            "schemes": len(c.rows),
            "tau": c.tau,
            "p": c.p,
            "tau_lowest": min(c.taus, default=math.nan),
            "tau_highest": max(c.taus, default=math.nan),
            "seeds": len(c.taus),
            "reversed": len(c.disagreements),
            "reversed_and_decided": sum(d.pair.is_decided for d in c.disagreements),
        }
        for c in findings.against
    ]
    return pd.DataFrame(rows)


def encode(frame: pd.DataFrame) -> bytes:
    """As UTF-8 CSV; words that a spreadsheet or a terminal would obey are neutralised, numbers are written in full."""

    def inert(value: object) -> object:
        return csv_text(printable(value)) if isinstance(value, str) else value

    safe = frame.apply(lambda column: column.map(inert)).rename(columns=inert)
    return bytes(safe.to_csv(index=False).encode())
