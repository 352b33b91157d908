"""A scheme of another package, installed beside posbench: an entry point, and a YAML in the user's own folder."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

import posbench
import posbench.schemes
from posbench.config import ConfigError, SchemeConfig
from posbench.machine import plugins
from posbench.reference import DEFINITIONS, Definition
from posbench.schemes import SCHEMES, Scheme, Shape, build_scheme, rotary
from posbench.verify import certificate_config, certify

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-scheme.md"


def block(language, number=0):
    """A block of code of that language in docs/adding-a-scheme.md."""
    return GUIDE.read_text().split(f"```{language}\n")[1 + number].partition("```")[0]


@pytest.mark.slow
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

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "posbench", *words],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    composed = run("train", "scheme=near", "--config-dir", str(own.parent), "--cfg", "job")
    assert composed.startswith("scheme:\n  name: near\n  kind: distance_bias\n  distances: 32\n")
    folder = ("--config-dir", str(own.parent))
    assert "near: posbench/reference" in run("verify", "near", *folder)
    assert "A learned bias for each distance" in next(
        line for line in run("schemes", *folder).splitlines() if line.startswith("near ")
    )
    without_file = ["nope", "scheme.name=near", "scheme.kind=distance_bias", "+scheme.distances=24"]
    verified = run("verify", *without_file)
    assert "\nnear   rel" in verified
    assert "near: posbench/reference has no definition of this kind" in verified  # and verify does not pretend to
    assert "1 scheme: every certificate holds" in verified
    assert "distance_bias" in run("schemes").splitlines()[-2]


def guide_class(name, number, change=lambda code: code):
    scope = {}
    exec(change(block("python", number)), scope)
    return scope[name]


def measured(monkeypatch, kind):
    """The certificates of a class, by their names, and whether all hold."""
    monkeypatch.setitem(SCHEMES, "mine", kind)
    row = certify(certificate_config("nope", ["scheme.name=mine", "scheme.kind=mine"]))
    return {check.name: check.holds for check in row.checks}, row.holds


def test_the_guides_rotary_scheme_holds_and_what_it_warns_of_fails(monkeypatch):
    assert measured(monkeypatch, guide_class("PartialRope", 1))[1]

    def with_rotate(code):
        code = code.replace("return Turn(angles.cos(), angles.sin())", "return angles")
        return code.replace("turn(first, pos)", "rotate(first, pos)").replace("import Turn", "import rotate, Turn")

    checks, holds = measured(monkeypatch, guide_class("PartialRope", 1, with_rotate))
    assert not holds and not checks["fp32"], "docs/adding-a-scheme.md says so"
    assert posbench.schemes.turn is rotary.turn and posbench.schemes.Turn is rotary.Turn


def test_the_guides_definition_certifies_the_guides_class(monkeypatch):
    monkeypatch.setitem(SCHEMES, "distance_bias", guide_class("DistanceBias", 0))
    monkeypatch.setitem(DEFINITIONS, "distance_bias", guide_class("DefinedDistanceBias", 2))
    config = certificate_config("nope", ["scheme.name=mine", "scheme.kind=distance_bias", "+scheme.distances=20"])
    row = certify(config)
    assert row.defined and row.holds
    monkeypatch.setitem(DEFINITIONS, "distance_bias", Definition)  # NoPE, which the class is not once it has learned
    assert not certify(replace(config, scheme=SchemeConfig("mine", "distance_bias")))["fp64"].holds


OLD_FORMS = {
    "bias": (lambda self, head, i, j: 0.0, r"bias\(self, head, i, j\) .* it is bias\(self, q, gate, at\) now"),
    "prepare": (lambda self, pos: pos, r"prepare\(self, pos\) .* it is prepare\(self, pos, length\) now"),
}


@pytest.mark.parametrize("hook", OLD_FORMS)
def test_a_plugin_of_the_old_form_is_shown_the_new_one(hook, monkeypatch):
    method, says = OLD_FORMS[hook]
    module = ModuleType("old_package")
    module.Old = type("Old", (Scheme,), {hook: method, "__module__": "old_package"})
    monkeypatch.setitem(sys.modules, "old_package", module)
    with pytest.raises(ConfigError, match=rf"old_package\.Old\.{says}.*adding-a-scheme"):
        build_scheme(plugin(monkeypatch, "old", "old_package:Old"), Shape(64, 4, 4, 16))


def plugin(monkeypatch, name, value):
    monkeypatch.setitem(SCHEMES, name, EntryPoint(name, value, "posbench.schemes"))
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
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=f"kind '{taken}', but that name is taken: rename it"):
        plugins.Registry("position scheme kind", "posbench.schemes", Scheme, {"rotary": rotary.Rotary})


def test_an_unknown_kind_is_answered_with_how_to_add_one_and_plugins_are_listed_unimported(monkeypatch):
    says = (
        r"scheme\.kind='mine' is not known.* install a package that names it under the entry-point group posbench\.sch"
    )
    with pytest.raises(ConfigError, match=says):
        build_scheme(SchemeConfig("mine", "mine"), Shape(64, 4, 4, 16))
    plugin(monkeypatch, "later", "no_such_package:Thing")
    assert "later" in SCHEMES and "later" in list(SCHEMES), "not imported"
