"""Read and write run folders.

runs/<experiment>/<scheme>/seed=<n>/
    config.yaml       the configuration, resolved
    run.json          the manifest: status, fingerprints, versions, device, costs, result
    metrics.jsonl     one line per logged step: {"step", "tokens", "kind": "train" | "validation", "loss", ...}
    tokenizer.json    the run's tokenizer, so that the run can be used without its text
    checkpoints/      written during training; the last one is the trained model
    eval/<protocol>/<length>.parquet + .json    losses per window, so that every table cell can be recomputed
runs/<experiment>.zip, runs/<experiment>.2.zip     finished runs of the experiment, packed (`posbench.runs.pack`)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posbench.catalogue import own_files
from posbench.config import Config, ConfigError
from posbench.runs.manifest import FINISHED, DamagedFile, Manifest, parse
from posbench.runs.results import InvalidResult, Result, ResultKey, key_of, keys_in, parquet, read_parquet
from posbench.system.files import explained, read_json, write_bytes, write_json

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Tokenizer
    from torch import Tensor

    from posbench.model.architecture import Architecture
    from posbench.model.decoder import Decoder


@dataclass(frozen=True, repr=False)
class Run:
    """A run, identified by its folder. Files are opened when they are first needed."""

    path: Path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Return `experiment/scheme/seed=n`, the last three parts of the run's path."""
        return "/".join(self.path.parts[-3:])

    @property
    def experiment_folder(self) -> Path:
        """Return the folder of the run's experiment: a run is in <experiment>/<scheme>/seed=<n>."""
        return self.path.parents[1]

    @property
    def searched_experiment(self) -> Path | None:
        """Return the folder of the experiment whose search for learning rates the run belongs to, or None.

        Such a run is in <experiment>-tune/lr=<rate>/<scheme>/seed=<n>.
        """
        search = self.path.parents[2]
        if self.experiment_folder.name.startswith("lr=") and search.name.endswith("-tune"):
            return search.with_name(search.name.removesuffix("-tune"))
        return None

    def content(self, name: str) -> bytes:
        """Return the bytes of the run's file `name`. Raises: DamagedFile if it is missing or not readable."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise DamagedFile(
                f"{self.path / name} cannot be read ({error.strerror}): give a run's folder, such as "
                "runs/demo/vo_rope/seed=0; if the file was lost, delete the folder and train the run again"
            ) from error

    @cached_property
    def config(self) -> Config:
        """Return the run's resolved configuration. Raises: ConfigError if its file is missing or not valid."""
        from omegaconf.errors import OmegaConfBaseException

        content = self.content("config.yaml")
        try:
            mapping = yaml.safe_load(content)
            # Older runs recorded settings that posbench no longer has, and `Config` refuses unknown keys.
            for group, name in _REMOVED_SETTINGS:
                mapping.get(group, {}).pop(name, None)
            return Config.from_mapping(mapping)
        except (ValueError, AttributeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(
                f"{self.path / 'config.yaml'} is not a configuration of this posbench: {error}. If another version "
                "wrote it, use that version"
            ) from error

    @property
    def manifest(self) -> Manifest:
        """Return the parsed `run.json`. Raises: DamagedFile if missing or damaged, ConfigError for another format."""
        return parse(self.content("run.json"), self.path / "run.json")

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace `run.json` atomically."""
        write_json(self.path / "run.json", asdict(manifest))

    def update_manifest(self, **changes: Any) -> None:
        """Set the fields `changes` of `run.json`."""
        self.write_manifest(replace(self.manifest, **changes))

    @property
    def is_finished(self) -> bool:
        """Return True if training reached its last step."""
        try:
            # A damaged manifest says nothing, so the run counts as not finished.
            return self.manifest.status == FINISHED
        except DamagedFile:
            return False

    @property
    def logged(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without an unfinished last one. Raises: ConfigError for damage."""
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return []
        complete = file.read_bytes().rpartition(b"\n")[0]  # without a last line that was cut off
        try:
            return [json.loads(line) for line in complete.splitlines()]
        except ValueError as error:
            raise ConfigError(f"{file} has a line that is not a row of metrics ({error}): it is damaged") from error

    @property
    def metrics(self) -> pd.DataFrame:
        """Return `metrics.jsonl` as a DataFrame, one row per line. Raises: ConfigError for a damaged line."""
        import pandas as pd

        return pd.DataFrame(self.logged)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer. Raises: ConfigError if its file is missing or has another fingerprint."""
        from posbench.data.text.tokenizer import read_file, tokenizer_in

        # A subject's tokenizer stays in the model's folder.
        if self.manifest.subject is not None:
            return read_file(self.config.tokenizer, ())
        return tokenizer_in(
            self.content("tokenizer.json"), str(self.path / "tokenizer.json"), self.manifest.fingerprints.tokenizer
        )

    def results(self) -> tuple[list[Result], list[InvalidResult]]:
        """Return the valid results in the run's `eval/` folder and the invalid files, both sorted by key.

        A result is valid if its header names this run, its key, and the weights that `load_model` reads. An unfinished
        run has none.
        """
        manifest, results, invalid = self.manifest, {}, []
        files = keys_in(self.path / "eval") if manifest.status == FINISHED else {}
        for file, key in files.items():
            try:
                header = read_json(file.with_suffix(".json"))
                expected = _expected_header(manifest, key)
                # A header names the weights that were scored. Those of an older step are not known here, and a packed
                # run may have a header with the weights from before the pack rounded them.
                if key.step is None and header["weights"] != self.weights_digest:
                    expected["weights"] = manifest.weights
                for name, value in expected.items():
                    if header.get(name) != value:
                        raise ValueError(f"its header says {name}={header.get(name)}, not {value}")
                result = Result(key_of(header), header, read_parquet(file.read_bytes()))
                results[result.key] = result
            except (OSError, ValueError, KeyError) as error:
                invalid.append(InvalidResult(key, file, str(error)))
        return [results[key] for key in sorted(results)], invalid

    def store(self, key: ResultKey, rows: pd.DataFrame, header: Mapping[str, Any]) -> Result:
        """Write an evaluation result to the run's `eval/` folder and return it.

        Arguments: rows, one per window of text; header, the settings and means, and `weights`, the digest of the
        weights that were scored. Raises: ConfigError if they cannot be written.
        """
        import pyarrow

        folder = self.path / "eval" / key.protocol
        full_header = {**header, **_expected_header(self.manifest, key)}
        table = pyarrow.Table.from_pandas(rows, preserve_index=False)
        (folder / f"{key.stem}.json").unlink(missing_ok=True)  # an old header must never belong to new windows
        # The rows first, then the header: a result is valid only if both files exist.
        try:
            write_bytes(folder / f"{key.stem}.parquet", parquet(table))
            write_json(folder / f"{key.stem}.json", full_header)
        except OSError as error:
            raise ConfigError(explained(error)) from error
        return Result(key, full_header, table)

    def evaluated(self) -> list[ResultKey]:
        """Return the keys of the run's results, sorted, by file names only, so results may be invalid."""
        return list(keys_in(self.path / "eval").values())

    @property
    def weights_digest(self) -> str | None:
        """Return the SHA-256 of the final weights, or None if there are none."""
        return self.manifest.weights

    @property
    def has_weights(self) -> bool:
        """Return True if the run has a checkpoint, intact or not, or if a subject's folder exists."""
        if any((self.path / "checkpoints").glob("step=*")):
            return True
        # A subject has no checkpoints, but the folder of its model.
        if not (self.path / "run.json").is_file():
            return False
        subject = self.manifest.subject
        return subject is not None and Path(subject["path"]).exists()

    @property
    def is_in_runs(self) -> bool:
        """Return True if the run's folder is in `runs` of the working directory, not linked there and not packed."""
        return self.path.resolve().is_relative_to(Path("runs").resolve())

    def check_scheme_files(self, may_have_changed: bool = False) -> bool:
        """Return whether a user's file that defines the run's scheme has changed since training.

        Raises: ConfigError if it changed and `may_have_changed` is False, if it is missing, or if it must not be
        imported.
        """
        # The user named these files to train the run, so they may be imported.
        if self.is_in_runs:
            own_files.trust_recorded(self.manifest.scheme_files)
        changed = own_files.changed_files(self.manifest.scheme_files)
        if changed and not may_have_changed:
            raise ConfigError(
                f"{changed[0]} has changed since {self.name} was trained: restore it (the run folder has a copy, "
                f"{self.path / Path(changed[0]).name}), or add --scheme-changed to go on with the file as it is now "
                "(results are marked)"
            )
        return bool(changed)

    def load_model(
        self,
        under: Sequence[str] = (),
        at_step: int | None = None,
        scheme_changed: bool = False,
        architecture: Architecture | None = None,
    ) -> Decoder:
        """Return the trained model in float32 on the CPU.

        Arguments: under, options of the scheme for this evaluation only, such as `base=1e6`, or another scheme without
        parameters, `scheme=nope`; at_step, of an older checkpoint; scheme_changed, True to accept a changed scheme
        file; architecture, if it is already built for these options.
        Raises: ConfigError if the weights are missing, damaged or another run's, or if the options change the model's
        parameters.
        """
        from posbench.data.text.tokenizer import find_bos
        from posbench.model.decoder import build_model
        from posbench.runs.checkpoint import put_weights

        self.check_scheme_files(scheme_changed)
        config = self.config_under(under) if under else self.config
        # A model that masks documents tells them apart by BOS. None: it reads across documents.
        bos_id = find_bos(self.tokenizer) if config.data.document_mask else None
        model = build_model(config, self.manifest.vocab_size, architecture, bos_id)
        weights = self.load_weights(at_step)
        # Another scheme: the trained one's parameters are dropped.
        if any(option.startswith("scheme=") for option in under):
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith("scheme.")}
        put_weights(model, weights)
        return model.eval()

    def load_weights(self, at_step: int | None = None) -> dict[str, Tensor]:
        """Return the weights of the last step, or of step `at_step`, by name.

        Raises: ConfigError if they are missing or damaged, or if the run is a subject, which has none.
        """
        from posbench.runs.checkpoint import load_weights

        if subject := self.manifest.subject:
            raise ConfigError(
                f"{self.name} was scored here and not trained: its weights are in {subject['path']} (to go on with "
                f"them: train.from_run={subject['path']})"
            )
        return load_weights(self.path / "checkpoints", self.manifest, at_step)

    def config_under(self, options: Sequence[str]) -> Config:
        """Return the run's configuration with changed options of its task or scheme, or with another scheme.

        Arguments: options, such as `rescale=yarn`, `full_attention.rescale=yarn` (only in layers without a window) or
        `scheme=nope`.
        Raises: ConfigError for unknown options, or a scheme of another kind of attention.
        """
        from omegaconf import OmegaConf

        from posbench.catalogue.choices import read_row
        from posbench.schemes.building import WINDOW, layer_entries, with_options

        mapping = self.config.to_mapping()
        scheme, data = mapping["scheme"], mapping["data"]
        scheme_words = []
        # A new scheme first, because other options then belong to it.
        for option in sorted(options, key=lambda word: not word.startswith("scheme=")):
            name, _, value = option.partition("=")
            if name == "scheme":
                row = read_row(value)
                # The new scheme has the run's kind of attention unless it names one.
                row = replace(row, attention=row.attention or self.config.scheme.attention)
                layers = self.config.model.num_layers
                # Each layer's kind of attention must stay, because its parameters are those of the trained model.
                trained_kinds = [entry.attention for entry in layer_entries(self.config.scheme, layers)]
                new_kinds = [entry.attention for entry in layer_entries(row, layers)]
                if trained_kinds != new_kinds:
                    raise ConfigError(
                        f"--under {option} has another kind of attention than {self.name} was trained with: choose a "
                        "scheme with the same kind"
                    )
                # Windows and the trained length stay the model's.
                inherited = {key: value for key, value in scheme.items() if key in (WINDOW, "trained_length")}
                scheme = replace(row, name=scheme["name"]).to_mapping() | inherited
            elif name in self.config.data.options:
                data = data | {name: OmegaConf.from_dotlist([option])[name]}
            else:
                scheme_words.append(option)
        scheme = with_options(scheme, scheme_words)
        return Config.from_mapping({**mapping, "scheme": scheme, "data": data})


