"""`posbench bench` times schemes, and optimizers if several are named."""

from posbench.system.console import console
from posbench.tools.bench import bench, contenders


def test_each_scheme_is_timed_with_each_optimizer():
    assert contenders(["model=tiny"], ["nope"]) == {"nope": ["model=tiny", "scheme=nope"]}
    words = ["train.optimizer=adamw,muon", "model=tiny"]
    assert contenders(words, ["nope", "alibi"]) == {
        f"{scheme} {optimizer}": ["model=tiny", f"train.optimizer={optimizer}", f"scheme={scheme}"]
        for scheme in ("nope", "alibi")
        for optimizer in ("adamw", "muon")
    }
    sizes = ["model.num_layers=1", "train.context_length=16", "train.batch_size=2", "train.compile=false"]
    timed = bench([*words, *sizes], ["nope"], 1, 1, console(quiet=True))
    assert list(timed) == ["nope adamw", "nope muon"] and timed["nope muon"]["step_to_first"] > 0
