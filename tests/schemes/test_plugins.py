"""A scheme of another package, installed beside posbench: an entry point, and a YAML in the user's own folder."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import posbench
import posbench.schemes
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes import SCHEMES, Shape, build_scheme

MODULE = '''
import torch
from posbench.schemes import Scheme, Shape


class Buckets(Scheme):
    """A learned bias for each distance up to `distances`, of each head its own."""

    def __init__(self, shape: Shape, distances: int = 16) -> None:
        super().__init__(shape)
        self.table = torch.nn.Parameter(torch.zeros(distances, shape.num_heads))

    def bias(self, head, i, j):
        return self.table[(i - j).clamp(0, len(self.table) - 1), head]
'''

TRIAL = """
import sys
from rich.console import Console
import posbench
from posbench.verify import verify

own = sys.argv[1]
print(list(posbench.SCHEMES)[-1], posbench.SCHEMES["buckets"].__module__)
words = [f"hydra.searchpath=[file://{own}]"]
config = posbench.compose(["scheme=near", "model=tiny", *words])
print(config.scheme)
print(posbench.build_model(config, 64).scheme.table.shape)
print("holds" if verify(["near"], Console(width=200), words) else "fails")
"""


def test_an_installed_package_brings_a_scheme_of_its_own(tmp_path):
    site, own = tmp_path / "site", tmp_path / "own"
    (site / "posbench_buckets").mkdir(parents=True)
    (site / "posbench_buckets" / "__init__.py").write_text(MODULE)
    info = site / "posbench_buckets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: posbench-buckets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posbench.schemes]\nbuckets = posbench_buckets:Buckets\n")
    (own / "scheme").mkdir(parents=True)
    (own / "scheme" / "near.yaml").write_text("name: near\nkind: buckets\ndistances: 24\n")

    checkout = str(Path(posbench.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), checkout]), "OMP_NUM_THREADS": "1"}
    trial = subprocess.run(
        [sys.executable, "-c", TRIAL, str(own)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert trial.returncode == 0, trial.stderr
    said = trial.stdout.splitlines()
    assert said[0] == "buckets posbench_buckets"
    assert said[1] == "SchemeConfig(name='near', kind='buckets', options={'distances': 24})"
    assert said[2] == "torch.Size([24, 4])"
    assert "has no definition of this kind" in trial.stdout  # verify does not pretend to know it
    assert said[-1] == "holds"


def plugin(monkeypatch, name, value):
    monkeypatch.setitem(SCHEMES._plugins, name, EntryPoint(name, value, "posbench.schemes"))
    return SchemeConfig("mine", name)


@pytest.mark.parametrize(
    "value, says",
    [
        (
            "no_such_package:Thing",
            r"no_such_package:Thing of another package, which fails to import \(ModuleNotFoundError",
        ),
        ("json:NoSuchThing", r"fails to import \(AttributeError"),
        ("json:dumps", r"is <function dumps at .*>, not a subclass of posbench\.schemes\.Scheme"),
        ("json:JSONEncoder", r"not a subclass of posbench\.schemes\.Scheme"),
    ],
)
def test_a_broken_plugin_is_named_and_harms_no_other_scheme(value, says, monkeypatch):
    config = plugin(monkeypatch, "broken", value)
    shape = Shape(64, 4, 4, 16)
    build_scheme(SchemeConfig("mine", "nope"), shape)
    with pytest.raises(ConfigError, match=says):
        build_scheme(config, shape)


@pytest.mark.parametrize("names, taken", [(["rotary"], "rotary"), (["mine", "mine"], "mine")])
def test_a_name_that_is_taken_is_refused(names, taken, monkeypatch):
    points = [EntryPoint(name, f"package_{n}:Thing", "posbench.schemes") for n, name in enumerate(names)]
    monkeypatch.setattr(posbench.schemes, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=f"kind '{taken}', which is taken: rename it"):
        posbench.schemes._Registry()
