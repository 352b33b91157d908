"""Public data sets are pinned, and a hub that does not answer is reported within seconds."""

import socket
import time
from pathlib import Path

import pytest

import posbench
from posbench.data import prepare
from tests.refusals import refuses


@pytest.mark.parametrize(
    "words", [["data=wikitext103"], ["data=files", "data.path=.", "tokenizer=hub", "tokenizer.name=someone/model"]]
)
@pytest.mark.parametrize("hub_is", ["refusing", "offline"])
def test_a_hub_out_of_reach_is_reported_within_seconds(words, hub_is, monkeypatch, tmp_path, files_left):
    import huggingface_hub.constants as constants

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", hub_is == "offline")
    config = posbench.compose(words)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody listens, so connections are refused
        if hub_is == "offline":
            server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        slept = []
        monkeypatch.setattr(time, "sleep", slept.append)
        refuses(r"cannot be read from the Hugging Face hub http.*(data|tokenizer)=files?", prepare, config)
    assert sum(slept) < 20, "a download would try for half a minute"
    assert files_left() == []
