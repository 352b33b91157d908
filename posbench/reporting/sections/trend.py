"""A trend over sizes and tokens as sections: gaps, the published chain, the reach of order, and longer contexts."""

from __future__ import annotations

from collections.abc import Callable

from posbench.evaluation.protocols import FIXED, ORDER
from posbench.reporting.chains import letters
from posbench.reporting.sections.order import reaches
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.tables import DASH, Table, gap_text, length_text, millions, plus_minus, rough
from posbench.reporting.trend import Point, Trend, doubling_of_size, doubling_of_tokens, link_verdict
from posbench.units import short_count

Cell = Callable[[Point, str], str]


def trend_sections(trend: Trend, drawn: list[str]) -> list[Section]:
    """All sections that have something to say. `drawn` names the pictures."""
    made = [_compared(trend), _gaps(trend, drawn), _links(trend), _order(trend), _lengths(trend)]
    if trend.notes:
        made.append(Section("Notes", trend.notes))
    return [section for section in made if section is not None]


def _compared(trend: Trend) -> Section:
    headers = ["experiment", "parameters", "tokens\na run", "tokens a\nparameter", "learning\nrate", "seeds"]
    headers.append("significant\npairs")
    rows = []
    for point in trend.points:
        pairs = point.findings.pairs
        tested = [pair for pair in pairs if pair.is_tested]
        decided = f"{sum(pair.is_decided for pair in tested)} of {len(tested)}" if tested else "not tested"
        size = [millions(point.parameters), millions(point.tokens), rough(point.tokens / point.parameters)]
        rows.append([point.name, *size, f"{point.lr:g}", str(len(point.findings.joined.seeds)), decided])
    words = [
        "Each experiment has one size and one budget of tokens. Every loss is that of a finished run, after its "
        "learning rate had decayed. Text, tokenizer, scored windows and settings are the same; only size, tokens and "
        "learning rate differ. Gaps are taken within an experiment. The tests of one experiment together have a 5% "
        "chance of any false verdict, so among many experiments some have one.",
    ]
    words += _rates(trend)
    return Section("What is compared", words, [Table("What is compared", headers, rows)])


def _rates(trend: Trend) -> list[str]:
    """Where no learning rate but the shared one was tried, for any scheme."""
    tried = [point.name for point in trend.points if (rates := point.findings.rates) and rates.pilots]
    if len(tried) == len(trend.points):
        return []
    if tried:
        where = f"only in {', '.join(tried)}; in the others gaps may be due to the rate."
        return [f"Other learning rates were tried (`posbench tune`) {where}"]
    return ["No other learning rate was tried (`posbench tune`), so gaps may be due to the rate."]


def _gaps(trend: Trend, drawn: list[str]) -> Section:
    base = trend.baseline
    words = [
        f"Gap to {base} in nats/token, lower is better; ± is half the 95% interval over seeds (Student's t). One "
        "seed has none.",
    ]
    tables = [_by_point(trend, f"Gap to {base}, nats/token", lambda point, scheme: _gap(trend, point, scheme))]
    tables[0].foot = _context(trend)
    if any(point.findings.ngrams for point in trend.points):
        words.append(
            "Kneser-Ney n is not a scheme: it predicts a token from the n - 1 before it, by counts in the windows that "
            "the models of its column were trained on."
        )
    slopes = _slopes(trend)
    if slopes is not None:
        words.append(
            "Trend: how much the gap changes per doubling. It is a least-squares slope for each seed, and the interval "
            "is that of their mean. Across sizes the longest run of each size is used, so tokens change with size."
        )
        tables.append(slopes)
    bars = "Bars are 95 % intervals over seeds."
    by_tokens = f"Gap to {base} against tokens, one panel per size. Each point is a finished run of that budget. {bars}"
    by_size = f"Gap to {base} against parameters, at the most tokens of each size. {bars}"
    shown = [*pictures(drawn, "gaps-by-tokens", by_tokens), *pictures(drawn, "gaps-by-size", by_size)]
    return Section("Gaps by size and tokens", words, tables, shown)


def _context(trend: Trend) -> list[list[str]]:
    """What the gaps are to, and where n-gram models stand: rows below the schemes."""
    orders = sorted({line.order for point in trend.points for line in point.findings.ngrams})
    rows = [[f"loss of {trend.baseline}", *(_loss(point, trend.baseline) for point in trend.points)]]
    for order in orders:
        lines = [next((each for each in point.findings.ngrams if each.order == order), None) for point in trend.points]
        gaps = [DASH if each is None else plus_minus(each.gap.mean, each.gap.half_width, sign=True) for each in lines]
        rows.append([f"Kneser-Ney {order}", *gaps])
    return rows


