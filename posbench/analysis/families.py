"""Remember how many tests a loop has planned, and which winners it confirmed, so that tests are corrected for all.

runs/loop/judge.json        {"qk_rope": 40}: tests planned against this baseline, of 20 candidates at two looks
runs/loop/confirmed.json    {"qk_rope": ["forgetting"]}: winners that were confirmed against this baseline
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from posbench.config import ConfigError
from posbench.runs import Run
from posbench.runs.finding import REFERENCE
from posbench.system.files import read_json, write_json

FILE, CONFIRMED_FILE = "judge.json", "confirmed.json"


def planned_tests(paths: Iterable[str | Path], baseline: str | None = None) -> int:
    """Return how many tests loops have planned in the experiments of these runs.

    Arguments: baseline, to count only tests against this scheme. Raises: ConfigError if a record is damaged.
    """
    planned = 0
    for folder in _experiments(paths):
        record = _recorded(folder / FILE)
        if baseline is None:
            planned += sum(record.values())
        else:
            planned += record.get(baseline, 0)
    return planned


def confirmed(paths: Iterable[str | Path], baseline: str) -> list[str]:
    """Return the winners that were confirmed against `baseline` in these runs' experiments. Raises: as above."""
    winners: list[str] = []
    for folder in _experiments(paths):
        winners += _recorded(folder / CONFIRMED_FILE).get(baseline, [])
    return winners


def record_confirmation(paths: Iterable[str | Path], baseline: str, scheme: str) -> None:
    """Record that `scheme`, a winner, is tested against `baseline` on the seeds that confirm."""
    for folder in _experiments(paths):
        _add(folder / CONFIRMED_FILE, baseline, lambda winners: list(dict.fromkeys([*(winners or []), scheme])))


def record_tests(paths: Iterable[str | Path], baseline: str, tests: int) -> None:
    """Record that a loop has planned `tests` against `baseline`, in the experiments of these runs.

    The largest number counts.
    """
    for folder in _experiments(paths):
        _add(folder / FILE, baseline, lambda planned: max(planned or 0, tests))


def _add(file: Path, baseline: str, changed: Callable[[Any], Any]) -> None:
    # Reference experiments are part of the repository, and are never written to.
    if file.resolve().is_relative_to(REFERENCE):
        return
    # In a folder that cannot be written, the command goes on without a record. Locked, because loops judge in parallel.
    with suppress(OSError), FileLock(file.with_name(f".{file.name}.lock")):
        record = _recorded(file)
        value = changed(record.get(baseline))
        if value != record.get(baseline):
            write_json(file, record | {baseline: value})


def _experiments(paths: Iterable[str | Path]) -> dict[Path, None]:
    """Return the folders of the experiments that these runs belong to, as keys, each once."""
    folders = dict[Path, None]()
    for run in (Run(Path(path)) for path in paths):
        # A run of a search belongs to the experiment itself.
        folders[run.searched_experiment or run.experiment_folder] = None
    return folders


def _recorded(file: Path) -> dict[str, Any]:
    """Return a record by baseline: a number of tests, or names of winners. Raises: ConfigError if it is damaged."""
    try:
        record = read_json(file)
        expected = int if file.name == FILE else list
        if not isinstance(record, dict) or not all(isinstance(value, expected) for value in record.values()):
            raise ValueError("unexpected content")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged ({error}): delete it, and give posbench judge the loop's --family or --confirm again"
        ) from error
    return record