def _expected_header(manifest: Manifest, key: ResultKey) -> dict[str, Any]:
    # Return the entries of a result's header that follow from its run and its key.
    names = {"protocol": key.protocol, "length": key.length, "under": list(key.under), "run": manifest.run_name}
    if key.anchor:
        names["anchor"] = key.anchor
    # The run does not know the fingerprint of another text, which `key.data` names.
    text = {} if key.data else {"data": manifest.fingerprints.data}
    return {**names, **text, "tokenizer": manifest.fingerprints.tokenizer}


# Settings that posbench no longer has but older runs recorded. None of them decides what a run computes from its text,
# which has its own fingerprint.
_REMOVED_SETTINGS = (
    ("train", "cuda_graph"),
    ("launch", "nproc"),
    ("launch", "strategy"),
    ("data", "tuning_fraction"),
    ("evaluation", "passage"),
    ("evaluation", "ngram_tokens"),
)


def run_folder(config: Config) -> Path:
    """Return the path of the run folder of `config`: `runs_dir/experiment/scheme/seed=n`."""
    return Path(config.runs_dir) / config.experiment_name / config.scheme.name / f"seed={config.seed}"


def initial_loss(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the validation loss before the first step, nats/token, or None."""
    for row in rows:
        if row["kind"] == "validation" and row["step"] == 0:
            return row["loss"]
    return None


def append_metrics(path: Path, row: Mapping[str, Any]) -> None:
    """Append `row` as a line to the `metrics.jsonl` at `path`."""
    # A single write, so that a kill leaves no part of a line.
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files (`.*.tmp`) of killed processes. The caller must hold the run's lock."""
    for path in list(folder.rglob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
