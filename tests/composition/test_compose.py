"""Words become a checked configuration, and what cannot be meant one message of cause, value and remedy."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

import posbench.catalogue.choices as files_of_choices
from posbench.catalogue.choices import choices, description, read_row
from posbench.composition.compose import complete, compose, hydra_word
from posbench.composition.sweep import SweepJob, run_application, sweep_of
from posbench.config import Config, ConfigError, parse_length, token_count
from posbench.evaluation.request import Request
from tests.refusals import refuses

NOPE = {"name": "nope", "kind": "nope"}
QK = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"], "base": 10000.0}
FADED = {"name": "faded", "kind": "my_scheme.py:Faded"}


@pytest.fixture(autouse=True)
def work_dir(tmp_path, monkeypatch):
    """Return the working folder, with choices and a scheme of one's own."""
    for name, text in {
        "my_scheme.py": "raise RuntimeError('imported')\nclass Faded: ...\nclass WindowedNope: ...\n",
        "other/x.py": "class Bent: ...\n",
        "own/scheme/mixed.yaml": "name: mixed\nkind: layered\nlayers: [qk_rope, {name: x, kind: y, of: [nope, 3]}]\n",
        "own/scheme/derived.yaml": "defaults: [mixed, _self_]\nname: derived\nlayers: [nope]\n",
        "own/scheme/long.yaml": "# As long as a window.\nname: long\nkind: rotary\nbase: ${train.context_length}\n",
        "own/scheme/sized.yaml": "kind: my_scheme.py:Faded\nsize: 3\n",
        "own/scheme/pair.yaml": "name: pair\nkind: combined\nof: [my_scheme.py:Faded, qk_rope]\n",
        "own/experiment/mine.yaml": "# @package _global_\ndefaults: [{override /scheme: my_scheme.py:Faded}]\n"
        "experiment: {name: mine}\ntrain: {steps: null, tokens: 20M, context_length: 1k}\n"
        "hydra: {sweeper: {params: {scheme: 'nope,my_scheme.py:Faded', seed: '0,1'}}}\n",
        "own/experiment/torn.yaml": "a: [1",
        "own/data/empty.yaml": "",
        "own/experiment/wrong.yaml": "# @package _global_\nexperiment: {name: wrong}\ntrain: {learning_rate: 3}\n",
        "own/experiment/typed.yaml": "# @package _global_\nexperiment: {name: typed}\ntrain: {lr: abc}\n",
        "own/experiment/flat.yaml": "# @package _global_\nexperiment: {name: flat}\ntrain: 5\n",
        "own/experiment/inner.yaml": "experiment: {name: inner}\n",
        "own/experiment/plain.yaml": "# @package _global_\ndefaults: [{scheme: nope}]\n",
        "own/experiment/modle.yaml": "# @package _global_\ndefaults: [{override /modle: tiny}]\n",
        "own/model/thin.yaml": "name: thin\nd_model: 32\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*words):
    """Return the configurations that `posbench train` would train."""
    configs = []
    outcomes = run_application("posbench train", list(words), SweepJob(configs.append, print))
    assert [str(outcome) for outcome in outcomes if outcome.error] == []
    return configs


def most_slow(*names):
    """Return names as parameters of a test, of which the first three are fast."""
    return [pytest.param(name, marks=pytest.mark.slow if n > 2 else ()) for n, name in enumerate(names)]


# ---------------------------------------------------------------- values


def test_numbers_of_tokens_are_written_as_people_write_them():
    written = {
        "train.tokens": ("64k", 64_000),
        "data.token_budget": ("2.5B", 2_500_000_000),
        "evaluation.max_tokens": ("1e6", 1_000_000),
        "evaluation.batch_tokens": ("16_000", 16_000),
        "train.context_length": ("4k", 4096),
        "evaluation.lengths": ("[1k,4096,1m]", [1024, 4096, 1 << 20]),
    }
    mapping = compose([f"{key}={word}" for key, (word, _) in written.items()]).to_mapping()
    for key, (_, tokens) in written.items():
        group, name = key.split(".")
        assert mapping[group][name] == tokens


@pytest.mark.parametrize("word", ["many", "20X", "1.5", "0.0005k", "-5k", "1e400", "2k5", "1M]x", "1e-3", "true"])
def test_what_is_not_a_number_of_tokens_is_named(word):
    refuses(r"train\.tokens=.* is not a number of tokens", token_count, "train.tokens", word)
    refuses("is not a length", parse_length, "--length", word)


def test_words_need_no_quotes_for_letters_of_any_script_and_for_home_folders(work_dir, monkeypatch):
    for name, value in (("größe", "año"), ("模型", "lr=0.1"), ("base=1e6", "v1.2+x-y")):
        config = compose([f"experiment_name={name}", f"scheme.name={value}", f"tracking.tags=[{name},{value}]"])
        assert (config.experiment_name, config.scheme.name, config.tracking.tags) == (name, value, [name, value])
    monkeypatch.setenv("HOME", str(work_dir))
    words = ["data=files", "data.train_path=[~/a b.txt,ö.txt]", "data.validation_path=~/v", "data.cache_dir=~/cache"]
    config = compose([*words, "runs_dir=~/runs", "scheme=~/other/x.py:Bent"])
    assert config.data.train_path == [f"{work_dir}/a b.txt", "ö.txt"] and config.data.validation_path == f"{work_dir}/v"
    assert config.data.cache_dir == f"{work_dir}/cache" and config.runs_dir == f"{work_dir}/runs"
    assert config.scheme.kind == "other/x.py:Bent"  # seen from here
    for word in ("scheme.base=1,2", "scheme=choice(e,b)", "scheme.attention={kind: linear}", "~train.lr", "seed=1e3"):
        assert hydra_word(word) == word


@pytest.mark.parametrize(
    "name",
    most_slow("it's", "texts (1, 2)", "été", "my notes [2020]", 'say "hi"', "a{b}", "back\\slash", "[1] #a"),
)
def test_a_path_is_taken_as_it_was_typed(name):
    words = ["data=files", f"data.path={name}", f"runs_dir={name}", "tokenizer=file", f"tokenizer.path={name}"]
    config = compose(words)
    assert config.data.path == config.runs_dir == config.tokenizer.path == name
    assert [job.runs_dir for job in trained("-m", *words, "seed=0", "hydra/launcher=basic")] == [name]


@pytest.mark.parametrize(
    "name", most_slow("1e3", "on", "-5", "007", "1_000", "0x10", "true", "1.10", "inf", "12345e67")
)
def test_a_text_is_no_number(name):
    words = [f"{key}={name}" for key in ("tracking.name", "data.revision", "tokenizer.path")]
    config = compose([*words, "data=files", f"data.path=[{name},a (1)]", f"tracking.tags=[{name}]"])
    assert config.tracking.name == config.data.revision == config.tokenizer.path == name
    assert (config.data.path, config.tracking.tags) == ([name, "a (1)"], [name])
    if name[0] != "-":
        swept = trained("-m", f"experiment_name={name},b", "seed=0", "hydra/launcher=basic")
        assert [job.experiment_name for job in swept] == [name, "b"]


def test_a_rate_that_is_typed_for_all_replaces_those_of_the_experiment_but_one_that_is_typed_too():
    rates = {}
    for scheme in ("qk_rope", "vo_rope"):
        words = ["experiment=headline", f"scheme={scheme}", "train.lr=5e-4", "train.lr_of.qk_rope=3e-3"]
        rates[scheme] = compose(words).train.lr
    assert rates == {"qk_rope": 3e-3, "vo_rope": 5e-4}


def test_a_single_word_or_number_is_a_list_of_one():
    request = Request(lengths=64, protocols="fixed", under="rescale=pi")
    assert (request.lengths, request.protocols, request.under) == ((64,), ("fixed",), ("rescale=pi",))


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "scheme=vo_rpe": r"there is no scheme 'vo_rpe'; did you mean 'vo_rope'\? \(posbench schemes lists them; .*\.py",
    "model=tny": r"model=tny does not exist; did you mean 'tiny'\?.*FOLDER/model with --config-dir FOLDER\)",
    "vo_rope": r"'vo_rope' is not an override: write key=value.*did you mean scheme=vo_rope\?",
    "model.d_modle=3": r"no setting 'model\.d_modle'; did you mean 'model\.d_model'\?",
    "train.lr=abc": r"^train\.lr=abc must be a number, such as 0\.001$",
    "train.batch_size=1e3": r"^train\.batch_size=1000\.0 must be a whole number.*: write train\.batch_size=1000$",
    "train.compile=maybe": r"^train\.compile=maybe must be true or false, or null$",
    "seed=null": r"^seed=null must be a whole number",
    "evaluation.protocols=fixed": r"must be a list: write evaluation\.protocols=\[fixed\]$",
    "launch=x": r"^launch is a group: write launch\.KEY=VALUE$",
    "seed=-1": r"seed=-1 is out of range: it must lie between 0 and 9223372036854775807",
    "seed=0,1": r"^seed=0,1 names several values: add -m .*\(posbench train -m seed=0,1\)$",
    "seed=range(0,3)": r"\(posbench train -m 'seed=range\(0,3\)'\)$",
    "data.name=a,b": r"for one text write 'data\.name=\"a,b\"'$",
    "evaluation.lengths=1k,2k": r"for one list write evaluation\.lengths=\[1k,2k\]$",
    "scheme=[nope,qk_rope]": r"a run has one scheme: write scheme=nope,qk_rope, and add -m",
    "data.path='it's'": r"has quotes, brackets or commas.*write 'data\.path=\"it'\"'\"'s\"'$",
    "+foo=1": r"no setting 'foo' \(posbench train --cfg job",
    "+train.learning_rate=1": r"no setting 'train\.learning_rate'; did you mean 'train\.lr'\?",
    "d_model=3": r"no setting 'd_model'; did you mean 'model\.d_model'\?",
    "~foo": r"no setting 'foo'",
    "~train.lr": r"train\.lr cannot be left out",
    "experiment_name=${trian.tokens}": r"no setting 'trian\.tokens'; did you mean 'train\.tokens'\?",
    "experiment_name=${oc.env:NO}": r"^experiment_name: \"Environment variable 'NO' not found\"",
    "--seed=3": r"no option '--seed=3': settings have no dashes, write seed=3",
    "model=5": r"model=5 does not exist",
    "tracking=null": r"tracking=null does not exist",
    "evaluation.lengths=[a]": r"evaluation\.lengths='a' is not a length: give a number from 1",
    "train.accumulation=3": r"train\.batch_size=8 does not divide into train\.accumulation=3 ",
    "model.d_model=65": r"model\.d_model=65 does not divide into model\.num_heads=2 heads: change one",
    "data.path=x": r"data\.path and data\.train_path are for your own files.*give data=files too",
    "scheme.attention=linear": r"is not a mapping: write scheme\.attention=\{kind: linear\}$",
    "train.tokens=10": r"10 is not enough for one step, .* \(train\.batch_size=\d+ x train\.context_length=\d+\)",
    "data=files": r"needs either data\.path='\.\.\.', which posbench splits by document, or data\.train_path",
    "train.precision=1": r"no setting 'train\.precision'; did you mean 'train\.dtype'\?",
    "scheme.of=[qk_rpe]": r"there is no scheme 'qk_rpe'; did you mean 'qk_rope'\?",
    "--config-dir=own experiment=torn": r"expected ',' or '\]'.*\(in /.*own/experiment/torn\.yaml\)$",
    "--config-dir=own data=empty": r"data\.name is not given",
    "--config-dir=own experiment=wrong": r"did you mean 'train\.lr'\?.*\(in experiment/wrong\.yaml\)$",
    "--config-dir=own experiment=typed": r"^train\.lr=abc must be a number.*\(in experiment/typed\.yaml\)$",
    "--config-dir=own experiment=flat": r"^train is a group.*\(in experiment/flat\.yaml\)$",
    "--config-dir=own experiment=inner": r"begin the experiment's file with '# @package _global_'",
    "--config-dir=own experiment=plain": r"'scheme: nope' in the defaults.*write '- override /scheme: nope'",
    "--config-dir=own experiment=modle": r"no setting 'modle'; did you mean 'model'\?",
    "--config-dir=own model=thin": r"^model\.num_layers is not given: it needs a value$",
    "scheme=my_schem.py:Faded": r"no file my_schem\.py .*: give the path of a",
    "scheme=my_scheme.py:Faded scheme.name=nope": r"name .nope., .*already the name of a sch.*=my_nope",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_one_message_with_what_to_do(words):
    with pytest.raises(ConfigError) as refused:
        compose(words.split() or [""])
    assert re.search(REFUSED[words], str(refused.value)) and "\n" not in str(refused.value), refused.value


# ---------------------------------------------------------------- rows and files


@pytest.mark.slow
def test_rows_that_a_scheme_names_stand_in_its_configuration():
    words = ["scheme=mixed", "--config-dir=own"]
    layers = [QK, {"name": "x", "kind": "y", "of": [NOPE, 3]}]
    for config in (compose(words), *trained("-m", *words, "seed=0", "hydra/launcher=basic")):
        assert (config.scheme.kind, config.scheme.options) == ("layered", {"layers": layers})
        assert Config.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_mapping()))) == config, (
            "it needs no other file"
        )
    assert compose(["scheme=derived", "--config-dir=own"]).scheme.options == {"layers": [NOPE]}
    assert compose(["scheme=nope", "scheme.of=[qk_rope]"]).scheme.options == {"of": [QK]}
    long = compose(["scheme=nope", "scheme.of=[long]", "--config-dir=own"]).scheme.options["of"]
    assert long == [{"name": "long", "kind": "rotary", "base": 64}]
    assert read_row("mixed", Path("own")).options == {"layers": layers}


