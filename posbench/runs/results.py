"""The results of a run: its `eval/` folder, written and read here alone.

    eval/<protocol>/<length>.parquet              one row a window, as trained
    eval/<protocol>/<length>@<options>.parquet    ... under options of the scheme that held at evaluation alone
    eval/<protocol>/<length>@data=<name>.parquet  ... on another text than the run was trained on
    eval/<protocol>/<length>.json                 the header beside it: settings, means, and what it was made from

A header names its run, the weights (their digest), the text and the tokenizer. A result that names another run or
other weights than those of its run folder was copied from elsewhere or is out of date: `Run.results` does not use it,
and says so.

Every figure of a report is a token-weighted mean over windows: the sum of `nll` (nats) over the sum of `targets`
(tokens), never a mean of means.
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


BFLOAT16, FILE_CHANGED = "weights=bfloat16", "file=changed"  # marks of results: of rounded weights, of another code
MARKS = (BFLOAT16, FILE_CHANGED)  # they are no options of the evaluation
# Columns that say what was scored.
_PLACES = ("document", "start", "gap", "bucket_start", "bucket_end", "targets", "problem", "answers")
_FILE = re.compile(r"([0-9]{1,9})((?:@[^@=]+=[^@]+)*)\.parquet")


@dataclass(frozen=True, order=True)
class ResultKey:
    """What a result is known by: the protocol, the length (tokens), and what held at evaluation alone.

    `under` is sorted, and empty for the scheme as trained. It holds options of the scheme, `step=<n>` where older
    weights were scored, `data=<name>` where another text was, and MARKS.
    """

    protocol: str
    length: int
    under: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "under", tuple(sorted(self.under)))

    @property
    def step(self) -> int | None:
        """The step whose weights were scored, where it is not the run's last."""
        steps = [option.removeprefix("step=") for option in self.under if option.startswith("step=")]
        return int(steps[0]) if steps else None

    @property
    def data(self) -> str | None:
        """The name of the text that was scored, where it is not the one of the run."""
        return next((option.removeprefix("data=") for option in self.under if option.startswith("data=")), None)

    @property
    def options(self) -> tuple[str, ...]:
        """`under` without the text."""
        return tuple(option for option in self.under if not option.startswith("data="))

    @property
    def stem(self) -> str:
        """The name of its two files, without the ending."""
        return "@".join((str(self.length), *self.under)).replace("/", "%2F")  # a scheme's file may lie in a folder

    def __str__(self) -> str:
        return f"{self.protocol} at {self.length}" + (f" under {' '.join(self.under)}" if self.under else "")


def row_name(scheme: str, options: Sequence[str]) -> str:
    """The name of a scheme under options, in tables: `qk_rope · factor=4 rescale=yarn`."""
    return f"{scheme} · {' '.join(options)}" if options else scheme


@dataclass(frozen=True, eq=False)
class Result:
    """One result of one run."""

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
        """One row a window."""
        return self.table.to_pandas()

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, nats/token."""
        return self._sum("nll") / self._sum("targets")

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text: comparable between tokenizers. NaN where no bytes were counted."""
        if "bytes" not in self.table.column_names:
            return math.nan
        return self._sum("nll") / math.log(2) / self._sum("bytes")

    @cached_property
    def windows_digest(self) -> str:
        """A digest of what was scored, in which numbers."""
        digest = crc32(repr([self.header.get(key) for key in ("data", "tokenizer", "dtype")]).encode())
        for name in _PLACES:
            if name in self.table.column_names:
                digest = crc32(self.table[name].to_numpy().tobytes(), digest)
        return f"{digest:08x}"

    def _sum(self, column: str) -> float:
        return float(self.table[column].to_numpy().sum())


@dataclass(frozen=True, order=True)
class Damaged:
    """A file that is not a result of the run it lies in."""

    key: ResultKey
    file: Path
    why: str

    def __str__(self) -> str:
        return f"{self.file} is not used: {self.why}. `posbench eval` of {self.key} makes it again"


def parquet(table: pyarrow.Table, compression: str = "zstd", level: int = 9) -> bytes:
    """A table as a file, with a checksum for each page."""
    import pyarrow
    import pyarrow.parquet

    floats = [each.name for each in table.schema if pyarrow.types.is_floating(each.type)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(None),
        buffer,
        compression=compression,
        compression_level=level,
        use_dictionary=[name for name in table.column_names if name not in floats],
        use_byte_stream_split=floats,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
        row_group_size=1 << 20,
        data_page_size=1 << 24,
    )
    return buffer.getvalue()


def read_parquet(content: bytes) -> pyarrow.Table:
    """The table in a file. Raises: OSError or ValueError where it is damaged."""
    import pyarrow.parquet

    # In one thread: a thread that still holds `content` when Python ends aborts the process.
    return pyarrow.parquet.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read(use_threads=False)


def keys_in(folder: Path) -> list[ResultKey]:
    """The results that the files of an `eval/` folder are named after, sorted; what they hold is not looked at."""
    files = [(file, _FILE.fullmatch(file.name)) for file in folder.glob("*/*.parquet")]
    return sorted(
        ResultKey(file.parent.name, int(m[1]), tuple(m[2].replace("%2F", "/").split("@")[1:])) for file, m in files if m
    )


def perplexity(loss: float) -> float:
    """`exp` of a mean loss in nats/token, capped so that it stays a finite number."""
    return math.exp(min(loss, 700.0))  # of more than about 709 it is not a float
