"""Words that cannot be meant are refused at once with cause, value and remedy; nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Give, left

# What is given after `posbench train` and the words of a small run -> what the message must say.
REFUSED = {
    "scheme=vo_rpe": r"scheme=vo_rpe does not exist; did you mean 'vo_rope'\? \(conf/scheme contains alibi, .*\)",
    "model=tinny": r"model=tinny does not exist; did you mean 'tiny'\?",
    "experiment=dmo": r"experiment=dmo does not exist; did you mean 'demo'\?",
    "hydra/launcher=nosuch": r"hydra/launcher=nosuch does not exist",
    "vo_rope": r"'vo_rope' is not an override: write key=value.*did you mean scheme=vo_rope\?",
    "model.d_modle=3": r"no setting 'model\.d_modle'; did you mean 'model\.d_model'\?",
    "scheme.bse=1": r"no setting 'scheme\.bse'; did you mean 'scheme\.base'\?",
    "+scheme.bse=1": r"scheme\.bse is not an option of 'rotary'; did you mean 'base'\? \(options: ",
    "train.betas=[0.9,0.95]": r"no setting 'train\.betas'; did you mean 'train\.beta2'\?",
    "+foo=1": r"no setting 'foo'",
    "+train.foo=1": r"no setting 'train\.foo'",
    "train.lr=abc": r"train\.lr=abc is refused: 'abc' is not a number",
    "train.steps=1.5": r"train\.steps=1\.5 is refused: '1\.5' is not a whole number",
    "train.steps=1e30": r"train\.steps=1e30 is refused: '1e\+30' is not a whole number",
    "seed=true": r"seed=true is refused: 'True' is not a whole number",
    "seed=null": r"seed=null is refused: it cannot be null",
    "seed=": r"seed= is refused: '' is not a whole number",
    "model.tied_embeddings=perhaps": r"'perhaps' is not true or false",
    "evaluation.lengths=[a]": r"'a' is not a length: give tokens from 2",
    "seed=0,1": r"seed=0,1 contains several values: sweep over them with -m",
    "train.steps=0": r"train\.steps=0 is out of range: it must lie between 1 and ",
    "train.steps=-1": r"train\.steps=-1 is out of range",
    "train.lr=nan": r"train\.lr=nan is out of range",
    "train.lr=inf": r"train\.lr=inf is out of range",
    "train.lr=0": r"train\.lr=0\.0 is out of range",
    "train.batch_size=0": r"train\.batch_size=0 is out of range",
    "train.accumulation=3": r"train\.batch_size=4 does not divide into train\.accumulation=3 ",
    "seed=-1": r"seed=-1 is out of range",
    "seed=9223372036854775808": r"seed=9223372036854775808 is out of range",
    "train.steps=1099511627776": r"train\.steps=1099511627776 of 128 tokens are more than 4e\+13 tokens: lower",
    "model.d_model=66": r"model\.d_model=66 does not divide into model\.num_heads=4 heads: change one",
    "model.d_model=60": r"model\.head_dim=15 is odd.*choose an even number",
    "model.num_kv_heads=3": r"model\.num_heads=4 is not a multiple of model\.num_kv_heads=3",
    "model.vocab_size=100": r"the tokenizer has 257 tokens but model\.vocab_size=100: raise it",
    "scheme.kind=rotry": r"scheme\.kind='rotry' is not known; did you mean 'rotary'\?",
    "scheme.sites=[z]": r"scheme\.sites=\['z'\] must name each of",
    "scheme.base=-1": r"scheme\.base=-1 must lie above 1",
    "train.dtype=float8": r"train\.dtype='float8' is not known; did you mean 'float32'\?",
    "train.device=tpu": r"train\.device='tpu' is not known: give auto, cpu, cuda",
    "train.device=cuda:99": r"train\.device=cuda:99: this machine has \d+ GPUs.*set train\.device=auto or cpu",
    "tracking.backend=mlflow": r"tracking\.backend='mlflow' is not known \(known: none, wandb\)",
    "evaluation.protocols=[fxed]": r"protocol 'fxed' is not known; did you mean 'fixed'\?",
    "scheme=nope scheme.base=1e3": r"the chosen scheme has no option 'scheme\.base' ",
    "seed='${seed}'": r"Recursive interpolation detected \(seed\)",
    "~experiment": r"MissingMandatoryValue .* experiment \(experiment_name\)",
    "tokenizer=file": r"tokenizer=file needs tokenizer\.path=",
    "data.path=null": r"data=files needs data\.path=",
    "data.path=nosuch.txt": r"data\.path='nosuch\.txt' does not exist: give a file",
    "data.path='https://example.org/x.txt'": r"data\.path is a web address \(https://\.\.\.\), .*download it first",
    "data.path='a\0b'": r"is not an override|contains a NUL character",
    "runs_dir=''": r"runs_dir is empty: name a folder",
    "~scheme": r"scheme is missing: give scheme=\.\.\. \(one of alibi, ",
    "~train.lr": r"~train\.lr is refused: a setting cannot be removed, only set",
    "scheme=null": r"'scheme=null': scheme needs the name of one choice: alibi, ",
    "scheme=[nope,vo_rope]": r"scheme needs the name of one choice",
    "data.path=été.txt": r"'data\.path=été\.txt' is not an override: .*put a value with .*letters beyond a-z in quotes",
    "data.path='x": r"is not an override: .*in quotes",
    "data.path='été 1.txt'": r"data\.path='été 1\.txt' does not exist",
    "": r"'' is not an override: write key=value",
    "=": r"no setting ''|not an override|Could not override ''",
    "hydra.run.dir=elsewhere": r"cannot be changed in posbench \(runs_dir and experiment_name set the run folder",
    "hydra.output_subdir=.hydra": r"cannot be changed in posbench \(runs_dir",
    "hydra.searchpath=[x]": r"cannot be changed in posbench \(choices of your own are added with --config-dir FOLDER",
    "hydra.verbose=true": r"cannot be changed in posbench \(posbench prints its own messages",
    "hydra.mode_=x": r"cannot be changed in posbench \(posbench relies on it\); settings of Hydra",
    "experiment.description=${nosuch}": r"Interpolation key 'nosuch' not found \(experiment\.description\)",
    "--config-dir=nosuch": r"--config-dir nosuch is not a folder: give one that contains choices",
    "--config-name=nosuch": r"--config-name nosuch cannot be used: .*--config-dir FOLDER",
    "--config-path=nosuch": r"--config-path nosuch cannot be used",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", REFUSED, ids=lambda word: re.sub(r"\W+", "_", word) or "nothing")
def test_a_word_that_cannot_be_meant_is_refused_with_what_to_do(
    posbench: Give, short: list[str], cache: Path, word: str
) -> None:
    before = left(cache)
    refusal = posbench("train", *short, *(word.split() if "scheme=" in word else [word])).refusal
    assert re.search(REFUSED[word], refusal), refusal
    assert left(Path.cwd()) == {}
    assert {name for name in left(cache) if ".tmp" in name} == set() and (before == {} or left(cache) == before)


@pytest.mark.parametrize(
    "words, says",
    [
        (["model.d_model=65536", "model.num_layers=1000", "model.num_heads=512"], r"at least [\d,]{15,} parameters"),
        (["model.vocab_size=4194304", "model.d_model=16384", "model.num_heads=128"], r"lower .*model\.vocab_size"),
        (["train.batch_size=1048576", "train.context_length=4096"], r"tokens at once .*raise train\.accumulation"),
        (
            ["train.context_length=4194304", "train.batch_size=1024"],
            r"train\.context_length=4194304\) need at least",
        ),
    ],
)
def test_what_no_machine_could_hold_is_refused_before_it_is_tried(
    posbench: Give, short: list[str], words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.training import memory_check

    monkeypatch.setattr(memory_check, "memory_bytes", lambda config: 64_000_000_000)
    refusal = posbench("train", *short, *words).refusal
    assert re.search(says, refusal) and "64.0 GB" in refusal, refusal
    assert left(Path.cwd()) == {}


@pytest.mark.parametrize(
    "words, says",
    [
        (["eval"], r"runs/ does not exist: train first"),
        (["eval", "nosuch"], r"there is no run 'nosuch', here or under runs/"),
        (["report"], r"runs/ contains no runs: train first with posbench train -m experiment=demo"),
        (
            ["report", "dmo"],
            r"there is no experiment 'dmo' under runs/ \(experiments there: none\); did you mean 'demo'\?",
        ),
        (
            ["report", "ladder_s"],
            r"\(experiments there: none\): train it first with posbench train -m experiment=ladder_s",
        ),
        (["compare", "a", "b"], r"there is no run 'a'"),
        (["prepare", "data=nosuch"], r"data=nosuch does not exist \(conf/data contains files, "),
        (["bench", "--model", "tiny"], r"'--model' is not an option; did you mean model=tiny\?"),
        (["train", "--experiment", "demo"], r"'--experiment' is not an option; did you mean experiment=demo\?"),
        (["plan", "--train.lr=1e-3"], r"did you mean train\.lr=1e-3\?"),
        (["verify", "qk_rope", "scheme.bsae=1"], r"no setting 'scheme\.bsae'; did you mean 'scheme\.base'\?"),
        (["prepare", "vo_rope"], r"did you mean scheme=vo_rope\?"),
        (["verify", "nosuch"], r"scheme=nosuch does not exist"),
        (["verify", "vo_rope", "scheme.base=x"], r"scheme\.base=x must lie above 1"),
    ],
)
def test_every_command_says_what_is_missing(posbench: Give, words: list[str], says: str) -> None:
    refusal = posbench(*words).refusal
    assert re.search(says, refusal), refusal
    assert left(Path.cwd()) == {}


@pytest.mark.slow
def test_a_folder_of_ones_own_choices_is_taken_by_every_command_that_composes(
    posbench: Give, cache: Path, words: list[str]
) -> None:
    folder = "it's ours, too"
    (Path(folder) / "scheme").mkdir(parents=True)
    (Path(folder) / "scheme" / "mine.yaml").write_text("# Of my own.\nname: mine\nkind: rotary\nsites: [q]\n")
    own = ["--config-dir", folder]
    small = ["scheme=mine", *words]
    assert json.loads(posbench("plan", *small, "--json", *own).out)["schemes"] == ["mine"]
    assert posbench("prepare", *small, *own).status == 0
    said = posbench("bench", "--schemes", "mine", *words, "--rounds", "1", "--steps", "1", *own)
    assert said.status == 0 and "\nmine " in said.out
    assert re.search(r"\nmine +rotary +absolute", posbench("schemes", *own).out)
    assert "\nmine " in posbench("verify", "mine", *own).out
    assert "scheme=mine does not exist" in posbench("plan", *small).refusal
    for command in ("plan", "prepare", "bench", "schemes", "verify"):
        assert "--config-dir nosuch is not a folder" in posbench(command, "--config-dir", "nosuch").refusal


def test_a_warning_about_the_text_is_given_once(posbench: Give, cache: Path) -> None:
    text = json.dumps({"text": " ".join(f"word{n * n % 997}" for n in range(400))}) + "\n"
    own = []
    for split in ("train", "validation", "test"):
        Path(f"{split}.jsonl").write_text(text + json.dumps({"text": f"{split} alone"}) + "\n")
        own.append(f"data.{split}_path={split}.jsonl")
    given = ["prepare", "data=files", *own, "tokenizer.vocab_size=300", f"data.cache_dir={cache}"]
    for said in (posbench(*given), posbench(*given)):
        assert (said.out + said.error).count("also occur in train") == 1, "of validation and of test"


@pytest.mark.parametrize(
    "words", [["trian"], ["compare"], ["eval", "--lenght", "8"], ["train", "--multrun"], ["schemes", "--x"]]
)
def test_what_is_no_command_or_flag_shows_the_usage(posbench: Give, words: list[str]) -> None:
    said = posbench(*words)
    assert said.status == 2 and "sage" in said.error and "Traceback" not in said.error
    assert left(Path.cwd()) == {}


def test_a_traceback_comes_when_it_is_asked_for(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.config import ConfigError

    monkeypatch.setenv("POSBENCH_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        posbench("train", *short, "train.steps=0")


def test_a_fault_of_our_own_is_one_line_too(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    from posbench import verify

    def broken(*_: object) -> Iterator[None]:
        raise ZeroDivisionError("oh\x1b[2J")

    monkeypatch.setattr(verify, "list_schemes", broken)
    said = posbench("schemes")
    assert said.status == 1
    assert said.error == "posbench: ZeroDivisionError: oh\\x1b[2J\n(POSBENCH_TRACEBACK=1 shows where it arose)\n"


@pytest.mark.parametrize("command", ["train", "prepare", "eval", "report", "schemes"])
def test_ctrl_c_prints_no_traceback(
    posbench: Give, runs: Path, short: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for where in (
        "posbench.training.train",
        "posbench.data.prepare",
        "posbench.evaluation.command.evaluate_runs",
        "posbench.reporting.report.report",
        "posbench.verify.list_schemes",
    ):
        monkeypatch.setattr(where, interrupted)
    said = posbench(command, *(short if command in ("train", "prepare") else []))
    told = "interrupted before the first step: nothing was written" if command == "train" else "stopped"
    assert (said.status, said.error) == (130, told + "\n")


def test_an_option_that_the_schemes_own_yaml_or_class_has_is_suggested(
    posbench: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.schemes import SCHEMES, Scheme, Shape

    class Partial(Scheme):
        def __init__(self, shape: Shape, fraction: float = 0.5, tapering: int = 1) -> None:
            super().__init__(shape)

    monkeypatch.setitem(SCHEMES.ours, "partial", Partial)  # type: ignore[arg-type]
    Path("own/scheme").mkdir(parents=True)
    Path("own/scheme/part.yaml").write_text("name: part\nkind: partial\nfraction: 0.5\n")
    for command in (["train"], ["train", "-m", "seed=0,1"]):
        words = [*command, "scheme=part", "--config-dir", "own"]
        assert "did you mean 'scheme.fraction'?" in posbench(*words, "scheme.fracton=0.5").refusal
        assert "did you mean '+scheme.tapering'?" in posbench(*words, "scheme.taperng=2").refusal
