"""The terminal that every table, bar and line of posbench goes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from posbench.machine.notices import UNREAD, inert, to_nobody


class Terminal(Console):
    """rich's console for text that others may have written, in run folders, texts and tokenizers: it is shown inert.

    Colours and bars are rich's own control codes, and stay. Work does not end where its reader goes away (`| head -1`).

    Arguments: for_show, whether there is no work beside the showing: the command then ends with the reader.
    """

    def __init__(self, *, for_show: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._for_show = for_show

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, of inert text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(inert(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Called by rich when nobody reads any more."""
        to_nobody(self.file)
        if self._for_show:
            raise SystemExit(UNREAD)
