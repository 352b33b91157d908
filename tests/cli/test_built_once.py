"""A command builds the scheme once, and a kind of attention once per layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from posbench.attention import KINDS, Softmax
from posbench.catalogue import own_files
from posbench.schemes import Shape
from tests.cli.commands import Give

LAYERS = 2  # of model=tiny
COUNTED = """\
from pathlib import Path
from posbench.schemes import Scheme


class Once(Scheme):
    def __init__(self, shape):
        super().__init__(shape)
        with Path("schemes.txt").open("a") as file:
            file.write("built\\n")

    def flops_per_token(self, length):
        return 0.0  # stated, so that `train` counts them


class PerLayer(Once):
    per_layer = True
"""


class CountedSoftmax(Softmax):
    """Softmax attention that records each construction."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        with Path("kinds.txt").open("a") as file:
            file.write("built\n")


@pytest.mark.slow
@pytest.mark.parametrize("name, schemes", [("Once", 1), ("PerLayer", LAYERS)])
def test_train_eval_and_plan_call_each_constructor_once(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch, name: str, schemes: int
) -> None:
    monkeypatch.setattr(own_files, "_trusted", set())
    monkeypatch.setitem(KINDS, "counted", CountedSoftmax)  # type: ignore[index]
    Path("counted.py").write_text(COUNTED)
    words = [f"scheme=./counted.py:{name}", "+scheme.attention={kind: counted}", "experiment_name=mine", *short]
    for command in (["train", *words], ["eval", "mine", "--length", "64,96"], ["eval", "mine"], ["plan", *words]):
        result = posbench(*command)
        assert result.status == 0, result.error
        built = [len(Path(file).read_text().splitlines()) for file in ("schemes.txt", "kinds.txt")]
        assert built == [schemes, LAYERS], command
        for file in ("schemes.txt", "kinds.txt"):
            Path(file).unlink()
