"""Make a run of a model that transformers loads, so it can be scored: a subject, which was not trained here.

    runs/subjects/<name>/seed=0/run.json      the model's path and positions, the digest of its weights, versions
                               /config.yaml   the text and the evaluation settings
                               /eval/         results, as of any run
    runs/subjects/<name>/card.md              what the results say, in a few lines
    runs/subjects/last.json                   the subjects of the last command, which a report joins

Weights and tokenizer stay in the folder. The first text that a subject is scored on is its own text, of which every
document is scored.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer

from posbench.composition.compose import compose
from posbench.config import Config, ConfigError
from posbench.data.text.corpus import Corpus
from posbench.data.text.preparation import prepare_held_out
from posbench.data.text.tokenizer import BOS
from posbench.evaluation.request import Request
from posbench.model.decoder import ScoredModel
from posbench.model.positions import ModelPositions, show_positions
from posbench.runs import FINISHED, Manifest, Run, run_folder
from posbench.runs.finding import LAST_SUBJECTS, SUBJECTS, runs_named
from posbench.runs.fingerprints import code_fingerprint, config_fingerprint, identity
from posbench.runs.manifest import FORMAT, Fingerprints
from posbench.system.device import choose_device
from posbench.system.files import write_json, write_text
from posbench.version import __version__

if TYPE_CHECKING:
    from posbench.huggingface.loading import Source

WINDOWS = 16  # windows for each length, unless the user gives evaluation.windows or evaluation.order_windows
_SETTING = "evaluation."  # beginning of a word on the command line that is not a name but a setting for subjects
_COUNTED = 200_000  # tokens in which characters are counted
_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # a name on the Hugging Face hub
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".incomplete")


def runs_to_score(names: Sequence[str], request: Request, runs_dir: Path, console: Console) -> list[Run]:
    """Return the runs that `names` mean. A model's folder or GGUF file becomes a run, whose positions are printed.

    Arguments: names, also settings for the models such as `evaluation.windows=8`. Raises: ConfigError for a name
    without runs, or a model that transformers cannot read.
    """
    settings = [name for name in names if name.startswith(_SETTING)]
    folders = [name for name in names if name not in settings and _is_model(Path(name))]
    trained = [name for name in names if name not in (*settings, *folders)]
    runs: list[Run] = []
    try:
        # Without any name, `runs_named` returns all runs.
        if trained or not folders:
            runs = runs_named(trained, runs_dir)
    except ConfigError as error:
        hub_names = [name for name in trained if _HUB.fullmatch(name) and not Path(name).parent.exists()]
        if not hub_names:
            raise
        command = f"hf download {hub_names[0]} --local-dir {hub_names[0].rpartition('/')[2]}"
        raise ConfigError(f"{error}. A model of the Hugging Face hub is read from a folder: {command}") from error
    if settings and not folders:
        raise ConfigError(f"{settings[0]} is for Hugging Face folders: a run's settings are those it was trained with")
    subjects = [_subject(Path(name), settings, request, runs_dir, console) for name in folders]
    for subject in subjects:
        _show_positions(subject, request, console)
    if subjects:
        scored = [subject.path.parent.name for subject in subjects]
        write_json(runs_dir / SUBJECTS / LAST_SUBJECTS, scored)
    return [*subjects, *runs]


def _is_model(path: Path) -> bool:
    # Also a folder or a file that `_subject` refuses with a remedy, such as weights without a config.json.
    if path.is_dir():
        return (path / "config.json").is_file() or any(_weights_in(path))
    return path.is_file() and path.suffix in _WEIGHTS


def _weights_in(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.suffix in _WEIGHTS)


def _subject(path: Path, settings: Sequence[str], request: Request, runs_dir: Path, console: Console) -> Run:
    """Write the run of the model at `path`, and return it. A run that exists keeps its text.

    Raises: ConfigError if the model or its tokenizer cannot be read, or if a run of this name is of another model.
    """
    from posbench.huggingface.files import check_adapter
    from posbench.huggingface.loading import Source, load, positions_under, versions

    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is a file of weights: give its folder, with config.json and tokenizer.json")
    folder = path if path.is_dir() else path.parent
    check_adapter(folder)
    source = Source(path)
    console.out(f"{source.name}: reading the model")
    source.content  # noqa: B018  (raises the error if there is no config.json)
    tokenizer = source.tokenizer_file(runs_dir / SUBJECTS / source.name)
    for note in source.check():
        console.out(note)
    source.check_code()
    # `model` and `scheme` of this configuration are placeholders, because config.json describes the model.
    T = source.length or max(request.lengths, default=0)
    if not T:
        raise ConfigError(
            f"{source.folder}/config.json has no max_position_embeddings or context_length, the length that the model "
            "was trained on: name the lengths to score with --length, or add max_position_embeddings"
        )
    words = [f"train.context_length={T}", "train.steps=1", "scheme=nope", f"scheme.name={source.name}"]
    words += [f"experiment_name={SUBJECTS}", f"runs_dir={runs_dir}", f"model.name={source.name}"]
    words += ["tokenizer=file", f"tokenizer.path={tokenizer}"]
    words += [f"evaluation.windows={WINDOWS}", f"evaluation.order_windows={WINDOWS}"]
    words += [f"evaluation.lengths=[{T // 4},{T // 2},{T},{2 * T}]", *settings]
    config = compose(words)
    run = Run(run_folder(config))
    # The first text that a subject was scored on stays its own.
    if (run.path / "run.json").is_file():
        config = replace(config, data=run.config.data)
        if run.evaluated():
            _check_same_model(run, source, versions())
    elif request.data is not None:
        config = replace(config, data=request.data)
    device = choose_device(replace(config.train, device=request.device, dtype=request.dtype))
    model = load(source, (), T, device)  # checks the tensors before any text is read
    console.out(f"{source.name}: preparing data={config.data.name}")
    corpus = prepare_held_out(config, console.out, whole=True)
    if Tokenizer.from_file(str(tokenizer)).token_to_id(str(corpus.tokenizer.id_to_token(corpus.bos_id))) is None:
        console.out(
            f"{source.name}: its tokenizer names no BOS: {BOS}, which the model never saw, begins each document"
        )
    if corpus.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer of {path} has {corpus.vocab_size} tokens, and the model's table {model.vocab_size} rows: "
            "take the tokenizer that belongs to the model"
        )
    write_text(run.path / "config.yaml", yaml.safe_dump(config.to_mapping(), sort_keys=False))
    run.write_manifest(_manifest(config, corpus, source, model, versions(), positions_under(source, (), T).paragraph))
    return Run(run.path)


def _check_same_model(run: Run, source: Source, versions: Mapping[str, Any]) -> None:
    # Raise ConfigError unless a subject's results are of this model, as computed by these versions.
    subject = run.manifest.subject or {}
    if (run.weights_digest, subject.get("config", source.config_digest)) != (source.digest, source.config_digest):
        raise ConfigError(
            f"{run.path} has results of another model of this name (its weights or positions differ from those in "
            f"{source.path}): rename one of the two folders, or delete {run.path}"
        )
    scored_by = {name: subject.get("versions", {}).get(name) for name in versions}
    if scored_by != versions:
        described = f"transformers {scored_by['transformers']}, adapter {scored_by['adapter']}"
        # No version of transformers was recorded if posbench's own decoder scored the model.
        if scored_by["transformers"] is None:
            described = "posbench's own decoder"
        raise ConfigError(
            f"{run.path} was scored by {described}, and this is transformers {versions['transformers']}, adapter "
            f"{versions['adapter']}: their results do not mix. Rename {source.path}, or delete {run.path}"
        )


def _manifest(
    config: Config,
    corpus: Corpus,
    source: Source,
    model: ScoredModel,
    versions: Mapping[str, Any],
    positions: str,
) -> Manifest:
    device = choose_device(config.train).describe()
    tokens = corpus.test.tokens[:_COUNTED]
    facts = facts_of(model)
    settings = identity(config, device)
    settings |= {f"subject.{name}": version for name, version in versions.items()}
    settings |= {"subject.family": source.content.get("model_type"), "subject.config": source.config_digest}
    return Manifest(
        format=FORMAT,
        status=FINISHED,
        experiment=config.experiment_name,
        scheme=config.scheme.name,
        seed=config.seed,
        vocab_size=corpus.vocab_size,
        num_parameters=facts.parameters,
        is_relative=facts.longest is None,
        fingerprints=Fingerprints(
            corpus.fingerprint, corpus.tokenizer_fingerprint, config_fingerprint(settings), code_fingerprint(), {}
        ),
        identity=settings,
        versions={
            "posbench": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: str(version) for name, version in versions.items()},
        },
        device=device,
        num_steps=0,
        tokens=0,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        weights=source.digest,
        subject={
            "path": str(source.path),
            "config": source.config_digest,
            "family": source.content.get("model_type"),
            "class": facts.class_name,
            "rotations": source.rotations,
            "positions": positions,
            "longest": facts.longest,
            "length": source.length,
            "is_instructed": source.is_instructed,
            "versions": dict(versions),
            "characters_per_token": len(corpus.tokenizer.decode(tokens.tolist())) / len(tokens),
            "document_tokens": sorted(int(n) for n in (corpus.test.starts[1:] - corpus.test.starts[:-1])),
        },
    )


def _show_positions(run: Run, request: Request, console: Console) -> None:
    # Print what the model does with position at the longest length to score.
    subject = run.manifest.subject
    assert subject is not None
    length = max(request.lengths or run.config.evaluation.lengths)
    kind = ", instruction-tuned" if subject["is_instructed"] else ""
    table = positions_in_use(run, (), length)
    unknown = "" if table.trained else " The training length is not recorded."
    console.out(f"{run.name} ({subject['class']}{kind}): {table.paragraph}{unknown}")
    tables = []
    for variant in request.variants:
        # The model is scored only as it is if it lacks an option, with a line that says why.
        with suppress(ConfigError):
            tables.append((" ".join(variant.under) or "as it is", positions_in_use(run, variant.under, length)))
    show_positions(tables, length, console)


# ---------------------------------------------------------------- a subject's model, through transformers


def source_of(run: Run) -> Source:
    """Return where the model of a subject is. Raises: ConfigError if it is gone or has changed since it was scored."""
    # transformers is optional, so it is imported when a subject is first read.
    from posbench.huggingface.loading import Source

    subject = run.manifest.subject
    assert subject is not None
    source = Source(Path(subject["path"]))
    if not source.path.exists():
        raise ConfigError(f"{source.path}, the model of {run.name}, is gone: put it back, or delete {run.path}")
    source.content  # noqa: B018  (raises the error if there is no config.json)
    if source.digest != run.weights_digest:
        raise ConfigError(f"the weights in {source.path} have changed since {run.name} was scored")
    return source


def positions_in_use(run: Run, options: Sequence[str], length: int) -> ModelPositions:
    """Return what a subject's layers do at `length` tokens. Raises: ConfigError for options that it does not have."""
    from posbench.huggingface.loading import positions_under

    return positions_under(source_of(run), options, length)


