"""What comes from others is read as data: run folders, packs, checkpoints, tokenizers and text run no code.

Each payload would make the file `canary`: by unpickling, or by `evil.py`, which lies where Python imports from.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors import SafetensorError

import posbench
from posbench import ConfigError, compose, load_run
from posbench.composition import checked
from posbench.config import TokenizerConfig, check_name
from posbench.data import prepare
from posbench.data.tokenizer import TOKENIZERS
from posbench.runs import Run, run_folder
from tests.cli.commands import trained  # noqa: F401
from tests.conftest import small_run

EVIL = "from pathlib import Path\nCANARY = Path(__file__).parent / 'canary'\nCANARY.touch()\nrun = CANARY.write_text\n"


class Pickled:
    """What unpickles by making the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("canary").absolute(),)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `evil.py` in it; a test in which the canary was made fails."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "evil.py").write_text(EVIL)
    return folder


@pytest.fixture
def theirs(trained: Path, here: Path) -> Path:  # noqa: F811
    """The folder of a finished run that somebody else made."""
    shutil.copytree(trained, here / "runs")
    return here / "runs/demo/vo_rope/seed=0"


@pytest.fixture(autouse=True)
def _silent(here: Path) -> Any:
    yield
    assert not (here / "canary").exists(), "data was run"


def settings(**changes: Any) -> Callable[[Path], object]:
    """A run folder whose config.yaml says something else; a key is `group__field`."""

    def change(run: Path) -> None:
        content = yaml.safe_load((run / "config.yaml").read_text())
        for key, value in changes.items():
            *groups, last = key.split("__")
            place = content[groups[0]] if groups else content
            place[last] = value
        (run / "config.yaml").write_text(yaml.safe_dump(content))

    return change


