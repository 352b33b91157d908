"""The run folder: where it is, what is in it, and how it is read back.

    runs/<experiment>/<scheme>/seed=<n>/
        config.yaml       the configuration, resolved
        run.json          the manifest: status, fingerprints, versions, device, costs, result
        metrics.jsonl     one line per logged step: {"step", "tokens", "kind": "train" | "validation", "loss", ...}
        tokenizer.json    the run's tokenizer, so that the run can be used without its text
        checkpoints/      written while it trains; the last one is the trained model
        eval/<protocol>/<length>.parquet + .json    losses window by window, so that every table cell can be recomputed
    runs/<experiment>.zip, runs/<experiment>.2.zip     finished runs of the experiment, packed (`posbench.runs.pack`)

Files are written under another name and renamed: a reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posbench import scheme_file
from posbench.config import Config, ConfigError, check_name
from posbench.machine.files import remove_leftovers, write_json
from posbench.runs import results
from posbench.runs.manifest import FINISHED, DamagedFile, Manifest, parse
from posbench.runs.results import Damaged, Result, ResultKey

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Tokenizer

    from posbench.model import Decoder


@dataclass(frozen=True)
class Run:
    """One run, named by its folder. Reading is lazy: nothing is opened until it is asked for."""

    path: Path

    @property
    def name(self) -> str:
        """`experiment/scheme/seed=n`, as it stands under the runs folder."""
        return "/".join(self.path.parts[-3:])

    def content(self, name: str) -> bytes:
        """One of the run's files. Raises: DamagedFile where it is missing; ConfigError where it may not be read."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedFile(
                f"{self.path} is not a run: it has no {name} (give a folder such as runs/demo/vo_rope/seed=0; if the "
                f"file was lost, delete the folder {self.path} and train it again)"
            ) from None
        except OSError as error:
            raise _unreadable(self.path / name, error) from error

    @cached_property
    def config(self) -> Config:
        """The resolved configuration. Raises: ConfigError where the file is missing or does not hold one."""
        content, file = self.content("config.yaml"), self.path / "config.yaml"
        try:
            return copy.deepcopy(_parsed(content))
        except ConfigError as error:
            raise ConfigError(
                f"{file} is not a configuration of this posbench: {error}. If another version wrote it, use that one"
            ) from error
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{file} cannot be read ({' '.join(str(error).split())}): restore it from a copy"
            ) from error

    @property
    def manifest(self) -> Manifest:
        """`run.json`. Raises: DamagedFile where it is missing or torn, ConfigError where it is of another format."""
        return parse(self.content("run.json"), self.path / "run.json")

    def write_manifest(self, manifest: Manifest) -> None:
        """Write `run.json` in one step."""
        write_json(self.path / "run.json", asdict(manifest))

    def update_manifest(self, **changes: Any) -> None:
        """Change fields of `run.json` in one step."""
        self.write_manifest(replace(self.manifest, **changes))

    @property
    def is_finished(self) -> bool:
        """Whether training reached its last step."""
        try:
            return self.manifest.status == FINISHED
        except DamagedFile:
            return False

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`. Raises: ConfigError for a line that is not a row."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def initial_loss(self) -> float | None:
        """The validation loss before the first step, nats/token; None where it is not known. Raises: ConfigError."""
        row = next((row for row in self.logged if row.get("kind") == "validation"), {})
        loss = row.get("loss")
        return float(loss) if row.get("step") == 0 and isinstance(loss, int | float) else None

    @property
    def metrics(self) -> pd.DataFrame:
        """`metrics.jsonl`, one row per line. Raises: ConfigError for a line that is not a row."""
        import pandas as pd

        return pd.DataFrame(self.logged)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run was trained with. Raises: ConfigError if its file is missing or another's."""
        from posbench.data.tokenizer import tokenizer_in

        return tokenizer_in(
            self.content("tokenizer.json"), str(self.path / "tokenizer.json"), self.manifest.fingerprints.tokenizer
        )

    def results(self) -> tuple[list[Result], list[Damaged]]:
        """What `eval/` holds, checked, and what lies there and is not a result of this run; both sorted by key."""
        return results.results_of(self)

    def evaluated(self) -> list[ResultKey]:
        """The results that there are by the names of their files, sorted: for an overview, nothing is checked."""
        return results.keys_in(self.path / "eval")

    @property
    def weights(self) -> str | None:
        """The digest of the weights that `load_model` reads."""
        return self.manifest.weights

    @property
    def marks(self) -> tuple[str, ...]:
        """Options by which results of its weights are told from those of the run as it was trained."""
        return ()

    @property
    def has_weights(self) -> bool:
        """True if a checkpoint exists, intact or not, or if the folder cannot be read."""
        from posbench.runs.checkpoint import any_written

        try:
            return any_written(self.path / "checkpoints")
        except OSError:
            return True

    def check_config(self) -> None:
        """Raises: ConfigError where config.yaml is not what `run.json` says the run was trained with."""
        from posbench.runs.fingerprints import changes_in

        changed = changes_in(self.config, self.manifest)
        if changed:
            raise ConfigError(
                f"{self.path / 'config.yaml'} belongs to another run: {'; '.join(changed)}. Restore the run's own"
            )

    def check_scheme_files(self, may_have_changed: bool = False) -> bool:
        """Whether a file with the run's scheme is another one than it was trained with.

        Raises: ConfigError where it is and may not be, where it is missing, or where it may not be imported.
        """
        changed = scheme_file.changed_files(self.manifest.scheme_files)
        if changed and not may_have_changed:
            raise ConfigError(
                f"{changed[0]} has changed since {self.name} was trained: restore it (the run folder has a copy, "
                f"{self.path / Path(changed[0]).name}), or add --scheme-changed to go on with the file as it is now "
                "(results are marked)"
            )
        return bool(changed)

    def load_model(
        self, under: Sequence[str] = (), at_step: int | None = None, scheme_changed: bool = False
    ) -> Decoder:
        """The trained model with the weights of the run's last step, in float32 on the CPU.

        Arguments: under, options of the scheme for this evaluation only, such as `base=1e6`; at_step, the step of an
        older checkpoint; scheme_changed, whether the file of a scheme of one's own may be another one than it was.
        Raises: ConfigError if those weights are missing, damaged or another run's (it lists the intact steps), if the
        configuration is another run's, or if those options change the model's parameters.
        """
        from posbench.model import build_model

        self.check_config()
        self.check_scheme_files(scheme_changed)
        model = build_model(self.config_under(under) if under else self.config, self.manifest.vocab_size)
        self.put_weights(model, at_step)
        return model.eval()

    def put_weights(self, model: Decoder, at_step: int | None = None) -> None:
        """Set the model's weights to those of the run's last step, or of an older one. Raises: ConfigError."""
        from posbench.runs.checkpoint import load_weights

        load_weights(self.path / "checkpoints", model, self.manifest, at_step)

    def config_under(self, options: Sequence[str]) -> Config:
        """The configuration with other options of its scheme, or of its member schemes if it has no such option itself.

        Raises: ConfigError for what is not an option.
        """
        from omegaconf import OmegaConf

        from posbench.composition import checked
        from posbench.schemes import with_option

        results.check_options(options)
        mapping = self.config.to_mapping()
        scheme = mapping["scheme"]
        for option in options:
            changed = OmegaConf.to_container(OmegaConf.from_dotlist([option]))
            assert isinstance(changed, dict)
            if "." in option.partition("=")[0]:
                scheme = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(scheme), OmegaConf.create(changed)))
            else:
                [(name, value)] = changed.items()
                scheme = with_option(scheme, str(name), value)
        return checked({**mapping, "scheme": scheme})

    def refusal_of(self, options: Sequence[str]) -> str | None:
        """Why the scheme has no such options, a sentence; None where it has them."""
        from posbench.schemes import takes_option

        row = self.config.scheme.to_mapping()
        names = [option.partition("=")[0] for option in options]
        lacking = [name for name in names if "." not in name and not takes_option(row, name)]
        if {"rescale", "factor"} & set(lacking):
            return "it has no rotation whose frequencies could be rescaled"
        return f"{lacking[0]} is not an option of this scheme" if lacking else None


# Settings that older runs recorded and posbench no longer has. None of them decides what a run computes.
_REMOVED = {"train": ("cuda_graph",), "launch": ("nproc",)}


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> Config:
    """The configuration in that YAML, not to be changed: a report asks every run for its own several times.

    Raises: ValueError; yaml.YAMLError; ConfigError.
    """
    from posbench.composition import checked

    mapping = yaml.safe_load(content)
    if not isinstance(mapping, dict):
        raise ConfigError("it is no mapping of settings")
    for group, names in _REMOVED.items():
        for name in names:
            mapping.get(group, {}).pop(name, None)
    return checked(mapping)


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{file} cannot be read ({error.strerror or error}): check its permissions and its disk")


def run_folder(config: Config) -> Path:
    """`runs_dir/experiment/scheme/seed=n`. Raises: ConfigError for names that lead elsewhere."""
    for what, name in (("experiment_name", config.experiment_name), ("scheme.name", config.scheme.name)):
        check_name(what, name)
    return Path(config.runs_dir) / config.experiment_name / config.scheme.name / f"seed={config.seed}"


def append_metrics(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line to `metrics.jsonl` in a single write, so that a kill leaves whole lines or none."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a last line that was never finished; none where there is no file.

    Raises: ConfigError for a line that is not a row, and where the file may not be read.
    """
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n") if path.is_file() else (b"", b"", b"")
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        _ = [(row["step"], row["tokens"], row["kind"]) for row in rows]
        return rows
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} has a line that is not a row of metrics: the file is damaged") from None


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left in a run folder, `.*.tmp`. Only under its lock, and before it is finished."""
    for place in (folder, folder / "checkpoints", *folder.glob("eval/*")):
        remove_leftovers(place, older_than_seconds=0)