def changes_nothing(run: Run, options: Sequence[str], length: int) -> bool:
    """Return whether options only rescale by length / training length, up to the training length."""
    names = {option.partition("=")[0].rpartition(".")[2] for option in options}  # without types of layers
    # A value in braces is a mapping, which may change more than the factor.
    if names != {"rescale"} or any("{" in option for option in options):
        return False
    if length > run.config.train.context_length:
        return False
    # Up to the training length the factor is 1, unless the model's own rotation is rescaled.
    changed, unchanged = positions_in_use(run, options, length), positions_in_use(run, (), length)
    turns = [layer.rotation for layer in changed.layers if layer.rotation]
    own_turns = [layer.rotation for layer in unchanged.layers if layer.rotation]
    # Nothing is known of the options of an export of posbench's own class.
    is_known = bool(turns) and run.manifest.subject["rotations"] != {}  # type: ignore[index]
    return is_known and all(new.factor == 1 and old.method == "none" for new, old in zip(turns, own_turns, strict=True))


@dataclass(frozen=True)
class Facts:
    """Facts that a loaded model gives about itself."""

    class_name: str
    parameters: dict[str, int]  # in the embedding tables, and in the rest
    longest: int | None  # the longest input in tokens, for learned positions; None: no limit


def facts_of(model: Any) -> Facts:
    """Return facts about a loaded model."""
    from posbench.model.decoder import Decoder

    if isinstance(model, Decoder):
        module = model
        longest, name = model.scheme.longest, "PosbenchForCausalLM"
        tables = [model.embedding.weight, model.unembedding.weight]
    else:
        module = model.model
        longest, name = model.longest, type(module).__name__
        output_layer = module.get_output_embeddings()
        tables = [module.get_input_embeddings().weight]
        if output_layer is not None:  # None: the class has no output layer that it gives
            tables.append(output_layer.weight)
    total = sum(parameter.numel() for parameter in module.parameters())
    distinct = {id(table): table for table in tables}  # a tied table counts once
    embedding = sum(table.numel() for table in distinct.values())
    return Facts(name, {"embedding": embedding, "body": total - embedding}, longest)
