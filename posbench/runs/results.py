"""The results of a run: its `eval/` folder, written and read here alone.

    eval/<protocol>/<length>.parquet              one row a window, as trained
    eval/<protocol>/<length>@<options>.parquet    ... under options of the scheme that held at evaluation alone
    eval/<protocol>/<length>@data=<name>.parquet  ... on another text than the run was trained on
    eval/<protocol>/<length>.json                 the header beside it: settings, means, and what it was made from

A header names its run, the weights (their digest), the text and the tokenizer. A file that names another run or other
weights than the run that it lies in was copied there, or is older than the weights: it is not a result, and
`results_of` names it with the command that makes it again.

Every figure of a report is a token-weighted mean over windows: the sum of `nll` (nats) over the sum of `targets`
(tokens), never a mean of means.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.machine.files import read_json, remove_leftovers, write_bytes, write_json
from posbench.runs.manifest import FINISHED, Manifest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

    from posbench.runs.run import Run

_FILE = re.compile(r"([0-9]{1,9})((?:@[^@=]+=[^@]+)*)\.parquet")
_OPTION = re.compile(r"[a-z_][a-z0-9_.]{0,39}=[A-Za-z0-9_.,+\[\]-]{1,60}")
_TEXT = re.compile(r"data=[A-Za-z0-9][A-Za-z0-9_.+-]{0,59}")
_NOT_AT_EVALUATION = ("name", "kind", "step", "data")
_FLAGS = {"step": "--at-step", "data": "--data"}  # of `posbench eval`, for what is not an option of the scheme
_LARGEST_EXPONENT = 700.0  # exp of more than about 709 is not a float


@dataclass(frozen=True, order=True)
class ResultKey:
    """What a result is known by: the protocol, the length (tokens), and what held at evaluation alone.

    `under` is sorted, and empty for the scheme as trained. It holds options of the scheme and two others: `step=<n>`
    where older weights were scored, `data=<name>` where another text was.
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
        return "@".join((str(self.length), *self.under))

    def __str__(self) -> str:
        return f"{self.protocol} at {self.length}" + (f" under {' '.join(self.under)}" if self.under else "")


def row_name(scheme: str, options: Sequence[str]) -> str:
    """The name of a scheme under options, in tables: `qk_rope · yarn`, `qk_rope · yarn x4`, `qk_rope · base=1e6`."""
    parts = []
    for option in sorted(options, key=lambda o: (not o.startswith("rescale="), not o.startswith("factor="), o)):
        name, _, value = option.partition("=")
        parts.append(value if name == "rescale" else f"x{value}" if name == "factor" else option)
    return f"{scheme} · {' '.join(parts)}" if parts else scheme


def text_option(name: str) -> str:
    """`data=<name>`, which names the text in a result's key. Raises: ConfigError for a name that no file can have."""
    option = f"data={name}"
    if not _TEXT.fullmatch(option):
        raise ConfigError(
            f"data.name={name!r} cannot name results: use 1 to 60 letters, digits and . _ + -, beginning with a letter "
            "or digit"
        )
    return option


