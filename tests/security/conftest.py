"""Commands and runs to give them to."""

from tests.cli.commands import posbench, runs, short, trained  # noqa: F401
