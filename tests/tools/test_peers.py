"""The benchmark beside other libraries times the step that training takes, at the speed that training has."""

import subprocess
import sys

import pytest
import torch

from benchmarks import peers
from posbench.training.optimizers import AdamW, Muon

# In its own process: threads that other tests have started change the speed of OpenMP. The fastest rounds count,
# because other processes only slow a step. Rounds alternate, so that others slow both.
SCRIPT = """
import torch
from benchmarks import peers
from benchmarks.shapes import SHAPES, config_of
from posbench import build_model
from posbench.system.device import choose_device
from posbench.tools.bench import TimedScheme

torch.set_num_threads(2)
shape = SHAPES["ladder_l"]
config = config_of(shape, "qk_rope", "float32", False)
timed = TimedScheme(config, choose_device(config.train), build_model(config, shape.vocab))
alone = beside = 0
for _ in range(9):
    alone = max(alone, timed.rate(4))
    result = peers.compare("ladder_l", "float32", [False], 1, 4, "posbench qk_rope", keep=True)
    beside = max(beside, result["contenders"]["posbench qk_rope"]["most"])
print(beside / alone)
"""


@pytest.mark.parametrize(("optimizer", "ours"), [("adamw", AdamW), ("muon", Muon)])
def test_all_contenders_have_the_optimizer_that_the_table_names(optimizer, ours, capsys):
    makers, compare = {}, peers.contenders

    def kept(*arguments):
        makers.update(compare(*arguments))
        return makers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "contenders", kept)
        only = "posbench qk_rope,plain GPT-2,transformers Llama"
        result = peers.compare("tasks", "float32", [False], 1, 1, only, keep=False, optimizer=optimizer)
    assert result["failed"] == {} and len(makers) == 3
    peers.show(result)
    assert f"all contenders are trained by {optimizer}\n" in capsys.readouterr().out
    assert type(makers["posbench qk_rope"]().training_step.optimizer) is ours
    layers, matrices = 2, {"plain GPT-2": 4, "transformers Llama": 7}  # of a layer
    for name, number in matrices.items():
        theirs = makers[name]()
        of_muon = [o for o in theirs.optimizers if isinstance(o, torch.optim.Muon)]
        trained = [len(o.param_groups[0]["params"]) for o in of_muon]
        assert trained == ([layers * number] if optimizer == "muon" else [])
        total = [p for o in theirs.optimizers for group in o.param_groups for p in group["params"]]
        assert {id(p) for p in total} == {id(p) for p in theirs.model.parameters()}
        assert len(total) == len({id(p) for p in total})


@pytest.mark.slow
def test_it_measures_what_training_does():
    """While the threads that had drawn weights stayed alive, the ratio was 0.5."""
    ratio = float(subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout)
    assert ratio > 0.7
