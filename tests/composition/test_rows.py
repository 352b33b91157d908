"""A scheme made of other schemes names rows of conf/scheme, and its configuration contains them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posbench import compose
from posbench.composition import checked
from posbench.sweep import run_application
from posbench.config import Config, ConfigError

NOPE = {"name": "nope", "kind": "nope"}
QK = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"], "base": 10000.0}
MINE = {"name": "mine", "kind": "rotary", "sites": ["v"], "base": 32}

ROWS = {
    "mine": "name: mine\nkind: rotary\nsites: [v]\nbase: ${train.context_length}\n",
    "mixed": "name: mixed\nkind: layered\nlayers: [qk_rope, qk_rope, mine, {name: x, kind: y, of: [nope, 3]}]\n",
    "nested": "name: nested\nkind: sum\nof: [mixed, nope]\n",
    "derived": "defaults: [mixed, _self_]\nname: derived\nlayers: [nope]\n",
    "unknown": "name: unknown\nkind: sum\nof: [qk_rpe]\n",
    "outside": "name: outside\nkind: sum\nof: [../model/tiny]\n",
    "own": "name: own\nkind: sum\nof: [nope, own]\n",
    "one": "name: one\nkind: sum\nof: [two]\n",
    "two": "name: two\nkind: layered\nlayers: [nope, one]\n",
    "target": "name: target\nkind: sum\nof: [{name: x, kind: nope, _target_: evil.run}]\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "scheme").mkdir()
    for name, text in ROWS.items():
        (tmp_path / "scheme" / f"{name}.yaml").write_text(text)
    return f"--config-dir={tmp_path}"


def trained(*words: str) -> Config:
    """The config that `posbench train` would train."""
    configs: list[Config] = []
    run_application("posbench train", list(words), configs.append, print)
    return configs[0]


def test_names_become_rows_and_mappings_stay(folder: str) -> None:
    words = ["scheme=mixed", "train.context_length=32", folder]
    options = {"layers": [QK, QK, MINE, {"name": "x", "kind": "y", "of": [NOPE, 3]}]}
    for config in (compose(words), trained(*words), trained("-m", *words, "seed=0", "hydra/launcher=basic")):
        assert (config.scheme.kind, config.scheme.options) == ("layered", options)


def test_rows_are_nested_derived_and_given_as_words(folder: str) -> None:
    of = compose(["scheme=nested", "train.context_length=32", folder]).scheme.options["of"]
    assert [part["name"] for part in of] == ["mixed", "nope"] and of[0]["layers"][2] == MINE
    assert compose(["scheme=derived", folder]).scheme.options == {"layers": [NOPE]}
    assert compose(["scheme=mixed", "scheme.layers=[qk_rope,nope]", folder]).scheme.options == {"layers": [QK, NOPE]}
    assert compose(["scheme=nope", "+scheme.of=[qk_rope]"]).scheme.options == {"of": [QK]}


def test_what_is_written_to_a_run_folder_needs_no_other_file(folder: str) -> None:
    config = compose(["scheme=nested", folder])
    assert checked(yaml.safe_load(yaml.safe_dump(config.to_mapping()))) == config


@pytest.mark.parametrize(
    "scheme, says",
    [
        ("unknown", r"scheme\.of names 'qk_rpe', which is not a scheme; did you mean 'qk_rope'\?"),
        ("outside", r"scheme=\.\./model/tiny cannot be the name of a choice"),
        ("own", r"the scheme 'own' contains itself: own -> own"),
        ("one", r"the scheme 'two' contains itself: two -> one -> two"),
        ("target", r"names code to run"),
    ],
)
def test_a_row_that_is_unknown_or_contains_itself_is_refused(folder: str, scheme: str, says: str) -> None:
    for ask in (compose, lambda words: trained(*words)):
        with pytest.raises(ConfigError, match=says):
            ask([f"scheme={scheme}", folder])
