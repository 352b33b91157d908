"""Every experiment of `conf/experiment` composes; a large one and a trunk train two steps when shrunk."""

import pytest

from posbench import compose
from posbench.analysis.published import load_published
from posbench.catalogue.choices import choices, conf_dir
from posbench.composition.sweep import sweep_of
from posbench.training import train

EXPERIMENTS = [name for name in choices("experiment") if name != "task"]  # of one task, whose name it takes
SHRUNK = [
    *("model.num_layers=1", "model.d_model=32", "model.num_heads=4", "model.head_dim=8", "model.ffn_dim=32"),
    *(
        "train.steps=2",
        "train.branch_tokens=[]",
        "train.context_length=32",
        "train.batch_size=2",
        "train.accumulation=1",
        "train.compile=false",
    ),
    *("tokenizer=bytes", "tracking=none", "train.validation_tokens=64", "evaluation.max_tokens=256"),
    *("data.validation_fraction=0.3", "data.test_fraction=0.3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_says_what_it_is(name):
    config = compose([f"experiment={name}"])
    swept = sweep_of([f"experiment={name}"])
    assert config.experiment.name == name and config.experiment.description
    assert set(swept["scheme"]) <= set(choices("scheme")) and swept["seed"]
    arms = []
    for scheme, words in (config.train.arms or {}).items():
        arms += [f"{scheme}_{arm}" for arm in words if scheme != "every"]
    assert config.experiment.baseline in [*swept["scheme"], *arms]
    assert (
        config.experiment.published is None
        or load_published(config.experiment.published).name == config.experiment.published
    )
    assert (
        (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").startswith("# @package _global_\n# ")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kexue_1b", "ladder_m"])
def test_two_steps_of_it_shrunk(name, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for n in range(20):
        (text / f"{n}.txt").write_text(" ".join(f"word{n * i % 97}" for i in range(200)), encoding="utf-8")
    words = [f"data.path={text}", f"data.cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}/runs"]
    run = train(compose([f"experiment={name}", "data=files", *SHRUNK, *words]))
    assert run.is_finished and run.manifest.experiment == name and run.manifest.num_steps == 2
