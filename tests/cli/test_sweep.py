"""`posbench train` is an application of Hydra; a sweep checks all its jobs, runs each, and tells what failed."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from posbench import cli
from posbench.catalogue.choices import choices
from posbench.composition.sweep import SweepJob, run_application, sweep_of
from posbench.runs import Run
from tests.cli.commands import snapshot

# ---------------------------------------------------------------- an application of Hydra


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--cfg", "job", "seed=3", "-p", "scheme", "scheme=vo_rope"], "name: vo_rope\nkind: rotary"),
        (["-i", "defaults", "seed=1", "scheme=nope"], "scheme/nope"),
        (["scheme=mine", "-cd", "own", "-c", "job", "-p", "scheme.kind"], "nope"),
        (["data=mine", "--config-dir=own", "-c", "job", "-p", "experiment.name"], "mine"),
        (["data=mine", "--config-dir", "own", "-c", "job", "-p", "experiment.name"], "mine"),
    ],
)
def test_its_flags_show_what_is_asked(posbench, words, shown):
    Path("own/scheme").mkdir(parents=True)
    Path("own/scheme/mine.yaml").write_text("name: mine\nkind: nope\n")
    Path("own/data").mkdir()
    Path("own/data/mine.yaml").write_text(choices("data")["copy"].read_text().replace("name: copy", "name: mine"))
    result = posbench("train", *words)
    assert result.status == 0 and shown in result.out, result
    assert [path.name for path in Path.cwd().iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("seed=range(0,2),1", "seed=0,1"),
        ("seed=1,range(3)", "seed=1,0,2"),
        ("seed=choice(0,1),2", "seed=0,1,2"),
        ("train.lr=interval(0.1,0.2)", "train.lr=0.1,0.2"),
    ],
)
def test_a_sweep_that_hydra_cannot_take_is_refused_with_its_values(posbench, short, word, remedy):
    assert posbench("train", "-m", *short, word).refusal.endswith(f"write {remedy}")


@pytest.mark.slow
def test_what_a_name_looks_up_is_one_value_in_the_check_and_in_the_job(tmp_path):
    names = []
    checked = []
    words = ["-m", "seed=0,1", f"runs_dir={tmp_path}", "hydra/launcher=basic"]
    words.append("experiment_name=at_${now:%f}_${hydra:job.num}")

    def is_finished(folder):
        checked.append(folder.parts[-3])
        return False

    task = SweepJob(lambda config: names.append(config.experiment_name), print, is_finished)
    run_application("posbench train", words, task)
    assert checked == [*names, *names] and [name.rpartition("_")[2] for name in names] == ["0", "1"]


# ---------------------------------------------------------------- what is swept


def test_the_sweep_is_that_of_the_words_and_of_the_experiment_they_name():
    assert sweep_of(["seed=0,1"]) == {"seed": ["0", "1"]}, "the sweep of the default experiment is not added"
    assert len(sweep_of(["experiment=demo", "seed=0,1"])["scheme"]) == 11
    assert sweep_of(["experiment=demo", "scheme=nope"]) == {"seed": ["0", "1", "2"]}
    assert sweep_of(["scheme=glob(qkv*)"])["scheme"] == ["qkv_rope", "qkvo_rope"]


# ---------------------------------------------------------------- sweeps


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["scheme=nope,vo_rpe"], r"there is no scheme 'vo_rpe'; did you mean 'vo_rope'\?"),
        (["scheme=glob(xyz*)"], r"scheme=glob\(xyz\*\) matches nothing"),
        (["scheme=nope,vo_rope", "seed=0,-1"], r"seed=-1 is out of range"),
        (["experiment=demo,demo"], r"each experiment has its own sweep"),
        (["seed=0", "scheme=nope", "train.lr=1e-3,2e-3"],
         r"the folder demo/nope/seed=0: train\.lr=0\.001 and train\.lr=0\.002; give them different names, such as "
         r"'experiment_name=lr_\$\{train\.lr\}' \(with the quotes\)$"),
    ],
)  # fmt: skip
def test_a_sweep_with_one_wrong_job_is_refused_before_any_runs(
    posbench,
    short,
    arguments,
    says,
):
    refusal = posbench("train", "-m", *(word for word in short if word != "model=tiny"), *arguments).refusal
    assert re.search(says, refusal), refusal
    assert snapshot(Path.cwd()) == {}


@pytest.mark.slow
def test_one_failing_job_does_not_keep_the_others_from_running(posbench, short, monkeypatch):
    def train(config):
        if config.scheme.name == "nope":
            raise ZeroDivisionError("oh")
        return SimpleNamespace(identity={}, loss=2.5, wandb=None)

    monkeypatch.setattr("posbench.cli._train_job", train)
    result = posbench("train", *short, "-m", "scheme=nope,vo_rope,alibi", "seed=0")
    failure = "demo/nope/seed=0: ZeroDivisionError: oh"
    begun = [f"run {n} of 3: demo/{scheme}/seed=0" for n, scheme in enumerate(("nope", "vo_rope", "alibi"), 1)]
    lines = re.sub(r", sweep [^\n]* left", "", result.error).splitlines()
    assert lines == ["3 runs", begun[0], failure, *begun[1:], f"posbench: {failure}"]
    assert len(re.findall("of 3: .*, sweep .* left", result.error)) == 2
    assert result.status == 1 and result.out.splitlines()[-1] == "3 runs: 2 trained, 1 failed"


@pytest.mark.slow
def test_a_sweep_of_which_every_job_is_refused_alike_is_one_refusal(posbench, short):
    result = posbench("train", "-m", *short, "scheme=vo_rope,qk_rope", "seed=0", "scheme.bse=1")
    assert result.status == 2 and result.error.count("posbench: ") == 1 and "did you mean 'base'?" in result.error


@pytest.mark.slow
def test_ctrl_c_ends_the_whole_sweep(posbench, short, monkeypatch):
    begun = []

    def train(config):
        begun.append(config.scheme.name)
        raise ZeroDivisionError("oh") if config.scheme.name == "alibi" else KeyboardInterrupt

    monkeypatch.setattr("posbench.cli._train_job", train)
    result = posbench("train", *short, "-m", "scheme=alibi,nope,vo_rope", "seed=0")
    assert (result.status, begun) == (130, ["alibi", "nope"]) and "Traceback" not in result.error
    assert result.error.splitlines()[-1] == "interrupted: run the same command again to resume"


@pytest.mark.slow
def test_one_sweep_trains_trunks_and_then_their_branches(posbench, short):
    words = [word for word in short if not word.startswith("train.")] + ["train.device=cpu", "train.dtype=float32"]
    words += ["train.compile=false", "train.context_length=32", "train.batch_size=4", "train.validation_tokens=64"]
    words += ["train.schedule=wsd", "train.tokens=2560", "train.branch_tokens=[640,1280]"]
    words += ["seed=0"]
    result = posbench("train", "-m", *words, "scheme=nope,vo_rope")
    assert result.status == 0 and result.error.startswith("6 runs\n"), result.error
    lines = [line for line in result.error.splitlines() if "begins at step" in line]
    assert lines == [
        f"demo-{tokens}/{scheme}/seed=0: begins at step {step} of demo/{scheme}/seed=0"
        for scheme in ("nope", "vo_rope")
        for tokens, step in (("640", 4), ("1.28k", 8))
    ]
    assert result.error.index("demo/vo_rope/seed=0: loss") < result.error.index("begins at step")
    again = posbench("train", "-m", *words, "scheme=nope,vo_rope")
    assert again.error.startswith("6 runs, 6 of them already finished\n")
    assert again.out.splitlines()[-1] == "6 runs: 6 finished before (*)"


def test_branches_of_a_trunk_that_failed_are_not_trained(posbench, short, monkeypatch):
    trained = []

    def train(config):
        trained.append(f"{config.experiment_name}/{config.scheme.name}")
        if config.scheme.name == "nope":
            raise ZeroDivisionError("oh")
        return SimpleNamespace(identity={}, loss=2.5, wandb=None)

    monkeypatch.setattr("posbench.cli._train_job", train)
    words = [word for word in short if not word.startswith("train.steps=")]
    words += ["train.schedule=wsd", "train.tokens=2560", "train.branch_tokens=[1280]", "seed=0"]
    result = posbench("train", "-m", *words, "scheme=nope,vo_rope")
    assert trained == ["demo/nope", "demo/vo_rope", "demo-1.28k/vo_rope"], result.error
    assert "demo-1.28k/nope/seed=0: not trained, because the run that it branches off failed" in result.error
    assert result.out.splitlines()[-1] == "4 runs: 2 trained, 2 failed"


@pytest.mark.slow
def test_arms_go_on_from_their_trunks_and_one_without_a_trunk_is_left_out(posbench, short, monkeypatch):
    """The arms of `alibi` are not begun, because it failed."""
    trained = cli._train_job

    def train(config):
        if config.scheme.name == "alibi":
            raise ZeroDivisionError("oh")
        return trained(config)

    monkeypatch.setattr("posbench.cli._train_job", train)
    words = [word for word in short if not word.startswith("train.")] + ["train.device=cpu", "train.dtype=float32"]
    words += ["train.compile=false", "train.context_length=32", "train.batch_size=4", "train.validation_tokens=64"]
    words += ["train.schedule=wsd", "train.tokens=1280", "train.checkpoint_every=10", "seed=0"]
    words.append("+train.lr_of={qk_rope:0.007}")
    words.append(
        'train.arms={every:["train.context_length=64","train.batch_size=2"],alibi:{plain:[]},'
        'qk_rope:{plain:[],yarn:["scheme.rescale=yarn"],dropped:["scheme=nope","train.batch_size=2"]}}'
    )
    result = posbench("train", "-m", *words, "scheme=qk_rope,alibi")
    assert "2 runs\n" in result.error and "3 arms\n" in result.error and "alibi_plain" not in result.error, result.error
    for arm in ("plain", "yarn", "dropped"):
        manifest = Run(Path(f"runs/demo-arms/qk_rope_{arm}/seed=0")).manifest
        assert manifest.continued and manifest.continued["name"] == "demo/qk_rope/seed=0 at step 8"
        assert (manifest.branched_at, manifest.num_steps) == (8, 10)
        assert manifest.identity["train.lr"] == 0.007, "its trunk's, not that of its own name"
        assert manifest.identity["scheme.continued.context_length"] == 64
    assert Run(Path("runs/demo-arms/qk_rope_yarn/seed=0")).config.scheme.options["factor"] == 2
    again = posbench("train", "-m", *words, "scheme=qk_rope")
    assert "1 run, 1 of them already finished\n" in again.error and "3 arms, 3 of them already" in again.error
