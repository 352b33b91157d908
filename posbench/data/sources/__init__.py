"""Where text comes from: a registry of sources, each a stream of documents per split through the `datasets` library.

Adding a source is adding a class, its name below and a YAML file in `conf/data/`.
"""

from __future__ import annotations

from posbench.data.sources.base import Source
from posbench.data.sources.files import Files
from posbench.data.sources.hub import Hub
from posbench.data.sources.stdlib import StandardLibrary

SOURCES: dict[str, type[Source]] = {"stdlib": StandardLibrary, "files": Files, "hub": Hub}

__all__ = ["SOURCES", "Source"]
