"""Completion of a word of the command line, with what Hydra knows."""

from __future__ import annotations

from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from posbench.composition.session import session


def complete(incomplete: str) -> list[str]:
    """Hydra's completions of a word: `scheme=v` -> `scheme=v_rope`, `scheme=vo_rope`."""
    with session() as loader:
        words = _Completion(loader).words(incomplete)
    return [word for word in words if not word.startswith("schema")]


class _Completion(DefaultCompletionPlugin):
    """A shell of our own: completions as a list, where those of Hydra's shells print them."""

    def words(self, line: str) -> list[str]:
        return list(self._query(config_name="config", line=line))