def combinations(options: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values of options such as `rescale=pi,yarn`; a comma in brackets separates none."""
    choices = []
    for option in options:
        name, _, values = option.partition("=")
        choices.append(
            [f"{name}={value}" for value in re.split(r",(?![^\[]*\])", values)] if "=" in option else [option]
        )
    return list(product(*choices))


def check_options(options: Sequence[str]) -> None:
    """Raises: ConfigError where these are not options of a scheme, each given once."""
    names = [option.partition("=")[0] for option in options]
    for option, name in zip(options, names, strict=True):
        if not _OPTION.fullmatch(option) or name in _NOT_AT_EVALUATION:
            raise ConfigError(f"--under {option!r} is not an option of a scheme: give key=value, such as base=1e6")
        if names.count(name) > 1:
            raise ConfigError(f"--under {name}=... is given more than once: give one value")


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
        """Bits a byte of text: comparable between tokenizers."""
        return self._sum("nll") / math.log(2) / self._sum("bytes")

    def _sum(self, column: str) -> float:
        return float(self.table[column].to_numpy().sum())


@dataclass(frozen=True, order=True)
class Damaged:
    """A file that is not a result of the run it lies in."""

    key: ResultKey
    file: Path
    why: str
    remedy: str  # a command that makes it again

    def __str__(self) -> str:
        return f"{self.file} is not used: {self.why}. To make it again: {self.remedy}"


class NotAResult(Exception):
    """Why what is stored is not a result."""


def store(run: Run, key: ResultKey, rows: pd.DataFrame, header: Mapping[str, Any]) -> Result:
    """Write the windows, then the header, bound to the run: a result counts once both are there.

    Arguments: header, the settings and means, and `weights`, the digest of the weights that were scored.
    Raises: ConfigError where the run folder cannot be written.
    """
    import pyarrow

    file = run.path / "eval" / key.protocol / f"{key.stem}.parquet"
    full, table = {**header, **_origin(run.manifest, key)}, pyarrow.Table.from_pandas(rows, preserve_index=False)
    try:
        remove_leftovers(file.parent)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f"{key.stem}.json").unlink(missing_ok=True)  # so that it never stands beside other windows
        write_bytes(file, parquet(table))
        write_json(file.with_name(f"{key.stem}.json"), full)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"{file.parent} cannot be written ({why}): make it writable, or copy the run elsewhere"
        ) from error
    return Result(key, full, table)


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
    """The table in a file. Raises: NotAResult."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise NotAResult(f"it cannot be read ({str(error).splitlines()[0]})") from None


def results_of(run: Run) -> tuple[list[Result], list[Damaged]]:
    """What lies in the `eval/` folder of a finished run: its results, and what is not one; both sorted by their keys.

    Raises: ConfigError where that folder may not be read.
    """
    manifest, results, damaged = run.manifest, [], []
    for key in keys_in(run.path / "eval") if manifest.status == FINISHED else ():
        file = run.path / "eval" / key.protocol / f"{key.stem}.parquet"
        try:
            header = read_json(file.with_name(f"{key.stem}.json"))
            check_header(manifest, run.weights, key, header)
            results.append(Result(key, header, read_parquet(file.read_bytes())))
        except (OSError, ValueError, AttributeError) as error:  # a header that is missing, torn, or not a mapping
            damaged.append(Damaged(key, file, f"it cannot be read ({error})", _remedy(run, key)))
        except NotAResult as why:
            damaged.append(Damaged(key, file, str(why), _remedy(run, key)))
    return results, damaged


def keys_in(folder: Path) -> list[ResultKey]:
    """The results that the files of an `eval/` folder are named after, sorted; what they hold is not looked at.

    Raises: ConfigError where the folder may not be read.
    """
    try:
        protocols = [place for place in folder.iterdir() if place.is_dir()] if folder.is_dir() else []
        files = [(file, _FILE.fullmatch(file.name)) for place in protocols for file in place.iterdir()]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from error
    return sorted(ResultKey(file.parent.name, int(m[1]), tuple(m[2].split("@")[1:])) for file, m in files if m)


def _remedy(run: Run, key: ResultKey) -> str:
    """The command that makes a result again."""
    words = ["posbench", "eval", str(run.path), "--protocol", key.protocol, "--length", str(key.length)]
    for option in key.under:
        name, _, value = option.partition("=")
        words += [_FLAGS[name], value] if name in _FLAGS else ["--under", option]
    return shlex.join(words)


def perplexity(loss: float) -> float:
    """`exp` of a mean loss in nats/token, capped so that it stays a finite number."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


def check_header(manifest: Manifest, weights: str | None, key: ResultKey, header: Mapping[str, Any]) -> None:
    """Raises: NotAResult where the header is not of this result of this run, or of other weights than the run's.

    Arguments: weights, the digest of those that `load_model` reads, which a pack has rounded.
    """
    expected = _origin(manifest, key)
    if key.step is None and header.get("weights") != weights:
        expected["weights"] = manifest.weights
    for name, value in expected.items():
        if header.get(name) != value:
            raise NotAResult(f"its header says {name}={header.get(name)}, not {value}")


def _origin(manifest: Manifest, key: ResultKey) -> dict[str, Any]:
    """What a header says of the result's key, run, text and tokenizer; another text has a fingerprint of its own."""
    names = {"protocol": key.protocol, "length": key.length, "under": list(key.under), "run": manifest.run_name}
    text = {} if key.data else {"data": manifest.fingerprints.data}
    return {**names, **text, "tokenizer": manifest.fingerprints.tokenizer}
