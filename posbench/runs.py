"""The run folder: where it is, what is in it, and how it is read back.

    runs/<experiment>/<scheme>/seed=<n>/
        config.yaml       the configuration, resolved
        run.json          the manifest: status, fingerprints, versions, device, costs, result
        metrics.jsonl     one line a logged step: {"step", "tokens", "kind": "train" | "validation", "loss", ...}
        tokenizer.json    what made the tokens, so that a run can be read without the text
        checkpoints/      while it trains; the last one is the model
        eval/<protocol>/<length>.parquet + .json    losses window by window, so that every table cell can be recomputed

Files are written beside and renamed: a reader sees the old one or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posbench.config import Config, ConfigError, check_name

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Tokenizer

    from posbench.model import Decoder

FORMAT = 1  # of the run folder; a reader refuses a newer one
FINISHED, RUNNING, STOPPED, DIED = "finished", "running", "stopped", "died"


def write_text(path: Path, text: str) -> None:
    """Write beside, sync, rename: `path` holds the old text or the new, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(content, indent=2, sort_keys=False, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Run:
    """One run, named by its folder. Reading is lazy: nothing is opened until it is asked for."""

    path: Path

    @property
    def name(self) -> str:
        """`experiment/scheme/seed=n`, as it stands under the runs folder."""
        return "/".join(self.path.parts[-3:])

    @cached_property
    def config(self) -> Config:
        """The resolved configuration. Raises: ConfigError where the file is missing or does not hold one."""
        from omegaconf import OmegaConf

        from posbench.composition import typed

        file = self.path / "config.yaml"
        try:
            mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} is no run: it holds no config.yaml (give a folder such as runs/demo/vo_rope/seed=0)"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{file} cannot be read ({str(error).splitlines()[0]}): delete the folder and train the run again"
            ) from error
        if not isinstance(mapping, dict):
            raise ConfigError(f"{file} holds no configuration: delete the folder and train the run again")
        return typed(OmegaConf.create(mapping))

    @property
    def manifest(self) -> dict[str, Any]:
        """`run.json`. Raises: ConfigError where it is missing, torn, or of a newer format."""
        file = self.path / "run.json"
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} is no run: it holds no run.json (give a folder such as runs/demo/vo_rope/seed=0)"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): delete the folder and train the run again") from error
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            raise ConfigError(f"{file} holds no manifest: delete the folder and train the run again")
        if manifest["format"] > FORMAT:
            raise ConfigError(
                f"{file} is of format {manifest['format']}; this posbench reads up to {FORMAT}: upgrade posbench"
            )
        return manifest

    def update_manifest(self, **changes: Any) -> None:
        """Change keys of `run.json` in one step."""
        write_json(self.path / "run.json", {**self.manifest, **changes})

    @property
    def is_finished(self) -> bool:
        """Whether training reached its last step."""
        return (self.path / "run.json").is_file() and self.manifest.get("status") == FINISHED

    @property
    def metrics(self) -> pd.DataFrame:
        """`metrics.jsonl`, one row a line."""
        import pandas as pd

        file = self.path / "metrics.jsonl"
        return pd.read_json(file, lines=True) if file.is_file() and file.stat().st_size else pd.DataFrame()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run was trained with."""
        from posbench.data.tokenization import load_tokenizer

        return load_tokenizer(self.path / "tokenizer.json")

    def load_model(self) -> Decoder:
        """The trained model, in float32 on the CPU. Raises: ConfigError where there is no intact checkpoint."""
        from posbench.model import build_model
        from posbench.training.checkpoint import load_weights

        model = build_model(self.config, self.manifest["vocab_size"])
        load_weights(self.path / "checkpoints", model)
        return model.eval()


def run_folder(config: Config) -> Path:
    """`runs_dir/experiment/scheme/seed=n`. Raises: ConfigError for names that could leave the runs folder."""
    for what, name in (("experiment_name", config.experiment_name), ("scheme.name", config.scheme.name)):
        check_name(what, name)
    return Path(config.runs_dir) / config.experiment_name / config.scheme.name / f"seed={config.seed}"


def load_run(path: str | Path) -> Run:
    """The run in this folder. Raises: ConfigError where there is none."""
    run = Run(Path(path))
    _ = run.manifest
    return run


def find_runs(folder: str | Path) -> list[Run]:
    """Every run at or under `folder`, in the order of their names."""
    root = Path(folder)
    return [Run(file.parent) for file in sorted(_manifests(root))]


def _manifests(root: Path) -> Iterator[Path]:
    if (root / "run.json").is_file():
        yield root / "run.json"
    elif root.is_dir():
        for child in root.iterdir():
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _manifests(child)


def append_metrics(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line to `metrics.jsonl` in a single write, so that a kill leaves whole lines or none."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
