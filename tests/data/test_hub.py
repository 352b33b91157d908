"""Public data sets are streamed from a hub that answers, and a hub that does not is said to be out of reach, soon."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REVISION, HubServer
from prose import prose

import posbench
from posbench.config import ConfigError
from posbench.data import prepare

_PREPARE = """
import json, sys, posbench
from posbench.data import build, prepare
build._BATCH_CHARACTERS = 2000
try:
    corpus = prepare(posbench.compose(sys.argv[1:]), quiet=True)
except posbench.ConfigError as error:
    print(json.dumps({"error": str(error)}))
else:
    texts = {
        name: [corpus.tokenizer.decode(split.document(n)[1:].tolist()) for n in range(split.num_documents)]
        for name, split in corpus.splits.items()
    }
    print(json.dumps({"texts": texts, "datasets": "datasets" in sys.modules}))
"""


def parquet(texts: list[str], column: str = "text") -> bytes:
    """Four row groups and a column that is not asked for."""
    file = io.BytesIO()
    pq.write_table(pa.table({column: texts, "n": range(len(texts))}), file, row_group_size=-(-len(texts) // 4))
    return file.getvalue()


def prepared(server: HubServer, home: Path, *words: str) -> dict:
    """What a process with this hub prepares; the hub's client reads HF_ENDPOINT when it is imported."""
    env = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    env.pop("HF_HUB_OFFLINE", None)
    words = ("tokenizer=bytes", f"data.repository={server.repository}", f"data.revision={REVISION}", *words)
    command = [sys.executable, "-c", _PREPARE, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_data_set_is_streamed_its_missing_splits_cut_and_the_rest_not_fetched(tmp_path: Path) -> None:
    texts = [prose(n, 100) for n in range(120)]
    files = {f"data/train-0000{n}-of-00003.parquet": parquet(texts[n * 40 : n * 40 + 40]) for n in range(3)}
    options = ["data=fineweb_edu", "data.subset=null", "data.validation_fraction=0.1", "data.test_fraction=0.1"]
    with HubServer("someone/texts", files) as server:
        found = prepared(server, tmp_path, *options, "data.token_budget=null")["texts"]
        assert sorted(chain.from_iterable(found.values())) == sorted(texts) and all(found.values())
        server.requests.clear()
        few = prepared(server, tmp_path / "another home", *options, "data.token_budget=3000")["texts"]
        assert few["train"] == found["train"][: len(few["train"])] and len(few["train"]) < 40
        assert not any("train-00002" in request for request in server.requests), "enough was read before the last file"
        server.requests.clear()
        again = prepared(server, tmp_path, *options, "data.token_budget=3000")
        assert again == {"texts": few, "datasets": False} and server.requests == [], "the second time asks nobody"


@pytest.mark.slow
def test_splits_of_its_own_and_articles_out_of_lines(tmp_path: Path) -> None:
    lines = ["", " = One = \n", "", " Some words .\n", "", " = Two = \n", "", " = = Part = = \n", " More .\n"]
    files = {
        f"wikitext-103-raw-v1/{name}-00000-of-00001.parquet": parquet([*lines, f" The {name} .\n"])
        for name in ("train", "validation", "test")
    }
    card = {"config_name": "wikitext-103-raw-v1", "data_files": []}
    card["data_files"] = [{"split": s, "path": f"wikitext-103-raw-v1/{s}-*"} for s in ("train", "validation", "test")]
    files["README.md"] = f"---\nconfigs: {json.dumps([card])}\n---\n".encode()
    with HubServer("someone/lines", files) as server:
        found = prepared(server, tmp_path, "data=wikitext103")["texts"]
    assert {name: len(texts) for name, texts in found.items()} == {"train": 2, "validation": 2, "test": 2}
    assert found["test"][1].startswith(" = Two = ") and found["test"][1].rstrip().endswith("The test .")


@pytest.mark.slow
def test_a_data_set_without_the_column_lists_its_columns(tmp_path: Path, left: Callable[[], list[str]]) -> None:
    names = {"train": "train", "validation": "validation", "test": "test"}
    files = {f"data/{name}-00000-of-00001.parquet": parquet(["x"], "body") for name in names}
    with HubServer("someone/texts", files) as server:
        error = prepared(server, tmp_path, "data=pg19")["error"]
        assert "no column 'text'" in error and "(columns: body, n)" in error
        missing = prepared(server, tmp_path, "data=pg19", "data.repository=someone/other")["error"]
        assert "no data set 'someone/other'" in missing and "data.repository" in missing
    assert left() == []


@pytest.mark.parametrize("name", ["fineweb_edu", "wikitext103", "pg19"])
def test_the_public_sets_are_pinned_to_a_commit(name: str) -> None:
    config = posbench.compose([f"data={name}"]).data
    assert config.name == name and config.revision is not None
    assert len(config.revision) == 40 and int(config.revision, 16)


@pytest.mark.parametrize(
    "hub_is", ["refusing", pytest.param("silent", marks=pytest.mark.slow), "no address", "offline"]
)
def test_a_hub_out_of_reach_is_said_within_seconds(
    hub_is: str, monkeypatch: pytest.MonkeyPatch, left: Callable[[], list[str]]
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", hub_is == "offline")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if hub_is == "refusing":
            silent.close()
        elif hub_is == "no address":
            address = "htp:/nowhere"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        began = time.monotonic()
        with pytest.raises(
            ConfigError, match=r"data=wikitext103.*offline: data=stdlib .* data=files data\.path="
        ) as told:
            prepare(posbench.compose(["data=wikitext103"]), quiet=True)
    assert time.monotonic() - began < 10, "the client alone would try for half a minute"
    assert ("HF_HUB_OFFLINE" if hub_is == "offline" else address) in str(told.value)
    assert left() == []
