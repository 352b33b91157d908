"""Make a run of a Hugging Face folder, so that it can be scored: a subject, a model that was not trained here.

    runs/subjects/<name>/seed=0/run.json      the folder's path, the digest of its weights; finished after 0 steps
                               /config.yaml   sizes and positions as in config.json, evaluation settings, the text
                               /eval/         results, as of any run

Weights and tokenizer stay in the folder. The first text that a subject is scored on is its own text, of which every
document is scored. Its training length is the one that its rotation frequencies were trained for.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from posbench.composition.compose import compose
from posbench.config import Config, ConfigError, DataConfig
from posbench.data.text.corpus import Corpus
from posbench.data.text.preparation import prepare_held_out
from posbench.data.text.tokenizer import CONVERT
from posbench.evaluation.request import Request
from posbench.model.architecture import build_architecture
from posbench.model.rotations import show_rotations
from posbench.model.size import num_parameters
from posbench.runs import FINISHED, Manifest, Run, folder_check, pretrained, run_folder
from posbench.runs.finding import SUBJECTS, runs_named
from posbench.runs.fingerprints import code_fingerprint, config_fingerprint, identity
from posbench.runs.manifest import FORMAT, Fingerprints
from posbench.runs.start import start_of
from posbench.system.device import choose_device
from posbench.system.files import write_text
from posbench.version import __version__

WINDOWS = 16  # windows for each length, unless the user gives evaluation.windows or evaluation.order_windows
_SETTING = "evaluation."  # beginning of a word on the command line that is not a name but a setting for subjects
_COUNTED = 200_000  # tokens in which characters are counted


def runs_to_score(names: Sequence[str], request: Request, runs_dir: Path, console: Console) -> list[Run]:
    """Return the runs that `names` mean. A Hugging Face folder becomes a run, whose positions are printed.

    Arguments: names, of runs, experiments or folders, and settings for the folders such as `evaluation.windows=8`;
    request, what to score; runs_dir, the folder of all runs.
    Raises: ConfigError for a name without runs, or a folder that posbench cannot read.
    """
    settings = [name for name in names if name.startswith(_SETTING)]
    folders = [name for name in names if name not in settings and _is_model(Path(name))]
    others = [name for name in names if name not in (*settings, *folders)]
    try:
        runs = runs_named(others, runs_dir) if others or not folders else []
    except ConfigError as error:
        hub = [name for name in others if _HUB.fullmatch(name) and not Path(name).parent.exists()]
        if not hub:
            raise
        command = f"hf download {hub[0]} --local-dir {hub[0].rpartition('/')[2]}"
        raise ConfigError(f"{error}. A model of the Hugging Face hub is read from a folder: {command}") from error
    if settings and not folders:
        raise ConfigError(f"{settings[0]} is for Hugging Face folders: a run's settings are those it was trained with")
    subjects = [_subject(Path(name), settings, request.data, runs_dir, console) for name in folders]
    for subject, name in zip(subjects, folders, strict=True):
        _show_positions(subject, pretrained.read_config(Path(name)), request, console)
    return [*subjects, *runs]


def _is_model(path: Path) -> bool:
    """Return whether `path` is a folder with a model, complete or not, or a file of weights."""
    if path.is_dir():
        return (path / "config.json").is_file() or any(_weights_in(path))
    return path.is_file() and path.suffix in _WEIGHTS


_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # a name on the Hugging Face hub
_COMPLETE = "download all files of the model (docs/subjects.md turns a GGUF file into a folder)"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".incomplete")


def _weights_in(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.suffix in _WEIGHTS)


def _subject(folder: Path, settings: Sequence[str], data: DataConfig | None, runs_dir: Path, console: Console) -> Run:
    """Write the run of the model in `folder`, or check the existing one, and return it.

    Arguments: settings, overrides of the group `evaluation`; data, the text to score, by default the text of the
    existing run, else conf/config.yaml's.
    Raises: ConfigError if the folder cannot be read, or if results of another model have its name.
    """
    folder_check.check_adapter(folder)
    for name, advice in (("config.json", _COMPLETE), ("tokenizer.json", CONVERT)):
        if not (folder / name).is_file():
            others = folder_check.tokenizer_files(folder) if name == "tokenizer.json" else ""
            raise ConfigError(f"{folder} has no {name}{others}: {advice}")
    start = start_of(str(folder), 0, runs_dir)
    assert start is not None
    for note in start.notes:
        console.out(note)
    T = start.positions.length
    if T is None:
        raise ConfigError(
            f"{folder}/config.json has no context_length, the length that the model was trained on: add it"
        )
    words = [f"train.from_run={folder}", f"train.context_length={T}", "train.steps=1"]
    words += [f"experiment_name={SUBJECTS}", f"runs_dir={runs_dir}", f"scheme.name={start.name}"]
    words += [f"evaluation.windows={WINDOWS}", f"evaluation.order_windows={WINDOWS}"]
    words += [f"evaluation.lengths=[{T // 4},{T // 2},{T},{2 * T}]", *settings]
    config = compose(words)
    run = Run(run_folder(config))
    if (run.path / "run.json").is_file():
        config = replace(config, data=run.config.data)
        alike = (run.weights_digest, run.config.model, run.config.scheme) == (start.digest, config.model, config.scheme)
        if not alike and run.evaluated():
            raise ConfigError(
                f"{run.path} has results of another model of this name (its weights or positions differ from those in "
                f"{folder}): rename one of the two folders, or delete {run.path}"
            )
    elif data is not None:
        config = replace(config, data=data)
    corpus = prepare_held_out(config, console.out, whole=True)
    write_text(run.path / "config.yaml", yaml.safe_dump(config.to_mapping(), sort_keys=False))
    run.write_manifest(_manifest(config, corpus, start.digest, folder))
    return Run(run.path)


def _manifest(config: Config, corpus: Corpus, digest: str, folder: Path) -> Manifest:
    device = choose_device(config.train).describe()
    architecture = build_architecture(config)
    settings = identity(config, device)
    tokens = corpus.test.tokens[:_COUNTED]
    return Manifest(
        format=FORMAT,
        status=FINISHED,
        experiment=config.experiment_name,
        scheme=config.scheme.name,
        seed=config.seed,
        vocab_size=corpus.vocab_size,
        num_parameters=num_parameters(architecture, config.model.vocab_size or corpus.vocab_size),
        is_relative=bool(architecture.scheme.is_relative),
        fingerprints=Fingerprints(
            corpus.fingerprint, corpus.tokenizer_fingerprint, config_fingerprint(settings), code_fingerprint(), {}
        ),
        identity=settings,
        versions={"posbench": __version__, "python": platform.python_version(), "torch": torch.__version__},
        device=device,
        num_steps=0,
        tokens=0,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        weights=digest,
        subject={
            "path": str(folder),
            "characters_per_token": len(corpus.tokenizer.decode(tokens.tolist())) / len(tokens),
            "document_tokens": sorted(int(n) for n in (corpus.test.starts[1:] - corpus.test.starts[:-1])),
        },
    )


def _show_positions(run: Run, content: Mapping[str, Any], request: Request, console: Console) -> None:
    """Print the rotation settings in `config.json` and those in use, for each set of options.

    Arguments: content, of the model's `config.json`.
    """
    T = run.config.train.context_length
    length = max(request.lengths or run.config.evaluation.lengths)
    rope = {key: content[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if content.get(key)}
    console.out(f"{run.name}: trained on windows of {T:,} tokens. config.json: {rope}")
    models = {
        " ".join(variant.under) or "as in config.json": build_architecture(run.config_under(variant.under)).scheme
        for variant in request.variants
    }
    show_rotations(models, length, console)