def test_an_option_needs_no_plus_whether_or_not_the_file_lists_it():
    for scheme in ("nope", "my_scheme.py:Faded"):
        options = compose([f"scheme={scheme}", "scheme.size=64", "scheme.at.a=1"]).scheme.options
        assert options == {"size": 64, "at": {"a": 1}}


@pytest.mark.slow
def test_a_class_in_a_file_stands_wherever_a_scheme_is_named():
    """And none of these files is imported."""
    config_dir = "--config-dir=own"
    assert compose(["scheme=my_scheme.py:Faded"]).scheme.to_mapping() == FADED
    assert compose(["scheme=my_scheme.py:Faded", "scheme.name=mine"]).scheme.to_mapping() == {**FADED, "name": "mine"}
    assert compose(["experiment=mine", config_dir]).scheme.to_mapping() == FADED
    assert compose(["scheme=sized", config_dir]).scheme.to_mapping() == {**FADED, "size": 3}
    assert compose(["scheme=pair", config_dir]).scheme.options == {"of": [FADED, QK]}
    swept = f"scheme=qk_rope,my_scheme.py:Faded,../{Path.cwd().name}/other/x.py:Bent"
    assert sweep_of([swept])["scheme"] == swept.partition("=")[2].split(",")
    assert sweep_of(["experiment=mine", config_dir])["scheme"] == ["nope", "my_scheme.py:Faded"]
    configs = trained("-m", swept, "seed=0", "hydra/launcher=basic")
    assert [config.scheme.name for config in configs] == ["qk_rope", "faded", "bent"]


