"""A scheme of another package, installed beside posbench: an entry point, and a YAML in the user's own folder."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import posbench
import posbench.schemes
from posbench.config import ConfigError, SchemeConfig
from posbench.schemes import SCHEMES, Shape, build_scheme

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-scheme.md"

TRIAL = """
import sys
from rich.console import Console
import posbench
from posbench.verify import verify

folder = f"hydra.searchpath=[file://{sys.argv[1]}]"
print(list(posbench.SCHEMES)[-1], posbench.SCHEMES["distance_bias"].__module__)
config = posbench.compose(["scheme=near", "model=tiny", folder])
print(config.scheme)
print(posbench.build_model(config, 64).scheme.table.shape)
print("holds" if verify(["near", folder], Console(width=200)) else "fails")
"""


def block(language):
    """The first block of code of that language in docs/adding-a-scheme.md."""
    return GUIDE.read_text().partition(f"```{language}\n")[2].partition("```")[0]


def test_the_guides_scheme_works_from_an_installed_package_and_a_folder_of_ones_own(tmp_path):
    package, own = tmp_path / "site" / "my_package", tmp_path / "own" / "scheme"
    info = tmp_path / "site" / "my_package-1.0.dist-info"
    for folder in (package, own, info):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "distance_bias.py").write_text(block("python"))
    points = tomllib.loads(block("toml"))["project"]["entry-points"]["posbench.schemes"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join(["[posbench.schemes]", *(f"{name} = {value}" for name, value in points.items())])
    )
    (own / "near.yaml").write_text(block("yaml").replace("name: distance_bias", "name: near"))

    paths = os.pathsep.join([str(package.parent), str(Path(posbench.__file__).parents[1])])
    trial = subprocess.run(
        [sys.executable, "-c", TRIAL, str(own.parent)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert trial.returncode == 0, trial.stderr
    said = trial.stdout.splitlines()
    assert said[0] == "distance_bias my_package.distance_bias"
    assert said[1] == "SchemeConfig(name='near', kind='distance_bias', options={'distances': 32})"
    assert said[2] == "torch.Size([32, 4])"
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
