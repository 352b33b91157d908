"""What a loss table ranks: how large the models, how long they trained, how far back order matters, at what rate."""

from __future__ import annotations

from posbench.evaluation.protocols import ORDER
from posbench.reporting.findings import Findings
from posbench.reporting.sections.order import reaches
from posbench.reporting.tables import DASH, millions, plus_minus, rough


def ranked(findings: Findings) -> str:
    """Such as `These are models of 170,176 parameters after 1 million tokens (5.9 tokens a parameter); ...`."""
    costs = findings.costs.values()
    sizes = dict.fromkeys(millions(cost.parameters) for cost in sorted(costs, key=lambda cost: cost.parameters))
    each = dict.fromkeys(rough(cost.tokens_per_parameter) for cost in sorted(costs, key=lambda c: -c.parameters))
    tokens = dict.fromkeys(millions(cost.tokens) for cost in costs)
    size = f" of {_from_to(list(sizes))} parameters" if DASH not in sizes else ""
    ratio = f" ({_from_to(list(each))} tokens a parameter)" if DASH not in each else ""
    models = f"These are models{size} after {_from_to(list(tokens))} tokens{ratio}; {_order(findings)}."
    return " ".join(filter(None, [models, _rate(findings)]))


def _rate(findings: Findings) -> str:
    """For which schemes no learning rate but the shared one was tried; nothing where it was for all."""
    train, rates = findings.config.train, findings.rates
    tried = {*(rates.pilots if rates else {}), *(rates.rates if rates else {}), *(train.lr_of or {})}
    there = [scheme for scheme in findings.schemes if scheme in tried]
    if len(there) == len(findings.schemes):
        return ""
    rate = f"The learning rate is {train.lr:g}{' for all' * (not train.lr_of)}."
    if there:
        where = f"only for {', '.join(there)}"
        return f"{rate} Others were tried (`posbench tune`) {where}; other gaps may be due to the rate."
    return f"{rate} No other was tried (`posbench tune`), so gaps may be due to the rate."


def _from_to(texts: list[str]) -> str:
    """`0.15`, `0.14 to 0.15`."""
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def _order(findings: Findings) -> str:
    """How far back the best scheme is seen to use the order of tokens."""
    frame, best = findings.probes[ORDER.name], findings.best
    lengths = sorted(set(frame.loc[frame["scheme"] == best, "length"]))
    length = findings.training_length if findings.training_length in lengths else max(lengths, default=0)
    if not lengths:
        return f"how far back they use the order of tokens was not measured (`posbench eval --protocol {ORDER.name}`)"
    reach = reaches(frame, length)[best]
    if reach == DASH:
        return "there are too few documents to say how far back they use the order of tokens"
    if reach == "0":
        return f"no use of order beyond the last token was found in the best, {best}"
    rows = frame[(frame["scheme"] == best) & (frame["length"] == length)].set_index("bucket_end")
    end = int(reach.removeprefix("≥ ")) + 1
    lost, half = (float(rows[column].to_dict()[end]) for column in ("lost_order", "lost_order_texts"))
    return (
        f"the best, {best}, uses the order of tokens up to {reach.replace('≥', 'at least')} tokens back, where it is "
        f"worth {plus_minus(lost, half)} nats/token"
    )