def test_a_package_brings_the_yaml_of_its_schemes(work_dir, monkeypatch):
    (work_dir / "faded_package/conf/scheme").mkdir(parents=True)
    (work_dir / "faded_package/__init__.py").write_text("raise RuntimeError('imported')")
    (work_dir / "faded_package/conf/scheme/packaged.yaml").write_text(
        "# Of a package.\nname: packaged\nkind: packaged\n"
    )
    point = EntryPoint("packaged", "faded_package.schemes:Packaged", "posbench.schemes")
    monkeypatch.syspath_prepend(str(work_dir))
    monkeypatch.setattr(files_of_choices, "entry_points", lambda group: [point])
    files_of_choices.conf_dirs.cache_clear()
    try:
        assert "packaged" in choices("scheme") and description("scheme", "packaged") == "Of a package."
        assert compose(["scheme=packaged"]).scheme.kind == "packaged"
        assert sweep_of(["scheme=glob(pack*)"]) == {"scheme": ["packaged"]}
    finally:
        files_of_choices.conf_dirs.cache_clear()


# ---------------------------------------------------------------- beside Hydra


def test_an_application_of_hydra_that_calls_us_goes_on_afterwards(tmp_path):
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(["seed=3"]).seed == 3
        assert hydra_compose("theirs").answer == 42


def test_completion_knows_choices_and_fields():
    assert complete("scheme=v") == ["scheme=v_rope", "scheme=vo_rope"]
    assert complete("train.lr_") == ["train.lr_end_ratio=", "train.lr_of="]
