"""A command that finds the disk full names the file, leaves nothing half written, and is repeated with success."""

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import posbench, runs, short, snapshot, trained  # noqa: F401


@contextmanager
def files_of_at_most(size):
    """Let no file grow beyond `size` bytes, as on a disk that is nearly full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "target", "size"),
    [
        (("export", "demo/nope/seed=0", "out"), "out", 16384),
        (("pack", "demo", "x.zip"), "x.zip", 1024),
        (("report", "demo"), "runs/demo/report/report.html", 1024),
    ],
)
def test_a_full_disk_names_what_could_not_be_written(posbench, runs, words, target, size):  # noqa: F811
    before = snapshot(Path.cwd())
    with files_of_at_most(size):
        result = posbench(*words)
    assert result.status == 2 and "make room and give the same command again" in result.error
    assert f"{target} cannot be written (" in result.error
    assert {name for name in snapshot(Path.cwd()) if ".tmp" in name} == set()
    if words[0] != "report":  # whose folder may have the files that fit
        assert snapshot(Path.cwd()) == before
    assert posbench(*words).status == 0
