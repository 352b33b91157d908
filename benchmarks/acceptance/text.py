"""The text that travels: unpacked into a token cache of this machine, where posbench finds it as its own.

    python -m benchmarks.acceptance.text FROM WORK OUT SHRUNK

A cache recognises text files by their paths and times, which are others on another machine: small files take their
place here, and are registered in the index of the token cache.
"""

from __future__ import annotations

import json
import sys
import tarfile

from benchmarks.acceptance.items import Item, emit
from benchmarks.acceptance.place import PACKAGE, TEXTS, Place, place_of

NAME = "text"
STAND_IN = b"\0 This file stands for text that was prepared elsewhere.\n"  # refused, should anybody read it


def item(place: Place) -> Item:
    """Unpack the text: the first item of each stage."""
    return Item(NAME, "text", f"{PACKAGE}.text", place.words, seconds=15, is_of_machine=True)


def unpack(place: Place) -> None:
    """Every corpus of FROM/text into WORK/cache; prints its tokens by split."""
    from posbench import compose
    from posbench.data.preparation import SOURCES, _request
    from posbench.data.shards import open_corpus
    from posbench.machine.files import write_json

    (place.work / "text").mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        file = place.work / "text" / f"{split}.txt"
        if not file.exists():
            file.write_bytes(STAND_IN)
    texts = json.loads((place.source / "text" / TEXTS).read_text(encoding="utf-8"))
    for name, about in texts.items():
        corpora = place.work / "cache" / "corpora"
        corpora.mkdir(parents=True, exist_ok=True)
        with tarfile.open(place.source / "text" / f"{name}.tar.xz") as packed:
            packed.extractall(corpora, filter="data")
        config = compose(place.run_words(name))
        corpus = open_corpus(corpora / about["corpus"], check=True)
        request = _request(config, SOURCES[config.data.source](config.data))
        write_json(place.work / "cache" / "index" / f"{request}.json", {"corpus": corpus.folder.name})
        emit(**{name: {split: each.num_tokens for split, each in corpus.splits.items()}})


if __name__ == "__main__":
    unpack(place_of(*sys.argv[1:]))
