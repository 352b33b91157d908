"""Files from other people are read as data: run folders, checkpoints, tokenizers and text run no code.

Each payload would make the file `canary`: by unpickling, or by `evil.py` in a folder that Python imports from.
"""

import hashlib
import json
import pickle
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from safetensors import SafetensorError

import posbench
from posbench import ConfigError, compose, load_run
from posbench.config import TokenizerConfig, check_name
from posbench.data import prepare
from posbench.data.text.tokenizer import TOKENIZERS
from tests.cli.commands import trained  # noqa: F401
from tests.conftest import small_run
from tests.refusals import refuses

EVIL = "from pathlib import Path\nCANARY = Path(__file__).parent / 'canary'\nCANARY.touch()\nrun = CANARY.write_text\n"
PYTHON = {"py/object": "evil.run", "_target_": "evil.run", "auto_map": {"AutoTokenizer": "evil.run"}}


class Pickled:
    """Unpickling this object creates the canary."""

    def __reduce__(self):
        return Path.touch, (Path("canary").absolute(),)


@pytest.fixture(autouse=True)
def work_dir(tmp_path, monkeypatch):
    """Enter a working folder with `evil.py` in it, and fail a test that creates the canary."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "evil.py").write_text(EVIL)
    yield folder
    assert not (folder / "canary").exists(), "data was run"


@pytest.fixture
def theirs(trained, work_dir):  # noqa: F811
    """Return the folder of a finished run that somebody else made."""
    shutil.copytree(trained, work_dir / "runs")
    return work_dir / "runs/demo/vo_rope/seed=0"


def change(run, group, **settings):
    """Let the run folder's config.yaml say something else."""
    content = yaml.safe_load((run / "config.yaml").read_text())
    content[group] |= settings
    (run / "config.yaml").write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("attack", ["a yaml tag", "a target", "a kind in the run folder", "pickled weights"])
def test_a_run_folder_that_names_code_is_refused(theirs, attack):
    if attack == "a yaml tag":
        (theirs / "config.yaml").write_text('scheme: !!python/object/apply:evil.run ["x"]\n')
    elif attack == "a target":
        change(theirs, "model", **PYTHON)
    elif attack == "a kind in the run folder":
        change(theirs, "scheme", kind=f"{shutil.copy('evil.py', theirs / 'scheme.py')}:Evil")
    else:
        for file in theirs.glob("checkpoints/*/model.safetensors"):  # with checksums that fit
            file.write_bytes(pickle.dumps(Pickled()))
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            sums = file.with_name("SHA256SUMS")
            sums.write_text(f"{digest}  {file.name}\n" + sums.read_text().partition("\n")[2])
        manifest = json.loads((theirs / "run.json").read_text())
        (theirs / "run.json").write_text(json.dumps({**manifest, "weights": digest}))
    with pytest.raises((ConfigError, SafetensorError)):
        load_run(theirs).load_model()


def test_a_recorded_configuration_looks_nothing_up(theirs, monkeypatch):
    monkeypatch.setenv("THEIR_GUESS", "a secret of mine")
    for value in ("${oc.env:THEIR_GUESS}", "${oc.decode:${oc.env:THEIR_GUESS}}"):
        change(theirs, "experiment", description=value)
        assert load_run(theirs).config.experiment.description == value


def test_names_of_others_stay_inside_the_runs_folder(theirs):
    for name in ("..", ".", ".hidden", "../x", "x/../../y", "x/y", "/etc", "a\0b", "", " ", "~"):
        refuses(r"experiment_name=.* cannot name a folder", check_name, "experiment_name", name)
    change(theirs, "scheme", name="../../../x")
    with pytest.raises(ConfigError, match="cannot name a folder"):
        _ = load_run(theirs).config


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "text.py"])  # the last: a loading script of `datasets` once
def test_text_runs_nothing(work_dir, name):
    Path("text").mkdir()
    Path("text", name).write_text(EVIL if name == "text.py" else json.dumps({"text": PYTHON}) + "\n")
    words = ["data=files", "data.path=text", f"data.cache_dir={work_dir}/cache", "tokenizer=bytes"]
    with pytest.raises(ConfigError):
        prepare(compose(words))


@pytest.mark.parametrize("content", [pickle.dumps(Pickled()), json.dumps({"model": PYTHON, **PYTHON}).encode()])
def test_a_tokenizer_runs_nothing(content):
    Path("tokenizer.json").write_bytes(content)
    refuses(r"is not a tokenizer\.json", TOKENIZERS["file"], TokenizerConfig(kind="file", path="tokenizer.json"), [])


def test_a_run_records_no_environment(documents, cache, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the value of a token")
    monkeypatch.setattr(socket, "gethostname", lambda: "the name of a host")
    run = posbench.train([*small_run(documents, cache, Path("runs")), "scheme=nope", "train.steps=2"], quiet=True)
    written = [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]
    assert len(written) > 8 and not any(b"the value of" in content for content in written)
    assert "the name of" not in (run.path / "run.json").read_text()
