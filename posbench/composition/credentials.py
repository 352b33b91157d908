"""What may leave the machine: plain values without the credentials that may have strayed into them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "[removed]"
_NAME = re.compile(r"(^|[_.-])(api_?key|key|token|secret|pass(word|wd|phrase)?|credentials?|auth)$", re.IGNORECASE)
_FORMS = (
    r"(?<=://)[^/\s@]+(?=@)",  # user:password@ of an address
    r"(?<=[?&])[\w-]*(?:token|key|signature|sig|secret|credential)=[^&\s]+",  # a signed address
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bwandb_v\d_\w{16,}",
    r"\bsk-[\w-]{16,}",
    r"\b(?:gh[a-z]_|github_pat_)\w{16,}",
    r"\bAKIA[A-Z0-9]{12,}",
    r"\beyJ[\w-]{8,}\.[\w.-]{8,}",  # a JSON web token
)
_FORM = re.compile("|".join(_FORMS), re.IGNORECASE)
_SHORTEST = 8  # characters; a shorter secret of the environment would blot out ordinary words


def scrub(value: Any) -> Any:
    """`value` (dicts, lists, plain values) without text that looks like a credential.

    Taken out: text under a telling name (`api_key`), in a telling form (`hf_...`, `user:password@`), and text equal to
    a variable of the environment with a telling name. A guard against accidents, not a proof.
    """
    if isinstance(value, Mapping):
        return {key: _scrub_under(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(inner) for inner in value]
    return _scrub_text(value) if isinstance(value, str) else value


def _scrub_under(name: str, value: Any) -> Any:
    return REMOVED if isinstance(value, str) and _NAME.search(name) else scrub(value)


def _scrub_text(text: str) -> str:
    for name, secret in os.environ.items():
        if len(secret) >= _SHORTEST and _NAME.search(name):
            text = text.replace(secret, REMOVED)
    return _FORM.sub(REMOVED, text)
