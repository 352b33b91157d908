"""An error of a user's own file names the key, the file and the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posbench import compose
from posbench.config import ConfigError

HEAD = "# @package _global_\nexperiment:\n  name: mine\n"


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("experiment/mine", HEAD + "train:\n  lrr: 3\n", r"'train\.lrr'; did you mean 'train\.lr'.*, line 5\)$"),
        ("experiment/mine", HEAD + "train:\n  lr: fast\n", r"^train\.lr is refused: 'fast' is .*\(.*, line 5\)$"),
        ("experiment/mine", HEAD + "train: {lr: -3}\n", r"^train\.lr=-3\.0 is out of .*, line 4\)$"),
        ("experiment/mine", HEAD + "  source: ${no.where}\n", r"^experiment\.source is .*no\.where.*, line 4\)$"),
        ("experiment/mine", HEAD + "seed: [1\n", r"mine\.yaml is not a choice: line 5: .*expected ',' or '\]'"),
        ("tracking/mine", "backend: none\ninit_timeout: 7e3\n", r"^tracking\.init_timeout=7.*mine\.yaml, line 2\)$"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_found_by_its_message(tmp_path: Path, file: str, text: str, says: str) -> None:
    path = tmp_path / f"{file}.yaml"
    path.parent.mkdir()
    path.write_text(text)
    words = [f"--config-dir={tmp_path}", f"{path.parent.name}=mine"]
    with pytest.raises(ConfigError) as refused:
        compose(words)
    assert re.search(says, str(refused.value)) and str(path) in str(refused.value), refused.value


def test_a_value_of_the_command_line_is_not_looked_for_in_files(tmp_path: Path) -> None:
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking/mine.yaml").write_text("init_timeout: 5\n")
    with pytest.raises(ConfigError, match=r"and 600$"):
        compose([f"--config-dir={tmp_path}", "tracking=mine", "tracking.init_timeout=7000"])


def test_where_choices_of_ones_own_go_is_said() -> None:
    with pytest.raises(ConfigError, match=r"model=mine does not exist.*FOLDER/model and give --config-dir FOLDER\)"):
        compose(["model=mine"])
