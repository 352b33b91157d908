"""Questions to the Hugging Face hub, which is given seconds to answer: its own client would try for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable

SECONDS = 5.0  # for the first answer


def failure_of(ask: Callable[[], object]) -> Exception | None:
    """What went wrong with a question; None where it was answered within `SECONDS`."""
    failure: list[Exception | None] = [TimeoutError(f"no answer within {SECONDS:g} s")]

    def asked() -> None:
        try:
            ask()
            failure[0] = None
        except Exception as error:
            failure[0] = error

    asking = threading.Thread(target=asked, daemon=True)  # a time-out of the client does not cover looking up the name
    asking.start()
    asking.join(SECONDS)
    return failure[0]