def _loss(point: Point, scheme: str) -> str:
    m = point.losses.get(scheme)
    return DASH if m is None else plus_minus(m.loss.mean, m.loss.half_width)


def _gap(trend: Trend, point: Point, scheme: str) -> str:
    m = point.losses.get(scheme)
    return DASH if m is None else gap_text(m.gap.mean, m.gap.half_width, scheme == trend.baseline)


def _slopes(trend: Trend) -> Table | None:
    """One row a scheme: a column a size that has several budgets, and one for sizes where there are several."""
    columns = {
        f"per doubling of tokens\nat {short_count(size)} parameters": (doubling_of_tokens, points)
        for size, points in trend.sizes().items()
        if len(points) > 1
    }
    if len(trend.sizes()) > 1:
        columns["per doubling\nof parameters"] = (doubling_of_size, trend.longest())
    if not columns:
        return None
    rows = []
    for scheme in (scheme for scheme in trend.schemes if scheme != trend.baseline):
        slopes = [slope(points, scheme) for slope, points in columns.values()]
        rows.append([scheme, *(plus_minus(each.mean, each.half_width, sign=True) for each in slopes)])
    return Table("Trend of the gap, nats/token", ["scheme", *columns], rows)


def _links(trend: Trend) -> Section | None:
    """Which links of the published chain each point confirms."""
    if not trend.links:
        return None
    rows = []
    for better, sign, worse in trend.links:
        cells = []
        for point in trend.points:
            verdict, interval = link_verdict(point.findings, better, sign, worse)
            text = plus_minus(interval.mean, interval.half_width, sign=True)
            cells.append(f"{verdict} {text}" if verdict else DASH)
        rows.append([f"{better} {sign} {worse}", *cells])
    words = [
        "A link “>” is confirmed if the first is significantly better, and contradicted if the second is, or if the "
        "two are equal within the margin. A link “~” or “/” claims no difference: it is confirmed if they are equal "
        "within the margin, and contradicted if one is significantly better and they are not. Otherwise it is open. "
        "The number is how much higher the loss of the second is, ± half a 95% interval by the rule of the test, not "
        "corrected for the number of pairs. Brackets mean one seed: nothing is tested, and only the sign of the number "
        "is compared.",
    ]
    for point in trend.points:
        if point.findings.chain.is_tested:
            groups = letters(point.findings.pairs)
            words.append(f"{point.name}: {', '.join(f'{name} ({letter})' for name, letter in groups.items())}.")
    return Section("The published chain", words, [Table("The published chain", _headers(trend, "link"), rows)])


def _order(trend: Trend) -> Section | None:
    """How far back order matters at each point."""
    texts = {}
    for point in trend.points:
        frame, length = point.findings.probes[ORDER.name], point.findings.training_length
        texts[point.name] = reaches(frame, length) if length in set(frame["length"]) else {}
    if not any(texts.values()):
        return None
    words = [
        "Reach in tokens: the largest distance up to which a model was found to use the order of the tokens farther "
        "back. It depends on the number of windows scored, which is the same everywhere."
    ]
    return Section(
        "How far back order matters",
        words,
        [_by_point(trend, "Reach, tokens", lambda point, scheme: texts[point.name].get(scheme, DASH))],
    )


def _lengths(trend: Trend) -> Section | None:
    """What contexts longer than the trained one cost, at twice its length and at the longest."""
    training = trend.points[0].findings.training_length
    shared = set.intersection(*(set(point.findings.lengths(FIXED.name)) for point in trend.points))
    longer = sorted(length for length in shared if length >= 2 * training)
    if not longer:
        return None

    def cell(length: int) -> Cell:
        def text(point: Point, scheme: str) -> str:
            m = point.findings.at(FIXED.name, length).get(scheme)
            return DASH if m is None else plus_minus(m.change.mean, m.change_half, sign=True)

        return text

    tables = [
        _by_point(trend, f"Loss at {length_text(n)} minus that at {length_text(training)} tokens, nats/token", cell(n))
        for n in dict.fromkeys((longer[0], longer[-1]))
    ]
    words = [
        "The same targets with more context than in training (protocol fixed). ± is half the 95% interval over seeds "
        "or over documents, whichever is larger."
    ]
    return Section("Contexts longer than the trained one", words, tables)


def _by_point(trend: Trend, title: str, cell: Cell) -> Table:
    rows = [[scheme, *(cell(point, scheme) for point in trend.points)] for scheme in trend.schemes]
    return Table(title, _headers(trend, "scheme"), rows)


def _headers(trend: Trend, first: str) -> list[str]:
    return [
        first,
        *(f"{short_count(point.parameters)} model\n{short_count(point.tokens)} tokens" for point in trend.points),
    ]
