"""The report as one HTML page that needs nothing else: no network, no script, every name escaped, pictures inline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from posbench.reporting.palette import DASHDOT, DASHED, DOTTED, GRID, INK, Look
from posbench.reporting.tables import printable, whole

if TYPE_CHECKING:
    from markupsafe import Markup

    from posbench.reporting.findings import Findings
    from posbench.reporting.sections import Section

_DASHES = {DASHED: "5 2.5", DASHDOT: "7 2 1.5 2", DOTTED: "1.5 2"}


def render(name: str, lede: str, sections: list[Section], drawings: dict[str, str], looks: Mapping[str, Look]) -> str:
    """The page.

    Arguments: name, of what is reported; lede, a sentence of what was compared; drawings, the SVG documents of the
    pictures that the sections name; looks, how each scheme is drawn.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from posbench.version import __version__

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    environment.filters["prose"] = prose
    template = environment.get_template("report.html.j2")
    return template.render(
        title=f"posbench: {printable(name)}",
        lede=printable(lede),
        version=__version__,
        sections=sections,
        inline={stem: Markup(inline_svg(drawing, stem)) for stem, drawing in drawings.items()},
        swatches={scheme: Markup(swatch(look)) for scheme, look in looks.items()},
    )


def prose(text: str) -> Markup:
    """A sentence as HTML: escaped, and with what is between backquotes as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(printable(text)))))


def lede(findings: Findings) -> str:
    """What was compared, in one sentence."""
    runs, config = findings.joined.runs, findings.config
    seeds = len(findings.joined.seeds)
    said = [
        f"{len(findings.schemes)} position schemes",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        f"model {config.model.name}",
        f"{whole(runs['tokens'].max())} tokens of {config.data.name} a run",
    ]
    return ", ".join(said) + f", trained at {config.train.context_length:,} tokens of context. Lower loss is better."


def inline_svg(drawing: str, prefix: str) -> str:
    """matplotlib's SVG document as an element of a page: with ids of its own, in the page's colours and size."""
    body = drawing[drawing.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    return body.replace(INK, "currentColor").replace(GRID, "var(--rule)")


def swatch(look: Look) -> str:
    """A short sample of a scheme's line."""
    colour = "currentColor" if look.colour == INK else look.colour
    dashes = f' stroke-dasharray="{_DASHES[look.line]}"' if look.line in _DASHES else ""
    line = f'<path d="M0 4H22" stroke="{colour}" stroke-width="2.2"{dashes}/>'
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{line}</svg>'
