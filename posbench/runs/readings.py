"""The results of a run: its `eval/` folder, written and read here alone.

    eval/<protocol>/<length>.parquet              one row a window, as trained
    eval/<protocol>/<length>@<words>.parquet      ... under scheme words that held at evaluation alone
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
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
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

_PROTOCOL = re.compile(r"[a-z][a-z0-9_]{0,39}")
_STEM = re.compile(r"([0-9]{1,9})((?:@[^@]+)*)")
_WORD = re.compile(r"[a-z_][a-z0-9_.]{0,39}=[A-Za-z0-9_.,+\[\]-]{1,60}")
_STEP = re.compile(r"step=([0-9]{1,12})")
_DATA = re.compile(r"data=([A-Za-z0-9][A-Za-z0-9_.+-]{0,59})")
_NOT_AT_EVALUATION = ("name", "kind", "step", "data")
_OPTIONS = {"step": "--at-step", "data": "--data"}  # of `posbench eval`, for words that are not of the scheme
_LARGEST_EXPONENT = 700.0  # exp of more than about 709 is not a float


@dataclass(frozen=True, order=True)
class Reading:
    """What a result is known by: the protocol, the length (tokens), and the words that held at evaluation alone.

    `under` is sorted, and empty for the scheme as trained. Words are options of the scheme, but for two: `step=<n>`
    says that older weights were read, `data=<name>` that another text was.
    """

    protocol: str
    length: int
    under: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "under", tuple(sorted(self.under)))
        check_words([word for word in self.under if not (_STEP.fullmatch(word) or _DATA.fullmatch(word))])

    @property
    def step(self) -> int | None:
        """The step whose weights were read, where it is not the run's last."""
        steps = [match for match in map(_STEP.fullmatch, self.under) if match]
        return int(steps[0][1]) if steps else None

    @property
    def data(self) -> str | None:
        """The name of the text that was read, where it is not the one of the run."""
        return next((match[1] for match in map(_DATA.fullmatch, self.under) if match), None)

    @property
    def words(self) -> tuple[str, ...]:
        """`under` without the text."""
        return tuple(word for word in self.under if not _DATA.fullmatch(word))

    @property
    def stem(self) -> str:
        """The name of its two files, without the ending."""
        return "@".join((str(self.length), *self.under))

    def __str__(self) -> str:
        return f"{self.protocol} at {self.length}" + (f" under {' '.join(self.under)}" if self.under else "")


def row_name(scheme: str, under: Sequence[str]) -> str:
    """What a scheme is called in tables under words: `qk_rope · yarn`, `qk_rope · yarn x4`, `qk_rope · base=1e6`."""
    parts = []
    for word in sorted(under, key=lambda word: (not word.startswith("rescale="), not word.startswith("factor="), word)):
        key, _, value = word.partition("=")
        parts.append(value if key == "rescale" else f"x{value}" if key == "factor" else word)
    return f"{scheme} · {' '.join(parts)}" if parts else scheme


def data_word(name: str) -> str:
    """`data=<name>`, the word of a reading of that text. Raises: ConfigError for a name that no file can have."""
    word = f"data={name}"
    if not _DATA.fullmatch(word):
        raise ConfigError(
            f"data.name={name!r} cannot name results: use 1 to 60 letters, digits and . _ + -, beginning with a letter "
            "or digit"
        )
    return word


