"""Run folders that are empty, torn, foreign, read-only or half there, and questions that no run can answer."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.cli.commands import snapshot

ONE = "demo/vo_rope/seed=0"


def change(name, **changes):
    """Change entries of a run folder's JSON file `name`; None removes an entry."""

    def make(run):
        content = {**json.loads((run / name).read_text()), **changes}
        content = {key: value for key, value in content.items() if value is not None}
        (run / name).write_text(json.dumps(content))

    return make


def text(name, content):
    return lambda run: (run / name).write_text(content)


def without(name):
    def make(run):
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return make


def emptied(run):
    shutil.rmtree(run)
    run.mkdir()


def no_folder(run):
    shutil.rmtree(run / "eval")
    (run / "eval").touch()


def edited(name, old, new):
    """Replace text in a file of a run folder."""

    def make(run):
        content = (run / name).read_text()
        assert old in content
        (run / name).write_text(content.replace(old, new, 1))

    return make


def weights_of_another_seed(run):
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(run.with_name("seed=1") / "checkpoints", run / "checkpoints")


BAD = {
    "empty": emptied,
    "no manifest": without("run.json"),
    "no configuration": without("config.yaml"),
    "no fingerprints": change("run.json", fingerprints=None),
    "another vocabulary": change("run.json", vocab_size=300),
    "torn configuration": text("config.yaml", "a: [1"),
    "configuration of another version": edited("config.yaml", "train:\n", "train:\n  sharpness: 3\n"),
    "weights of another run": weights_of_another_seed,
    "text that is gone": edited("config.yaml", "*.txt", "*.gone"),
    "an eval folder that is none": no_folder,
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_folder_that_is_none_is_refused_and_left_as_it_was(posbench, runs, name):
    BAD[name](runs / ONE)
    files_before = snapshot(runs)
    result = posbench("eval", ONE, "--length", "64", "--device", "cpu")
    assert result.status == 2 and result.error and "Traceback" not in result.error
    assert snapshot(runs) == files_before


@pytest.mark.parametrize(
    "words, says",
    [
        (["--length", "16m", "--protocol", "nonoverlapping"], r"longer than the text: .* has \d+ tokens in all"),
        (["--protocol", "fixt"], r"protocol='fixt' is not known; did you mean 'fixed'\?"),
        (["--dtype", "float8"], r"'float8' is not known"),
        (["--device", "tpu"], r"'tpu' is not known|tpu"),
    ],
)
def test_a_question_no_run_can_answer(posbench, runs, words, says):
    files_before = snapshot(runs)
    refusal = posbench("eval", ONE, *words).refusal
    assert re.search(says, refusal), refusal
    assert snapshot(runs) == files_before


@pytest.mark.slow
def test_a_finished_run_without_a_loss_is_left_alone(posbench, runs, short):
    change("run.json", loss=None)(runs / ONE)
    result = posbench("train", *short, "scheme=vo_rope", "seed=0")
    assert result.status == 0 and "nothing to do" in result.out + result.error


def test_tokens_made_by_another_tokenizer_are_refused(posbench, runs):
    """The run's own configuration names a file, and the file has changed since."""
    tokenizer = Tokenizer.from_file(str(runs / ONE / "tokenizer.json"))
    tokenizer.add_tokens(["water"])
    tokenizer.save(str(Path("other.json")))
    config = (runs / ONE / "config.yaml").read_text()
    config = config.replace("kind: bytes", "kind: file").replace("path: null\n  name", "path: other.json\n  name")
    (runs / ONE / "config.yaml").write_text(config)
    result = posbench("eval", ONE, "--length", "64")
    assert result.status == 2 and re.search(r"was trained with another tokenizer \(fingerprint", result.error), (
        result.error
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["report", "demoo"],
            r"no run or experiment 'demoo' .*; did you mean 'demo'\? \(posbench ls --runs-dir runs lists",
        ),
        (["eval", "demo/nope", "demo/vo_ropee"], r"'demo/vo_ropee' .*; did you mean 'demo/vo_rope'\?"),
        (["eval", "demo/vo_rop/seed=1"], r"did you mean 'demo/vo_rope/seed=1'\?"),
    ],
)
def test_a_misspelt_experiment_or_run_is_told_the_nearest(posbench, runs, words, says):
    shutil.copytree(runs / "demo", runs / "reference" / "demo_cpu")
    (runs / ".hydra").mkdir()
    refusal = posbench(*words).refusal
    assert re.search(says, refusal), refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["train", "runs_dir={}"], r"Not a directory|not a directory|File exists"),
        (
            ["train", "-m", "seed=0,1", "scheme=nope", "runs_dir={}", "hydra/launcher=basic"],
            r"Not a directory|File exists",
        ),
        (["train", "data.cache_dir={}"], r"token cache .* cannot be written \(.*set data\.cache_dir"),
        (["train", "runs_dir=/proc/nosuch"], r"/proc/nosuch"),
        (
            ["train", "-m", "seed=0,1", "scheme=nope", "runs_dir=/proc/nosuch", "hydra/launcher=basic"],
            r"/proc/nosuch: No such file or dir",
        ),
        (["report", "demo", "--output", "{}"], r"File exists"),
        (["report", "demo", "--output", "/proc/nosuch"], r"/proc/nosuch: No such file"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(posbench, runs, short, arguments, says, monkeypatch):
    file = Path.cwd() / "file"
    file.touch()
    files_before = snapshot(Path.cwd())
    for work in ("posbench.tools.bench.bench", "posbench.reporting.figures.draw_all"):
        monkeypatch.setattr(work, None)  # it is refused before
    command, *arguments = [word.format(file) for word in arguments]
    result = posbench(command, *(short if command == "train" else []), *arguments)
    assert result.status == 2 and "Traceback" not in result.error
    assert re.search(says, result.error.replace("\n", " ")), result.error
    assert snapshot(Path.cwd()) == files_before
