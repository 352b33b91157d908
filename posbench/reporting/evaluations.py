"""What a run folder holds of its evaluation: losses window by window, and the means that are made of them.

`eval/<protocol>/<length>.parquet` holds one row a window, `<length>.json` beside it the settings. Every figure of a
report is a token-weighted mean over such rows: the sum of `nll` (nats) over the sum of `targets` (tokens), never a
mean of means.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.machine.files import read_json

if TYPE_CHECKING:
    import pandas as pd

VALIDATION = "validation"  # the loss table: the validation split at the training length, written by training
LENGTH_PROTOCOLS = ("fixed", "nonoverlapping", "sliding")  # perplexity by length on the test split
POSITION, RETRIEVAL = "position", "retrieval"
LOSS_PROTOCOLS = (VALIDATION, *LENGTH_PROTOCOLS)
_COLUMNS = {
    **dict.fromkeys(LOSS_PROTOCOLS, ("document", "start", "targets", "nll", "bytes")),
    POSITION: ("document", "bucket_start", "bucket_end", "targets", "nll"),
    RETRIEVAL: ("document", "start", "gap", "targets", "second_nll", "control_nll"),
}


@dataclass(frozen=True)
class Evaluation:
    """One protocol at one length (tokens) of one run. Read when first asked for."""

    file: Path

    @property
    def protocol(self) -> str:
        return self.file.parent.name

    @property
    def length(self) -> int:
        return int(self.file.stem)

    @cached_property
    def header(self) -> dict[str, Any]:
        """The settings beside the windows. Raises: ConfigError where they cannot be read."""
        file = self.file.with_suffix(".json")
        try:
            header = read_json(file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}): delete the folder {file.parent} and run `posbench eval` again"
            ) from error
        if not isinstance(header, dict):
            raise ConfigError(
                f"{file} holds no settings: delete the folder {file.parent} and run `posbench eval` again"
            )
        return header

    @cached_property
    def windows(self) -> pd.DataFrame:
        """One row a window. Raises: ConfigError where the file is torn or lacks a column."""
        import pyarrow.parquet
        from pyarrow import ArrowException

        try:
            frame = pyarrow.parquet.read_table(self.file).to_pandas()
        except (OSError, ArrowException) as error:
            raise ConfigError(
                f"{self.file} cannot be read ({str(error).splitlines()[0]}): delete it and run `posbench eval` again"
            ) from error
        lacking = [name for name in _COLUMNS.get(self.protocol, ()) if name not in frame]
        if lacking or frame.empty:
            what = f"lacks the column {lacking[0]!r}" if lacking else "holds no windows"
            raise ConfigError(f"{self.file} {what}: delete it and run `posbench eval` again")
        wrong = [name for name in _COLUMNS.get(self.protocol, ()) if not self._makes_sense(frame[name])]
        if wrong:
            raise ConfigError(
                f"{self.file}: the column {wrong[0]!r} holds what it cannot: delete it and run `posbench eval` again"
            )
        return frame

    def _makes_sense(self, column: pd.Series) -> bool:
        """Numbers; losses may be NaN, all else is whole and not negative, and something was scored."""
        import pandas as pd

        name, types = column.name, pd.api.types
        if str(name).endswith("nll"):
            return bool(types.is_float_dtype(column))
        whole = types.is_integer_dtype(column) and not column.isna().any() and column.min() >= 0
        if name == "document":
            return bool(whole and column.max() < 1 << 27)
        each = name == "targets" and self.protocol != POSITION  # a document may end before a bucket
        return bool(whole and (name not in ("targets", "bytes") or (column.min() if each else column.sum()) > 0))

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, nats/token."""
        return float(self.windows["nll"].to_numpy().sum() / self.windows["targets"].sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text: comparable between tokenizers."""
        return float(self.windows["nll"].to_numpy().sum() / math.log(2) / self.windows["bytes"].sum())

    def sums(self, by: list[str]) -> pd.DataFrame:
        """The sums of every column over the windows that agree in `by`, sorted. A NaN is not skipped."""
        import numpy as np
        import pandas as pd

        groups = self.windows.groupby(by, sort=True)
        number, keys = groups.ngroup().to_numpy(), groups.size().index
        columns = [name for name in self.windows if name not in by]
        return pd.DataFrame({c: np.bincount(number, weights=self.windows[c]) for c in columns}, index=keys)

    @cached_property
    def task(self) -> tuple[Any, ...]:
        """What was scored, and in which numbers. Two of one task can be set beside each other window by window."""
        keys = [
            name
            for name in self.windows
            if name in ("document", "start", "gap", "bucket_start", "bucket_end", "targets")
        ]
        how = tuple(str(self.header.get(key)) for key in ("data", "tokenizer", "dtype", "code"))
        return how, tuple((name, self.windows[name].to_numpy().tobytes()) for name in sorted(keys))


def evaluations(run: Path) -> list[Evaluation]:
    """Every finished evaluation in a run folder (a parquet file with its settings), by protocol and length."""
    found = [
        Evaluation(file)
        for file in (run / "eval").glob("*/*.parquet")
        if re.fullmatch(r"[0-9]{1,9}", file.stem) and file.with_suffix(".json").is_file()
    ]
    return sorted(found, key=lambda e: (e.protocol, e.length))


def perplexity(loss: float) -> float:
    """`exp(loss)`, infinity where that is too large for a float."""
    return math.inf if loss > 700 else math.exp(loss)
