"""Remember how many tests a loop has planned, so that reports of its experiment correct for all of them.

runs/loop/judge.json    {"qk_rope": 40}: tests planned against this baseline, of 20 candidates at two looks
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from posbench.config import ConfigError
from posbench.runs.finding import REFERENCE
from posbench.system.files import read_json, write_json

FILE = "judge.json"


def planned_tests(paths: Iterable[str | Path], baseline: str | None = None) -> int:
    """Return how many tests loops have planned in the experiments of these runs.

    Arguments: baseline, to count only tests against this scheme. Raises: ConfigError if a record is damaged.
    """
    planned = 0
    for folder in _experiments(paths):
        record = _recorded(folder)
        if baseline is None:
            planned += sum(record.values())
        else:
            planned += record.get(baseline, 0)
    return planned


def record_tests(paths: Iterable[str | Path], baseline: str, tests: int) -> None:
    """Record that a loop has planned `tests` against `baseline`, in the experiments of these runs.

    The largest number counts.
    """
    for folder in _experiments(paths):
        record = _recorded(folder)
        # Reference experiments are part of the repository, and are never written to.
        if tests > record.get(baseline, 0) and not folder.resolve().is_relative_to(REFERENCE):
            # In a folder that cannot be written, the command goes on without a record.
            with suppress(OSError):
                write_json(folder / FILE, record | {baseline: tests})


def _experiments(paths: Iterable[str | Path]) -> dict[Path, None]:
    """Return the folders of the experiments that these runs belong to, as keys, each once."""
    folders = dict[Path, None]()
    for path in map(Path, paths):
        # A run is in <experiment>/<scheme>/seed=<n>.
        experiment = path.parents[1]
        parent = path.parents[2]
        # A run of a search for learning rates is in <experiment>-tune/lr=<rate>/<scheme>/seed=<n>, and belongs to the
        # experiment itself.
        if experiment.name.startswith("lr=") and parent.name.endswith("-tune"):
            experiment = parent.with_name(parent.name.removesuffix("-tune"))
        folders[experiment] = None
    return folders


def _recorded(experiment: Path) -> dict[str, int]:
    """Return the tests planned in this experiment by baseline. Raises: ConfigError if the record is damaged."""
    file = experiment / FILE
    try:
        record = read_json(file)
        return {str(baseline): int(tests) for baseline, tests in record.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is damaged ({error}): delete it, and give posbench judge the --family of the loop again"
        ) from error
