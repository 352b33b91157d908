"""What every table of stored windows must be, whatever protocol scored it; its columns are its protocol's own."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

_WHOLE = ("document", "start", "targets", "bytes", "gap", "bucket_start", "bucket_end")  # columns of whole numbers


def read_table(content: bytes) -> pyarrow.Table:
    """The table that a parquet file holds. Raises: ValueError with the first line of what is wrong."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(io.BytesIO(content)).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(str(error).splitlines()[0]) from None


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
            if fits and name in ("targets", "bytes"):  # a document may end before a bucket of positions
                each = name == "targets" and "bucket_start" not in table.column_names
                least = pyarrow.compute.min(column) if each else pyarrow.compute.max(column)
                fits = least.as_py() > 0
        if not fits:
            return f"the column {name!r} has impossible values"
    return None
