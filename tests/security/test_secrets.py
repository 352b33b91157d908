"""No credential of the environment reaches a file, a terminal or a message."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench import ConfigError, compose
from posbench.sweep import sweep_of
from tests.cli.commands import Give

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "wandbkey",
    "HF_TOKEN": "hf_" + "Q7x" * 12,
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "OPENAI_API_KEY": "sk-proj-abcdefghijklmnopqrstuvwxyz",
    "GITHUB_TOKEN": "ghp_" + "a1B2" * 9,
    "DATABASE_PASSWORD": "correct horse battery staple",
}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)


def clean(folder: Path) -> int:
    """How many files there are, after every byte of each was searched."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for file in files:
        content = file.read_bytes()
        for name, secret in SECRETS.items():
            assert secret.encode() not in content, (file, name)
    return len(files)


@pytest.mark.slow
def test_nothing_that_training_evaluation_and_reports_write_holds_a_secret(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a recording of wandb too, made offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [word for word in short if not word.startswith(("tracking=", "data.cache_dir="))]
    words += [f"data.cache_dir={tmp_path}/here/cache", "tracking=wandb"]
    for command in (
        ["train", "-m", *words, "scheme=nope,vo_rope", "seed=0,1", "hydra/launcher=basic"],
        ["eval", "demo", "--length", "64"],
        ["report", "demo"],
        ["compare", "demo/nope/seed=0", "demo/vo_rope/seed=0"],
        ["train", *words, "scheme=nope", "seed=2", "train.lr=nan"],
    ):
        said = posbench(*command)
        assert said.status == (2 if "train.lr=nan" in command else 0), said.error
        assert not [name for name, secret in SECRETS.items() if secret in said.out + said.error]
    assert len(list(Path("runs").rglob("*.wandb"))) >= 4, "recordings are searched too"
    assert clean(tmp_path) > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        *(f"experiment.description='{secret}'" for secret in SECRETS.values()),
        f"experiment.source='see {SECRETS['HF_TOKEN']} there'",
        "data.path='https://user:hunter2hunter2@example.org/x.txt'",
        "data.path='s3://AKIAIOSFODNN7EXAMPLE:hunter2hunter2@bucket/x'",
        "runs_dir='https://user:hunter2hunter2@example.org/'",
        "tracking.entity='user:hunter2@host://x:hunter2hunter2@y'",
        "experiment.description=${oc.env:WANDB_API_KEY}",
        "experiment.description='${oc.env:${experiment.source}}'",
        r"experiment.description=\${oc.env:WANDB_API_KEY}",
        "experiment_name=${oc.env:GITHUB_TOKEN}",
        "scheme.name=${oc.env:GITHUB_TOKEN}",
        "+scheme.note=${oc.env:GITHUB_TOKEN}",
    ],
    ids=lambda word: re.sub(r"\W+", "_", word)[:40],
)
@pytest.mark.parametrize("flag", [[], ["-m"]], ids=["run", "sweep"])
def test_a_credential_among_the_words_is_refused_and_not_shown(
    posbench: Give, short: list[str], word: str, flag: list[str], tmp_path: Path
) -> None:
    said = posbench("train", *flag, *short, "scheme=nope", "seed=0", word)
    assert said.status == 2
    assert clean(tmp_path) == 0
    shown = said.out + said.error
    assert "hunter2hunter2" not in shown and "no override" not in shown
    assert not [name for name, secret in SECRETS.items() if secret in shown]


def test_addresses_with_a_password_are_refused_as_a_repository(posbench: Give, short: list[str]) -> None:
    kept = [word for word in short if not word.startswith("data")]
    for address in ("https://user:hunter2hunter2@host/owner/name", "../..", "owner/../..", "/owner/name", "-x/-y"):
        refusal = posbench("train", *kept, "data=fineweb_edu", f"data.repository='{address}'").refusal
        assert "data.repository" in refusal and "hunter2" not in refusal


def test_settings_are_printed_without_looking_anything_up(posbench: Give) -> None:
    said = posbench("train", "--cfg", "job", "--resolve", "experiment.description=${oc.env:WANDB_API_KEY}")
    assert said.status == 2 and SECRETS["WANDB_API_KEY"] not in said.out + said.error
    assert os.environ["WANDB_API_KEY"]


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], list[str]]:
    """The words that choose an experiment of a folder of somebody's, with these settings of Hydra's."""

    def experiment(hydra: str) -> list[str]:
        file = tmp_path / "own/experiment/mine.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"# @package _global_\nexperiment: {{name: mine}}\nhydra: {hydra}\n")
        return [f"--config-dir={tmp_path}/own", "experiment=mine"]

    return experiment


# Variables of no telling name, and values of no telling form.
PLAIN = {"PGPASSWORD": "hunter2hunter2", "GITHUB_PAT": "abcdef0123456789xyz", "THING": "correct horse"}


@pytest.mark.parametrize("name", PLAIN)
def test_the_value_of_any_variable_is_refused_and_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PLAIN[name])
    for word in (
        f"experiment.description='of {PLAIN[name]}.'",
        f"experiment_name='{PLAIN[name]}!'",
        f"+scheme.x='{PLAIN[name]}'",
    ):
        with pytest.raises(ConfigError, match=rf"value of {name} in the environment.*env -u {name}") as refused:
            compose([word])
        assert PLAIN[name] not in str(refused.value)


def test_variables_that_are_no_secret_may_stand_in_a_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user's name, folders, and what `make reproduce-table EXPERIMENT=...` leaves in the environment."""
    values = {
        "USER": "ada-lovelace",
        "BOOKS": f"{tmp_path}/not/yet",
        "WHERE": f"{tmp_path}/a{os.pathsep}{tmp_path}/b",
        "CHOSEN": "alibi_wikitext103",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
        assert value in compose([f"experiment.description='see {value}'"]).experiment.description


@pytest.mark.parametrize(
    "value",
    [
        "'${oc.env:PGPASSWORD}'",
        "'x-${oc.env:PGPASSWORD}'",
        "${oc.env:PGPASSWORD}",
        "${hydra:runtime.cwd}",
        "${hydra.runtime.cwd}",
        "${...runtime.cwd}",
    ],
)
def test_a_sweep_of_a_file_looks_nothing_up(own: Callable[[str], list[str]], value: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PGPASSWORD", PLAIN["PGPASSWORD"])
    words = own(f'{{sweeper: {{params: {{experiment_name: "{value}"}}}}}}')
    with pytest.raises(ConfigError, match=r"hydra.sweeper.params.experiment_name=.*would look a value up") as refused:
        sweep_of(words)
    assert PLAIN["PGPASSWORD"] not in str(refused.value)


def test_hydra_copies_no_variable(own: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PLAIN["PGPASSWORD"])
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_copy=.*remove it") as refused:
        sweep_of(own("{job: {env_copy: [PGPASSWORD]}}"))
    assert PLAIN["PGPASSWORD"] not in str(refused.value)


def test_a_message_that_repeats_what_was_typed_shows_no_secret(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PLAIN["PGPASSWORD"])
    for words in (["train", f"train.lr={PLAIN['PGPASSWORD']}"], ["report", PLAIN["PGPASSWORD"]]):
        said = posbench(*words)
        assert said.status == 2 and "[removed]" in said.error and PLAIN["PGPASSWORD"] not in said.out + said.error
