"""What every table of stored windows must be, whatever protocol scored it; its columns are its protocol's own."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

_WHOLE = ("document", "start", "targets", "bytes", "gap", "bucket_start", "bucket_end")  # columns of whole numbers
_MOST_DOCUMENTS = 1 << 27
_MOST_CELLS = 1 << 28  # of a table: 2 GB of numbers
_MOST_UNPACKED = 1 << 31  # bytes, as the file states them


def read_table(content: bytes) -> pyarrow.Table:
    """The table that a parquet file holds, unless a few bytes stand for more than such tables have.

    Raises: ValueError with the first line of what is wrong.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        _check_size(file.metadata)
        return file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _check_size(metadata: Any) -> None:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    unpacked = sum(group.total_byte_size for group in groups)
    if metadata.num_rows * metadata.num_columns > _MOST_CELLS or unpacked > _MOST_UNPACKED:
        raise ValueError(f"it has {metadata.num_rows:,} rows in {unpacked:,} bytes, more than such a file can have")


def fault(table: pyarrow.Table) -> str | None:
    """What a column holds that windows cannot: losses are floats (NaN too), all else is whole and not negative."""
    import pyarrow.compute
    import pyarrow.types

    if table.num_rows == 0:
        return "it has no windows"
    for lacking in {"document", "targets"} - set(table.column_names):
        return f"it lacks the column {lacking!r}"
    for name in table.column_names:
        column = table[name]
        fits = not column.null_count
        if name.endswith("nll"):  # pandas writes NaN as null
            fits = pyarrow.types.is_floating(column.type)
        elif name in _WHOLE:
            fits = fits and pyarrow.types.is_integer(column.type) and pyarrow.compute.min(column).as_py() >= 0
            if fits and name == "document":
                fits = pyarrow.compute.max(column).as_py() < _MOST_DOCUMENTS
            if fits and name in ("targets", "bytes"):  # a document may end before a bucket of positions
                each = name == "targets" and "bucket_start" not in table.column_names
                least = pyarrow.compute.min(column) if each else pyarrow.compute.max(column)
                fits = least.as_py() > 0
        if not fits:
            return f"the column {name!r} has impossible values"
    return None
