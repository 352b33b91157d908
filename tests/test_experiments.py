"""Every experiment of `conf/experiment` composes; a large one and a trunk train two steps when shrunk."""

import pytest

from posbench import compose
from posbench.analysis.published import load_published
from posbench.catalogue.choices import choices, conf_dir
from posbench.composition.sweep import sweep_of

EXPERIMENTS = [name for name in choices("experiment") if name != "task"]  # of one task, whose name it takes


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
