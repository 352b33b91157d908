"""Store and read the results of a run, in its `eval/` folder.

    eval/<protocol>/<length>.parquet              one row per window of text, scored with the model as trained
    eval/<protocol>/<length>@<options>.parquet    the same, with other options of the scheme for this evaluation
    eval/<protocol>/<length>@data=<name>.parquet  the same, on another text than the run was trained on
    eval/<protocol>/<length>@anchor=<n>.parquet   a protocol whose targets depend on the longest length of a comparison
    eval/<protocol>/<length>.json                 the header of each result: settings, means, run, weights and text

Every figure of a report is the sum of `nll` (nats) divided by the sum of `targets` (tokens), never a mean of means.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow


# Entries of `under` that are not options: they mark results of rounded weights, and of a scheme whose file has changed.
BFLOAT16, FILE_CHANGED = "weights=bfloat16", "file=changed"
MARKS = (BFLOAT16, FILE_CHANGED)
# Columns that identify the scored windows.
_WINDOW_COLUMNS = ("document", "start", "bucket_start", "bucket_end", "targets", "problem", "answers")
_ANCHOR = "anchor="
_FILE = re.compile(r"([0-9]{1,9})((?:@[^@=]+=[^@]+)*)\.parquet")


@dataclass(frozen=True, order=True)
class ResultKey:
    """The key of an evaluation result within its run: protocol, length (tokens), settings of the evaluation, anchor.

    The settings, `under`, are options of the scheme, `step=<n>` for weights of an earlier step, `data=<name>` for
    another text, and any of MARKS; they are empty for the model as trained.
    """

    protocol: str
    length: int
    under: tuple[str, ...] = ()
    anchor: int = 0  # the longest length that was scored on the same targets, tokens; 0 if targets never depend on it

    def __post_init__(self) -> None:
        # In one order, so that equal settings give equal keys.
        object.__setattr__(self, "under", tuple(sorted(self.under)))

    @property
    def step(self) -> int | None:
        """Return the training step whose weights were scored, or None for the last."""
        steps = [option.removeprefix("step=") for option in self.under if option.startswith("step=")]
        return int(steps[0]) if steps else None

    @property
    def data(self) -> str | None:
        """Return the name of the text that was scored, or None for the run's own."""
        for option in self.under:
            if option.startswith("data="):
                return option.removeprefix("data=")
        return None

    @property
    def options(self) -> tuple[str, ...]:
        """Return the settings of this evaluation (`under`) except `data=<name>`."""
        return tuple(option for option in self.under if not option.startswith("data="))

    @property
    def stem(self) -> str:
        """Return the name of the result's files without suffix: `8192@anchor=16384@rescale=yarn`."""
        anchor = [f"{_ANCHOR}{self.anchor}"] if self.anchor else []
        return "@".join((str(self.length), *anchor, *self.under)).replace("/", "%2F")  # a scheme's file may have a /

    def __str__(self) -> str:
        text = f"{self.protocol} at {self.length}"
        return f"{text} under {' '.join(self.under)}" if self.under else text


def row_name(scheme: str, options: Sequence[str]) -> str:
    """Return the name of a table row: `qk_rope · factor=4 rescale=yarn`."""
    return f"{scheme} · {' '.join(options)}" if options else scheme


@dataclass(frozen=True, eq=False)
class Result:
    """The scores that one evaluation protocol gave one run at one length."""

    key: ResultKey
    header: Mapping[str, Any]
    table: pyarrow.Table

    @property
    def protocol(self) -> str:
        return self.key.protocol

    @property
    def length(self) -> int:
        return self.key.length

    @cached_property
    def windows(self) -> pd.DataFrame:
        """Return the scores as a DataFrame with one row per window of text."""
        return self.table.to_pandas()

    @property
    def loss(self) -> float:
        """Return the mean negative log-likelihood over all scored tokens, nats/token."""
        return self._sum("nll") / self._sum("targets")

    @property
    def bits_per_byte(self) -> float:
        """Return bits per byte of text, comparable between tokenizers, or NaN if no bytes were counted."""
        if "bytes" not in self.table.column_names:
            return math.nan
        return self._sum("nll") / math.log(2) / self._sum("bytes")

    @cached_property
    def windows_digest(self) -> str:
        """Return 8 hex digits that are equal for results with the same windows, text, tokenizer and number format."""
        digest = crc32(repr([self.header.get(key) for key in ("data", "tokenizer", "dtype")]).encode())
        for name in _WINDOW_COLUMNS:
            if name in self.table.column_names:
                digest = crc32(self.table[name].to_numpy().tobytes(), digest)
        return f"{digest:08x}"

    def _sum(self, column: str) -> float:
        return float(self.table[column].to_numpy().sum())


@dataclass(frozen=True, order=True)
class InvalidResult:
    """A file in a run's `eval/` folder that is damaged or is not a result of this run, and why."""

    key: ResultKey
    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.file} is not used: {self.reason}. `posbench eval` of {self.key} makes it again"


def parquet(table: pyarrow.Table, compression: str = "zstd", level: int = 9) -> bytes:
    """Return `table` as the bytes of a Parquet file, with a checksum for each page."""
    import pyarrow
    import pyarrow.parquet

    # Losses compress better byte by byte, other columns by a dictionary.
    floats = [column.name for column in table.schema if pyarrow.types.is_floating(column.type)]
    whole_numbers = [name for name in table.column_names if name not in floats]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(None),
        buffer,
        compression=compression,
        compression_level=level,
        use_dictionary=whole_numbers,
        use_byte_stream_split=floats,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
        row_group_size=1 << 20,
        data_page_size=1 << 24,
    )
    return buffer.getvalue()


def read_parquet(content: bytes) -> pyarrow.Table:
    """Return the table in the Parquet bytes `content`. Raises: OSError or ValueError if they are damaged."""
    import pyarrow.parquet

    # In one thread: a thread that still holds `content` when Python ends aborts the process.
    return pyarrow.parquet.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read(use_threads=False)


def keys_in(folder: Path) -> dict[Path, ResultKey]:
    """Return {file of rows: its key} of the results in the `eval/` folder, sorted by key, by file names only."""
    keys = {}
    for file in folder.glob("*/*.parquet"):
        match = _FILE.fullmatch(file.name)
        # Not the name of a result, such as `8192@anchor=16384@rescale=yarn.parquet`.
        if match is None:
            continue
        words = match[2].replace("%2F", "/").split("@")[1:]  # as `ResultKey.stem` wrote them
        # One anchor at most. The names of older files have none, although it is in their headers.
        anchors = [word.removeprefix(_ANCHOR) for word in words if word.startswith(_ANCHOR)]
        if len(anchors) > 1 or not all(anchor.isdecimal() for anchor in anchors):
            continue
        options = tuple(word for word in words if not word.startswith(_ANCHOR))
        keys[file] = ResultKey(file.parent.name, int(match[1]), options, *map(int, anchors))
    return dict(sorted(keys.items(), key=lambda item: item[1]))


def key_of(header: Mapping[str, Any]) -> ResultKey:
    """Return the key of the result with this header."""
    return ResultKey(header["protocol"], header["length"], tuple(header["under"]), header.get("anchor", 0))


def perplexity(loss: float) -> float:
    """Return exp(loss) for a mean loss in nats/token, capped so it stays finite."""
    return math.exp(min(loss, 700.0))  # exp overflows above about 709
