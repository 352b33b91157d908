"""A scheme of one's own is one file: trained, resumed, evaluated; and what somebody else's runs may import."""

import re
from pathlib import Path

import pytest

from posbench.catalogue import own_files
from posbench.runs import Run
from tests.refusals import refuses

FADED = """\
import torch
from torch import nn
from posbench.schemes import Scheme


class Faded(Scheme):
    def __init__(self, shape, size=4):
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(size, shape.num_heads))

    def bias(self, q, k, gates, at):
        return at.look_up(self.table[at.distances(q).clamp(max=len(self.table) - 1)].t())
"""


@pytest.fixture
def faded(posbench, monkeypatch):
    """Write the scheme file into the working directory, and forget any file that was trusted before."""
    monkeypatch.setattr(own_files, "_trusted", set())
    file = Path("ideas/faded.py")
    file.parent.mkdir()
    file.write_text(FADED)
    return file


def run_of(scheme="faded", seed=0):
    return Run(Path("runs/mine") / scheme / f"seed={seed}")


@pytest.mark.slow
def test_a_file_is_trained_and_evaluated_and_a_change_stops_it(posbench, faded, short):
    words = ["scheme=./ideas/faded.py:Faded", "scheme.size=3", "experiment_name=mine", *short]
    assert posbench("train", *words).status == 0
    run = run_of()
    assert (run.path / "faded.py").read_text() == FADED, "a copy to read"
    assert run.config.scheme.to_mapping() == {"name": "faded", "kind": "ideas/faded.py:Faded", "size": 3}
    assert list(run.manifest.scheme_files) == ["ideas/faded.py"]
    assert run.manifest.num_parameters["scheme"] == 3 * 2 and run.manifest.training_flops is None
    assert posbench("eval", "mine", "--length", "96").status == 0
    assert "nothing to do" in posbench("train", *words).error

    faded.write_text(FADED + "# changed\n")
    answer = posbench("eval", "mine", "--length", "80")
    assert answer.status == 2 and "ideas/faded.py has changed since mine/faded/seed=0 was trained" in answer.error
    assert "has a copy, runs/mine/faded/seed=0/faded.py), or add --scheme-changed" in answer.error
    assert posbench("eval", "mine", "--length", "80", "--scheme-changed").status == 0
    assert ("file=changed",) in [result.key.options for result in run.results()[0] if result.length == 80]
    assert re.search(
        r"file ideas/faded\.py: \w+ -> \w+\. Give the new run its own name", posbench("train", *words).refusal
    )


def test_a_recorded_file_is_imported_below_the_working_directory_or_where_it_was_named_and_never_from_a_run(
    posbench, faded, short, monkeypatch
):
    assert posbench("train", "scheme=ideas/faded.py:Faded", "experiment_name=mine", *short).status == 0
    run, file = Run(run_of().path.resolve()), faded.resolve()
    for trusted, work_dir, refused in (
        (None, Path.cwd(), None),
        (None, run.path, "cannot be read"),  # ideas/faded.py is not below the run folder
        (file, run.path, None),
    ):
        monkeypatch.setattr(own_files, "_trusted", set())
        monkeypatch.chdir(work_dir)
        if trusted:
            own_files.trust_file(trusted)
        if refused is None:
            run.load_model()
        else:
            refuses(refused, run.load_model)
    monkeypatch.setattr(own_files, "_trusted", set())
    monkeypatch.chdir(run.path)
    for path, reason in (("faded.py", "is part of a run folder"), (file, "outside the working directory")):
        refuses(
            f"{reason}: if you trust that file, name it with --scheme-file",
            own_files.load,
            f"{Path(path).resolve()}:Faded",
            object,
        )


def test_only_a_file_that_was_named_for_it_stands_in_for_a_missing_one(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "_trusted", set())
    for folder in ("words", "option"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"# {folder}\n")
    missing = {str(tmp_path / "gone" / "mine.py"): "0" * 64}
    own_files.trust_files({"kind": f"{tmp_path}/words/mine.py:Mine"})
    refuses(r"gone/mine\.py cannot be read", own_files.changed_files, missing)
    own_files.trust_file(tmp_path / "option" / "mine.py")
    assert own_files.changed_files(missing) == [str(tmp_path / "option" / "mine.py")], "the file that was compared"


@pytest.mark.slow
def test_a_file_outside_the_working_directory_is_imported_for_ones_own_runs_only(posbench, faded, short, monkeypatch):
    """The same shell trains and evaluates it; somebody else's run or pack that names it needs --scheme-file."""
    outside = Path.cwd().parent / "elsewhere/faded.py"
    outside.parent.mkdir()
    faded.rename(outside)

    def give(*words):
        monkeypatch.setattr(own_files, "_trusted", set())  # each command is a process of its own
        return posbench(*words)

    assert give("train", f"scheme={outside}:Faded", "experiment_name=mine", *short).status == 0
    assert give("eval", "mine", "--length", "96").status == 0
    outside.write_text(FADED + "# changed\n")
    assert "has changed since mine/faded/seed=0 was trained" in give("eval", "mine", "--length", "80").error
    assert give("eval", "mine", "--length", "80", "--scheme-changed").status == 0
    outside.write_text(FADED)

    assert give("pack", "mine", "theirs.zip", "--weights").status == 0
    Path("runs/mine").rename("theirs_too")
    for place in ("theirs.zip", "theirs_too"):
        refused = give("eval", place, "--length", "88")
        assert refused.status == 2 and f"name it with --scheme-file {outside}" in refused.error
        assert give("eval", place, "--length", "88", "--scheme-file", str(outside)).status == 0
    Path("runs").mkdir(exist_ok=True)
    Path("runs/linked").symlink_to(Path("theirs_too").resolve())
    assert "name it with --scheme-file" in give("eval", "linked", "--length", "89").error


@pytest.mark.slow
def test_what_a_file_does_wrong_is_one_message_with_its_place(posbench, faded, short):
    for text, says in {
        FADED.replace("import torch\n", "import torch\nimport no_such\n"): r"faded\.py, line 2: ModuleNotFoundError",
        FADED.replace("class Faded(Scheme)", "class Faded"): r"'Faded' \(it has no class that extends Scheme\)",
        FADED.replace(
            "gates, at", "at"
        ): r"faded\.py, line 11: Faded\.bias\(self, q, k, at\) must be bias\(self, q, k, g",
        FADED.replace(
            "def __init__(self, shape, size=4)", "def __init__(self, shape, *, sizes=4)"
        ): r"did you mean 'sizes'",
    }.items():
        faded.write_text(text)
        command = ["train", "scheme=ideas/faded.py:Faded", "scheme.size=3", "experiment_name=mine", *short]
        assert re.search(says, posbench(*command).refusal), text
    assert not Path("runs").exists()