def put(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A run folder with other content in one of its files."""
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content)


def pickled_weights(run: Path) -> None:
    """Pickles in place of the weights, with every checksum made to fit."""
    for file in run.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(pickle.dumps(Pickled()))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sums = file.with_name("SHA256SUMS")
        sums.write_text(f"{digest}  {file.name}\n" + sums.read_text().partition("\n")[2])
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**manifest, "weights": digest}))


def scheme_in_the_run_folder(run: Path) -> None:
    shutil.copy("evil.py", run / "scheme.py")
    settings(scheme__kind=f"{run / 'scheme.py'}:Evil")(run)


PYTHON = '!!python/object/apply:evil.run ["x"]'
RUNS = {
    "python in config.yaml": put("config.yaml", f"scheme: {PYTHON}\n"),
    "a target": settings(model___target_="evil.run"),
    "a kind in a file of the run folder": scheme_in_the_run_folder,
    "an experiment elsewhere": settings(experiment_name="../../canary"),
    "a pickle as the manifest": put("run.json", pickle.dumps(Pickled())),
    "pickles as weights": pickled_weights,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_folder_that_names_code_or_other_places_is_refused(theirs: Path, name: str) -> None:
    RUNS[name](theirs)
    with pytest.raises((ConfigError, SafetensorError)):
        load_run(theirs).load_model()
    assert sorted(path.name for path in Path.cwd().iterdir()) in (
        ["evil.py", "runs"],
        ["__pycache__", "evil.py", "runs"],
    )


def test_pickles_among_results_metrics_and_tokenizers_are_not_read(theirs: Path) -> None:
    for name in ("eval/validation/32.parquet", "metrics.jsonl", "tokenizer.json"):
        put(name, pickle.dumps(Pickled()))(theirs)
    run = load_run(theirs)
    results, damaged = run.results()
    assert not results and len(damaged) == 1
    for read in (lambda: run.tokenizer, lambda: run.logged):
        with pytest.raises(ConfigError, match=r"is not a tokenizer\.json|is not a row of metrics"):
            read()


def test_a_recorded_configuration_looks_nothing_up(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_GUESS", "a secret of mine")
    for value in ("${oc.env:THEIR_GUESS}", "${oc.decode:${oc.env:THEIR_GUESS}}", "${hydra:runtime.cwd}"):
        settings(experiment__description=value, tracking__project=value)(theirs)
        try:
            shown = str(load_run(theirs).config)
        except ConfigError as refused:
            shown = str(refused)
        assert "secret of mine" not in shown and f"project='{Path.cwd()}" not in shown


def test_names_of_others_stay_inside_the_runs_folder() -> None:
    for name in ("..", ".", ".hidden", "../x", "x/../../y", "x/y", "/etc", "a\0b", "a\nb", "", " ", "~", "\\\\host\\x"):
        with pytest.raises(ConfigError, match=r"experiment_name=.* cannot name a folder"):
            check_name("experiment_name", name)
    mapping = compose().to_mapping()
    for changed in ({"experiment_name": "../x"}, {"scheme": {**mapping["scheme"], "name": "../x"}}):
        with pytest.raises(ConfigError, match="cannot name a folder"):
            run_folder(checked({**mapping, **changed}))


def test_a_manifest_of_names_elsewhere_moves_nothing(theirs: Path) -> None:
    manifest = json.loads((theirs / "run.json").read_text())
    (theirs / "run.json").write_text(json.dumps({**manifest, "experiment": "../../x", "scheme": "../y"}))
    before = {path for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts}
    load_run(theirs).results()
    posbench.evaluate(theirs, lengths=(64,), protocols=("fixed",), device="cpu", quiet=True)
    made = {path for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts} - before
    assert made and all(path.is_relative_to(theirs) for path in made)


def parquet_of_pickles(file: Path) -> None:
    """A column of an extension type that names a pickle as its maker (Arrow's own `arrow.py_extension_type`)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Pickled()),
    }
    evil = pa.field("evil", pa.binary(), metadata=metadata)
    texts = pa.array(["word " * 50 * n for n in range(1, 41)])
    pq.write_table(pa.table([texts, pa.array([b"x"] * 40)], pa.schema([pa.field("text", pa.string()), evil])), file)


TEXTS: dict[str, Callable[[Path], object]] = {
    "a.parquet": parquet_of_pickles,
    "a.jsonl": lambda file: file.write_text(json.dumps({"text": {"py/object": "evil.run"}}) + "\n"),
    "text.py": lambda file: shutil.copy("evil.py", file),  # once a loading script of the `datasets` library
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_runs_nothing(here: Path, name: str) -> None:
    Path("text").mkdir()
    TEXTS[name](Path("text") / name)
    words = ["data=files", "data.path=text", "data.cut_bytes=1000", f"data.cache_dir={here}/cache", "tokenizer=bytes"]
    try:
        prepare(compose(words), quiet=True)
    except ConfigError as refused:
        assert name != "a.parquet", refused


def test_a_folder_is_not_taken_for_a_repository_of_the_hub(here: Path) -> None:
    Path("someone/texts").mkdir(parents=True)
    shutil.copy("evil.py", "someone/texts/texts.py")
    words = ["data=fineweb_edu", "data.repository=someone/texts", "data.revision=null", f"data.cache_dir={here}/cache"]
    with pytest.raises(ConfigError, match="would be read instead of the hub's someone/texts"):
        prepare(compose(words), quiet=True)


TOKENIZER_FILES = {
    "a pickle": pickle.dumps(Pickled()),
    "a class": b'{"model": {"type": "evil.run"}, "auto_map": {"AutoTokenizer": "evil.run"}}',
    "an object": json.dumps({"version": "1.0", "model": {"py/object": "evil.run"}}).encode(),
}


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_runs_nothing(here: Path, name: str) -> None:
    Path("tokenizer.json").write_bytes(TOKENIZER_FILES[name])
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        TOKENIZERS["file"](TokenizerConfig(kind="file", path="tokenizer.json"), [])


def test_a_run_records_few_facts_of_its_machine(
    documents: Path, cache: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here / "home-of-ada"))
    for name in ("WANDB_API_KEY", "HF_TOKEN", "PLAIN_NAME"):
        monkeypatch.setenv(name, f"the value of {name}")
    run = posbench.train([*small_run(documents, cache, Path("runs")), "scheme=nope", "train.steps=2"], quiet=True)
    written = [file for file in run.path.rglob("*") if file.is_file()]
    for file in written:
        content = file.read_bytes()
        assert b"the value of" not in content and b"home-of-ada" not in content, file
    manifest = (run.path / "run.json").read_text()
    facts = json.loads(manifest)
    assert set(facts["versions"]) - {"commit"} == {"posbench", "python", "torch"}
    assert set(facts["device"]) == {"type", "name", "dtype", "compiled", "threads", "processes"}
    for word in (socket.gethostname(), platform.node(), str(here), os.environ["HOME"]):
        assert f'"{word}' not in manifest
    assert len(written) > 8 and Run(run.path).is_finished
