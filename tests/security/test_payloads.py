"""Nothing that is given as data runs code: words, YAML, run folders, checkpoints, text, tokenizers, caches.

Each payload would make `canary` in the folder where the command is given, mostly by `evil.run`, a module that Python
finds there, so that whoever imports or calls what a payload names is caught.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from posbench.composition.compose import composition
from posbench.composition.words import read
from posbench.config import ConfigError
from posbench.machine.files import sealed
from tests.cli.commands import Give

EVIL = """
from pathlib import Path
CANARY = Path(__file__).parent / "canary"
CANARY.write_text("imported")
def run(*arguments, **options):
    CANARY.write_text("called")
"""


class Pickled:
    """What unpickles by making the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("canary").absolute(),)


@pytest.fixture
def give(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Give a command where `evil` can be imported."""
    Path("evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return posbench


def untouched() -> bool:
    return not Path("canary").exists()


def test_the_canary_sings(give: Give) -> None:
    """Both ways in which a payload would be noticed."""
    pickle.loads(pickle.dumps(Pickled()))
    assert not untouched()
    Path("canary").unlink()
    import importlib

    importlib.import_module("evil")
    assert not untouched()


RUN_OR_SWEEP = [pytest.param([], id="run"), pytest.param(["-m"], id="sweep", marks=pytest.mark.slow)]
WORDS = [
    "+_target_=evil.run",
    "+model._target_=evil.run",
    "+scheme._target_=evil.run",
    "+train={_target_:evil.run}",
    "hydra.launcher._target_=evil.run",
    "hydra.sweeper._target_=evil.run",
    "+hydra.launcher.x={_target_:evil.run}",
    "+hydra.callbacks.x._target_=evil.run",
    "+hydra.callbacks={x:{_target_:evil.run}}",
    "+hydra/launcher@hydra.callbacks.x=basic",
    "hydra.job_logging={version:1,root:{},formatters:{x:{'()':evil.run}}}",
    "+hydra.job_logging.formatters.x.class=evil.run",
    "hydra/job_logging=default",
    "hydra.searchpath=[pkg://evil]",
    "+hydra.job.env_set.LD_PRELOAD=evil.so",
    "scheme.kind=evil.run",
    "scheme.kind=evil:run",
    "scheme.kind=evil",
    "scheme={name:x,kind:evil}",
    "data.source=evil",
    "tokenizer.kind=evil.run",
    "tracking.backend=evil",
    "train.schedule=evil.run",
    "experiment.description=${oc.env:HOME}",
    "experiment.description='${oc.decode:${oc.env:HOME}}'",
    r"experiment.description=\${oc.env:HOME}",
    "experiment.description=${hydra:runtime.cwd}",
    "runs_dir=${oc.env:HOME}/x",
    "--experimental-rerun=job.pickle",
    "--exp=job.pickle",
    "--config-path=pkg://evil",
]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("flag", RUN_OR_SWEEP)
def test_no_word_runs_code_or_asks_the_environment(give: Give, short: list[str], word: str, flag: list[str]) -> None:
    Path("job.pickle").write_bytes(pickle.dumps(Pickled()))
    assert give("train", *short, word, *flag).status == 2
    assert untouched() and {path.name for path in Path.cwd().iterdir()} <= {"evil.py", "job.pickle", "__pycache__"}


SETTINGS: dict[str, Any] = {
    "callbacks": {"callbacks": {"x": {"_target_": "evil.run"}}},
    "job logging": {"job_logging": {"root": {}, "formatters": {"x": {"()": "evil.run"}}}},
    "job logging by class": {"job_logging": {"root": {}, "handlers": {"x": {"class": "evil.run"}}}},
    "job logging by address": {"job_logging": {"root": {}, "handlers": {"x": {"stream": "ext://evil"}}}},
    "hydra's logging": {"hydra_logging": {"root": {}, "formatters": {"x": {"()": "evil.run"}}}},
    "launcher": {"launcher": {"_target_": "evil.run"}},
    "launcher with a part": {"launcher": {"x": {"_target_": "evil.run"}}},
    "sweeper": {"sweeper": {"_target_": "evil.run"}},
    "another sweeper": {"sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}},
    "swept settings": {"sweeper": {"params": {"+hydra.callbacks.x._target_": "evil.run"}}},
    "swept settings of a job": {"sweeper": {"params": {"hydra.job_logging.root": "{}"}}},
    "environment": {"job": {"env_set": {"LD_PRELOAD": "evil.so"}}},
    "folders": {
        "job": {"chdir": True},
        "run": {"dir": "canary"},
        "sweep": {"dir": "canary"},
        "output_subdir": "canary",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("flag", RUN_OR_SWEEP)
def test_no_setting_of_hydra_in_an_experiment_runs_code(
    give: Give, short: list[str], name: str, flag: list[str]
) -> None:
    content = {"experiment": {"name": "mine"}, "hydra": SETTINGS[name]}
    file = Path("own/experiment/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\n" + yaml.safe_dump(content))
    said = give("train", *flag, "--config-dir", "own", *short, "experiment=mine", "scheme=nope")
    settled = name == "folders"  # these our own root decides, whatever an experiment says
    assert said.status == (0 if settled else 2) and "Traceback" not in said.error, said
    assert untouched() and Path("runs").exists() == settled


FILES = {
    "python in YAML": ("scheme", 'name: x\nkind: nope\nwhat: !!python/object/apply:evil.run ["x"]\n'),
    "a python name in YAML": ("scheme", "name: !!python/name:evil.run\nkind: nope\n"),
    "a target among options": ("scheme", "name: x\nkind: rotary\nsites: [q]\n_target_: evil.run\n"),
    "a target within an option": ("scheme", "name: x\nkind: rotary\nsites: {_target_: evil.run}\n"),
    "a kind that is a module": ("scheme", "name: x\nkind: evil\n"),
    "a resolver": ("scheme", "name: '${oc.env:HOME}'\nkind: nope\n"),
    "settings of each job": (
        "scheme",
        "# @package _global_\nscheme: {name: x, kind: nope}\nhydra: {job_logging: {root: {}, "
        "formatters: {x: {'()': evil.run}}}}\n",
    ),
    "environment of each job": (
        "scheme",
        "# @package _global_\nscheme: {name: x, kind: nope}\nhydra: {job: {env_set: {LD_PRELOAD: evil.so}}}\n",
    ),
    "a search path": (
        "scheme",
        "# @package _global_\nscheme: {name: x, kind: nope}\nhydra: {searchpath: [pkg://evil]}",
    ),
    "a name that leaves": ("scheme", "name: ../../canary\nkind: nope\n"),
    "a root of its own": (".", "defaults: [_self_]\nhydra: {searchpath: [pkg://evil]}\n"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flag", RUN_OR_SWEEP)
def test_no_yaml_file_runs_code(give: Give, short: list[str], name: str, flag: list[str]) -> None:
    group, content = FILES[name]
    file = Path("own") / group / ("config.yaml" if group == "." else "mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    swept = "scheme=nope,mine" if flag else "scheme=mine"
    said = give("train", *flag, "--config-dir", "own", *short, swept, "seed=0", "train.steps=2")
    assert said.status in ((1, 2) if flag else (2,)) and "Traceback" not in said.error, said
    assert untouched()


def weights(run: Path) -> list[Path]:
    return list(run.glob("checkpoints/*/model.safetensors"))


def sealed_pickle(run: Path) -> None:
    """A pickle in place of the weights, with every checksum made to fit."""
    for file in weights(run):
        file.write_bytes(pickle.dumps(Pickled()))
        state = json.loads((file.parent / "state.json").read_text())
        del state["seal"]
        state["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        state["seal"] = hashlib.sha256(json.dumps(state, sort_keys=True, allow_nan=False).encode()).hexdigest()
        (file.parent / "state.json").write_text(json.dumps(state))


def path_out_of_the_checkpoint(run: Path) -> None:
    for file in weights(run):
        state = json.loads((file.parent / "state.json").read_text())
        del state["seal"]
        state["sha256"]["../../../../../../evil.py"] = "0" * 64
        state["seal"] = hashlib.sha256(json.dumps(state, sort_keys=True, allow_nan=False).encode()).hexdigest()
        (file.parent / "state.json").write_text(json.dumps(state))


def parquet_of_pickles(file: Path) -> None:
    """A column of an extension type that names a pickle as its maker (Arrow's own `arrow.py_extension_type`)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Pickled()),
    }
    columns = {"text": ["word " * 50] * 40, "nll": [1.0] * 40, "targets": [1] * 40, "document": [0] * 40}
    table = pa.table({**columns, "start": [0] * 40, "bytes": [1] * 40, "evil": [b"x"] * 40})
    number = table.schema.get_field_index("evil")
    pq.write_table(table.cast(table.schema.set(number, table.schema.field("evil").with_metadata(metadata))), file)


def with_settings(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def make(run: Path) -> None:
        content = yaml.safe_load((run / "config.yaml").read_text())
        change(content)
        (run / "config.yaml").write_text(yaml.safe_dump(content))

    return make


def put(file: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda run: (run / file).write_bytes(content.encode() if isinstance(content, str) else content)


def resealed(**changes: Any) -> Callable[[Path], object]:
    """A manifest that says something else, under a seal that fits."""

    def make(run: Path) -> None:
        manifest = {**json.loads((run / "run.json").read_text()), **changes}
        (run / "run.json").write_text(json.dumps(sealed(manifest)))

    return make


def linked_results(run: Path) -> None:
    shutil.rmtree(run / "eval")
    (run / "eval").symlink_to(Path.cwd() / "elsewhere")


RUNS: dict[str, Callable[[Path], object]] = {
    "python in config.yaml": put("config.yaml", "scheme: !!python/object/apply:evil.run [x]\n"),
    "a target in config.yaml": with_settings(lambda c: c["model"].update(_target_="evil.run")),
    "a target as the root of config.yaml": with_settings(lambda c: c.update(_target_="evil.run")),
    "a resolver in config.yaml": with_settings(lambda c: c["experiment"].update(description="${oc.env:HOME}")),
    "a reference in config.yaml": with_settings(lambda c: c["experiment"].update(description="${seed}")),
    "a kind that is a module": with_settings(lambda c: c["scheme"].update(kind="evil")),
    "a name that leaves": with_settings(lambda c: c.update(experiment_name="../../canary")),
    "a scheme that leaves": with_settings(lambda c: c["scheme"].update(name="../../canary")),
    "text from an address": with_settings(lambda c: c["data"].update(path="https://example.org/x.txt")),
    "a cache elsewhere": with_settings(lambda c: c["data"].update(cache_dir=str(Path("canary").absolute()))),
    "a tokenizer that is a pickle": with_settings(
        lambda c: (
            Path("pickle.json").write_bytes(pickle.dumps(Pickled())),
            c["tokenizer"].update(kind="file", path="pickle.json"),
        )
    ),
    "a pickle as weights": lambda run: [file.write_bytes(pickle.dumps(Pickled())) for file in weights(run)],
    "a pickle as weights, sealed": sealed_pickle,
    "a checkpoint of files elsewhere": path_out_of_the_checkpoint,
    "a pickle as the manifest": put("run.json", pickle.dumps(Pickled())),
    "a manifest of names that leave": resealed(experiment="../../canary", scheme="../canary"),
    "a pickle as the run's tokenizer": put("tokenizer.json", pickle.dumps(Pickled())),
    "a pickle as the metrics": put("metrics.jsonl", pickle.dumps(Pickled())),
    "results of pickles": lambda run: parquet_of_pickles(run / "eval/validation/32.parquet"),
    "a pickle as results": put("eval/validation/32.parquet", pickle.dumps(Pickled())),
    "results linked elsewhere": linked_results,
}


# What scoring a run has no use for, or does not follow; it refuses all the others.
IDLE = {
    "a manifest of names that leave",  # no folder is made of them
    "a checkpoint of files elsewhere",  # its three files are known by name
    "a cache elsewhere",
    "a pickle as the run's tokenizer",
    "a pickle as the metrics",
    "results of pickles",
    "a pickle as results",
}


READERS = ["eval", "compare", *(pytest.param(command, marks=pytest.mark.slow) for command in ("report", "train"))]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("command", READERS)
def test_no_run_folder_runs_code_or_writes_elsewhere(
    give: Give, runs: Path, short: list[str], name: str, command: str
) -> None:
    Path("elsewhere").mkdir()
    run = runs / "demo/vo_rope/seed=0"
    RUNS[name](run)
    before = {
        path for path in Path.cwd().rglob("*") if not path.is_relative_to(runs) and "__pycache__" not in path.parts
    }
    asked = {
        "eval": ["eval", str(run), "--length", "64"],
        "report": ["report", "demo"],
        "compare": ["compare", str(run), "demo/nope/seed=0"],
        "train": ["train", *short, "scheme=vo_rope"],
    }
    said = give(*asked[command])
    assert "Traceback" not in said.error and said.status != 1, said
    assert command != "eval" or said.status == (0 if name in IDLE else 2), said
    assert untouched()
    after = {
        path for path in Path.cwd().rglob("*") if not path.is_relative_to(runs) and "__pycache__" not in path.parts
    }
    assert after == before


TEXTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a pickle as text": (lambda p: (p / "a.txt").write_bytes(pickle.dumps(Pickled())), ["data.path=text/a.txt"]),
    "a pickle as parquet": (
        lambda p: (p / "a.parquet").write_bytes(pickle.dumps(Pickled())),
        ["data.path=text/a.parquet"],
    ),
    "parquet of pickles": (lambda p: parquet_of_pickles(p / "a.parquet"), ["data.path=text/a.parquet"]),
    "a loading script beside the text": (
        lambda p: (shutil.copy("evil.py", p / "text.py"), (p / "a.txt").write_text("word " * 3000)),
        ["data.path=text"],
    ),
    "a loading script as the text": (lambda p: shutil.copy("evil.py", p / "text.py"), ["data.path=text"]),
    "JSON that names a class": (
        lambda p: (p / "a.jsonl").write_text('{"text": {"py/object": "evil.run", "_type": "evil.run"}}\n'),
        ["data.path=text/a.jsonl"],
    ),
    "a pickle as a tokenizer": (
        lambda p: (p / "t.json").write_bytes(pickle.dumps(Pickled())),
        ["tokenizer=file", "tokenizer.path=text/t.json"],
    ),
    "a tokenizer that names a class": (
        lambda p: (p / "t.json").write_text(
            '{"model": {"type": "evil.run"}, "auto_map": {"AutoTokenizer": "evil.run"}}'
        ),
        ["tokenizer=file", "tokenizer.path=text/t.json"],
    ),
    "a data set of a script": (
        lambda p: (Path("someone/texts").mkdir(parents=True), shutil.copy("evil.py", "someone/texts/texts.py")),
        ["data=fineweb_edu", "data.path=null", "data.repository=someone/texts", "data.revision=null"],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_runs_code(give: Give, short: list[str], name: str) -> None:
    make, words = TEXTS[name]
    Path("text").mkdir()
    make(Path("text"))
    cache = [f"data.cache_dir={Path.cwd() / 'own'}"]
    kept = [word for word in short if word != "data=files" or "data=fineweb_edu" not in words]
    said = give("train", *kept, *cache, *words)
    assert said.status in (0, 2) and "Traceback" not in said.error, said
    assert ("would be read instead of the hub's" in said.error) == (name == "a data set of a script")
    assert untouched()


def test_a_cache_index_cannot_lead_out_of_the_cache(give: Give, short: list[str]) -> None:
    """A whole corpus of other text lies elsewhere, and the index says that it is what was asked for."""
    own = Path("own").absolute()

    def text_of(*words: str) -> str:
        assert give("train", *short, "scheme=nope", f"data.cache_dir={own}", *words).status == 0
        return str(
            json.loads(max(Path("runs").rglob("run.json"), key=os.path.getmtime).read_text())["fingerprints"]["data"]
        )

    asked = text_of()
    (index,) = own.glob("index/*.json")
    assert text_of("data.test_fraction=0.3", "experiment_name=other") != asked
    (other,) = (
        folder for folder in (own / "corpora").iterdir() if folder.name != json.loads(index.read_text())["corpus"]
    )
    other.rename("elsewhere")
    index.write_text(json.dumps({"corpus": "../../elsewhere"}))
    assert text_of("seed=1") == asked


def test_no_part_of_the_code_can_run_data() -> None:
    """No pickle, no eval, no unsafe YAML and no remote code, anywhere in the package."""
    import ast

    import posbench

    wrong = {"pickle", "dill", "marshal", "shelve", "eval", "exec", "unsafe_load", "full_load", "instantiate"}
    for file in Path(posbench.__file__).parent.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert "trust_remote_code" not in source and "allow_pickle=True" not in source, file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & wrong, (file, names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in wrong | {"torch.load", "yaml.load", "np.load", "__import__"}, (file, called)
                assert called.split(".")[-1] not in {"unsafe_load", "full_load", "instantiate"}, (file, called)


@pytest.mark.parametrize(
    "settings",
    [
        "setup: [touch canary]",
        'partition: "x\\ntouch canary"',
        "additional_parameters: {wrap: touch canary}",
        'additional_parameters: {"x\\ntouch canary": 1}',
        "submitit_folder: canary",
        "}, sweeper: {params: {hydra.launcher.setup: '[touch canary]'}",
    ],
)
def test_lines_of_a_job_are_not_taken_from_a_file(tmp_path: Path, settings: str) -> None:
    """submitit writes them into a shell script."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install .[cluster]")
    file = tmp_path / "own/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    launcher = f"hydra: {{launcher: {{timeout_min: 5, {settings}}}}}"
    slurm = "defaults: [{override /hydra/launcher: submitit_slurm}]"
    file.write_text(f"# @package _global_\n{slurm}\nexperiment: {{name: mine}}\n{launcher}\n")
    words = (f"--config-dir={tmp_path}/own", "experiment=mine")
    with pytest.raises(
        ConfigError, match=r"hydra\.launcher\..*(could become a command of a job|would change Hydra itself)"
    ):
        composition(read(words))
    if settings.startswith("setup"):
        asked = composition(read((*words, "hydra.launcher.setup=[module load cuda]"))).hydra.launcher
        assert asked.setup == ["module load cuda"] and asked.timeout_min == 5