def variants(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values of words such as `rescale=pi,yarn`; a comma in brackets separates none."""
    choices = []
    for word in words:
        key, _, values = word.partition("=")
        choices.append([f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)] if "=" in word else [word])
    return [tuple(combination) for combination in product(*choices)]


def check_words(under: Sequence[str]) -> None:
    """Raises: ConfigError where these are not words of a scheme, each key once."""
    keys = [word.partition("=")[0] for word in under]
    for word, key in zip(under, keys, strict=True):
        if not _WORD.fullmatch(word) or key in _NOT_AT_EVALUATION:
            raise ConfigError(f"--under {word!r} is not an option of a scheme: give key=value, such as base=1e6")
        if keys.count(key) > 1:
            raise ConfigError(f"--under {key}=... is given more than once: give one value")


@dataclass(frozen=True, eq=False)
class Result:
    """One reading of one run."""

    reading: Reading
    header: Mapping[str, Any]
    table: pyarrow.Table

    @property
    def protocol(self) -> str:
        return self.reading.protocol

    @property
    def length(self) -> int:
        return self.reading.length

    @cached_property
    def windows(self) -> pd.DataFrame:
        """One row a window."""
        return self.table.to_pandas()

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, nats/token."""
        return float(self._sum("nll") / self._sum("targets"))

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text: comparable between tokenizers."""
        return float(self._sum("nll") / math.log(2) / self._sum("bytes"))

    def _sum(self, column: str) -> float:
        return float(self.table[column].to_numpy().sum())

    def sums(self, by: list[str]) -> pd.DataFrame:
        """The sums of every column over the windows that agree in `by`, sorted. A NaN is not skipped."""
        import numpy as np
        import pandas as pd

        groups = self.windows.groupby(by, sort=True)
        number, keys = groups.ngroup().to_numpy(), groups.size().index
        columns = [name for name in self.windows if name not in by]
        return pd.DataFrame({c: np.bincount(number, weights=self.windows[c]) for c in columns}, index=keys)


@dataclass(frozen=True, order=True)
class Damaged:
    """A file that is not a result of the run it lies in."""

    reading: Reading
    file: Path
    why: str
    remedy: str  # a command that makes it again

    def __str__(self) -> str:
        return f"{self.file} is not used: {self.why}. To make it again: {self.remedy}"


class NotAResult(Exception):
    """Why what is stored is not a result."""


def store(run: Run, reading: Reading, rows: pd.DataFrame, header: Mapping[str, Any]) -> Result:
    """Write the windows, then the header, bound to the run: a result counts once both are there.

    Arguments: header, the settings and means, and `weights`, the digest of the weights that were read.
    Raises: ConfigError where the run folder cannot be written.
    """
    import pyarrow

    folder = run.path / "eval" / reading.protocol
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK) else "it is read-only"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(f"{folder} cannot be written ({why}): make it writable, or copy the run elsewhere")
    remove_leftovers(folder)
    full = {**header, "protocol": reading.protocol, "length": reading.length, **_bindings(run.manifest, reading)}
    full["under"] = list(reading.under)
    table = pyarrow.Table.from_pandas(rows, preserve_index=False)
    (folder / f"{reading.stem}.json").unlink(missing_ok=True)  # so that it never stands beside other windows
    write_bytes(folder / f"{reading.stem}.parquet", parquet(table))
    write_json(folder / f"{reading.stem}.json", full)
    return Result(reading, full, table)


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
    """What lies in the `eval/` folder of a finished run: its results, and what is not one; both sorted by reading.

    Raises: ConfigError where that folder may not be read.
    """
    manifest = run.manifest
    results, not_results = [], []
    for reading, file in _files(run.path / "eval") if manifest.status == FINISHED else ():
        try:
            header = _header(file.with_suffix(".json"))
            check_header(manifest, run.weights, reading, header)
            results.append(Result(reading, header, read_parquet(file.read_bytes())))
        except OSError as error:
            not_results.append(damaged(run, reading, f"it cannot be read ({error.strerror or error})"))
        except NotAResult as why:
            not_results.append(damaged(run, reading, str(why)))
    return sorted(results, key=lambda result: result.reading), sorted(not_results)


def names_in(folder: Path) -> list[Reading]:
    """The readings that the files of an `eval/` folder are named after, sorted; what they hold is not looked at."""
    return sorted(reading for reading, _ in _files(folder))


def damaged(run: Run, reading: Reading, why: str) -> Damaged:
    """A reading of `run` that cannot be used, with the command that makes it again."""
    words = ["posbench", "eval", str(run.path), "--protocol", reading.protocol, "--length", str(reading.length)]
    for word in reading.under:
        key, _, value = word.partition("=")
        words += [_OPTIONS[key], value] if key in _OPTIONS else ["--under", word]
    return Damaged(reading, run.path / "eval" / reading.protocol / f"{reading.stem}.parquet", why, shlex.join(words))


def perplexity(loss: float) -> float:
    """`exp` of a mean loss in nats/token, capped so that it stays a finite number."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


def _files(folder: Path) -> Iterator[tuple[Reading, Path]]:
    """The readings that the files of `eval/` are named after, each with its parquet; other names are passed over."""
    try:
        protocols = [place for place in folder.iterdir() if place.is_dir()] if folder.is_dir() else []
        files = [file for place in protocols for file in place.iterdir() if file.suffix == ".parquet"]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from error
    for file in files:
        match = _STEM.fullmatch(file.stem)
        if match and match[1].isascii() and _PROTOCOL.fullmatch(file.parent.name):
            try:
                reading = Reading(file.parent.name, int(match[1]), tuple(match[2].split("@")[1:]))
            except ConfigError:
                continue
            if reading.stem == file.stem:
                yield reading, file


def _header(file: Path) -> dict[str, Any]:
    try:
        header = read_json(file)
    except FileNotFoundError:
        raise NotAResult(f"{file.name} is missing") from None
    except (OSError, ValueError) as error:
        raise NotAResult(f"{file.name} cannot be read ({error})") from None
    if not isinstance(header, dict) or not isinstance(header.get("settings"), dict):
        raise NotAResult(f"{file.name} has no settings")
    return header


def check_header(manifest: Manifest, weights: str | None, reading: Reading, header: Mapping[str, Any]) -> None:
    """Raises: NotAResult where the header is not of this reading of this run, or of other weights than the run's.

    Arguments: weights, the digest of those that `load_model` reads, which a pack has rounded.
    """
    named = (header.get("protocol"), header.get("length"), tuple(header.get("under") or ()))
    if named != (reading.protocol, reading.length, reading.under):
        raise NotAResult(f"its header is of another reading, {named[0]} at {named[1]} {' '.join(named[2])}".rstrip())
    meaning = {"run": "another run", "data": "other text", "tokenizer": "another tokenizer"}
    for key, value in _bindings(manifest, reading).items():
        if header.get(key) != value:
            raise NotAResult(f"it is of {meaning[key]} ({header.get(key)} here, the run's is {value})")
    if reading.step is None and header.get("weights") not in (weights, manifest.weights):
        raise NotAResult(f"it is of other weights ({header.get('weights')} here, the run's are {manifest.weights})")


def _bindings(manifest: Manifest, reading: Reading) -> dict[str, str]:
    """What its header says as the run's manifest does; a reading of another text names that text itself."""
    prints = manifest.fingerprints
    text = {"data": prints.data} if reading.data is None else {}
    return {"run": manifest.run_name, **text, "tokenizer": prints.tokenizer}
