"""Choose the weights that a run starts from: from its seed, a longer run, another run or a Hugging Face model.

With `train.from_run`, weights of the scheme and of its kind of attention are loaded if both models have them by the
same name and shape; the rest is drawn from the seed. The optimizer's moments start at zero, and the schedule starts
again. A continued run sees the batches it would have seen if trained in one go.

A branch (`train.branch_tokens`) that starts at its trunk's checkpoint ends with the same weights, moments and rows of
metrics (except times), to the byte, as if trained from its first step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ConfigError
from posbench.runs import checkpoint, fingerprints
from posbench.runs.finding import run_named, runs_named
from posbench.runs.manifest import FINISHED, Manifest
from posbench.runs.run import Run
from posbench.schemes.entries import Positions, described
from posbench.system.console import Say

if TYPE_CHECKING:
    from torch import Tensor

    from posbench.model.decoder import Decoder

# A branch may differ from its trunk in these fields of the identity only.
_LENGTH_FIELDS = {"train.tokens", "train.num_steps", "scheme.continued.tokens", "scheme.continued.num_steps"}
_WINDOWS = ("train.context_length", "train.batch_size")
# Trunk and branch must agree in these fingerprints, and in these settings, which decide which rows are logged.
_SAME_FINGERPRINTS = ("data", "tokenizer", "code", "initial_weights")
_SAME_SETTINGS = ("log_every", "steps_between_validations", "validation_tokens", "order_every")


@dataclass(frozen=True)
class Start:
    """Weights that a run starts from instead of weights drawn from its seed, and facts about their source."""

    name: str  # experiment/scheme/seed=n, with the step if it is not the last; or the folder's name
    scheme: str  # name of the source's scheme, or of the Hugging Face folder
    positions: Positions
    model: dict[str, Any]  # its sizes, the fields of ModelConfig
    load: Callable[[], dict[str, Tensor]]  # reads the weights, by our names
    digest: str  # SHA-256 of the weights' files
    folder: Path | None = None  # the checkpoint that has these weights, if a run has it
    checkpoint: Path | None = None  # a checkpoint to continue exactly, with its moments, loop state and logged rows
    tokens: int = 0  # tokens that the source was trained on; 0: not known
    training_flops: float | None = None
    batches: str = ""  # digest of all batches that the source has read (`posbench.data.dataset.chained`)
    identity: dict[str, Any] | None = None  # the identity in the source's manifest
    initial_weights: dict[str, str] | None = None  # digests of the source's own initial weights
    tokenizer: str | None = None  # fingerprint of the source's tokenizer
    tokenizer_file: Path | None = None  # in a Hugging Face folder; may not exist
    notes: Sequence[str] = ()  # lines about what is read in another way than the folder's config.json suggests

    @property
    def record(self) -> dict[str, Any]:
        """Return facts about the source of the weights, for `continued` in the new run's `run.json`."""
        return {"name": self.name, "scheme": self.scheme, "tokens": self.tokens, "weights": self.digest}

    def comparable(self, identity: dict[str, Any], config: Config) -> dict[str, Any]:
        """Return a run's settings, changed so it is comparable with runs of the same total token count.

        Its `train` settings become the source run's, its token counts the sums of both, and settings that differ are
        recorded in `scheme.continued`. Arguments: identity, {`group.field`: value}.
        """
        defaults: dict[str, Any] = {f"train.{key}": value for key, value in fingerprints.TRAIN_DEFAULTS.items()}
        train = defaults | {key: value for key, value in identity.items() if key.startswith("train.")}
        source = defaults | self.identity if self.identity else {}
        # Context length and batch size stay this run's: if they differ, the runs are not comparable. But runs that keep
        # the schedule share a table with each other whatever their windows are.
        settings_that_stay = () if self.checkpoint else _WINDOWS
        source_train, differing = {}, {}
        for key, value in train.items():
            source_value = value if key in settings_that_stay else source.get(key, value)
            # The learning rate is the scheme's own, and the tokens of the trunk follow from all tokens.
            if value != source_value and key not in ("train.lr", "train.trunk_tokens"):
                differing[f"scheme.continued.{key.removeprefix('train.')}"] = value
            if defaults.get(key) != source_value:
                source_train[key] = source_value
        identity = {key: value for key, value in identity.items() if key not in defaults}
        # With the schedule kept, `train.tokens` already counts from the source's first step.
        if self.checkpoint is not None:
            return {
                **identity,
                "scheme.own_lr": True,
                "scheme.continued.scheme": self.scheme,
                **differing,
                "scheme.continued.at_tokens": self.tokens,
                **source_train,
                "train.lr": config.train.lr,
            }
        tokens = self.tokens + train["train.tokens"]
        per_step = train["train.tokens"] // train["train.num_steps"]
        return {
            **identity,
            "scheme.own_lr": True,
            "scheme.continued.scheme": self.scheme,
            **differing,
            "scheme.continued.tokens": train["train.tokens"],
            **source_train,
            "train.lr": config.train.lr,
            "train.tokens": tokens,
            "train.num_steps": tokens // per_step,
            "train.trunk_tokens": self.tokens + train["train.trunk_tokens"],
        }

    def check_tokenizer(self, config: Config, fingerprint: str) -> None:
        """Raise ConfigError unless the source's tokenizer is unknown or has this `fingerprint`."""
        if self.tokenizer not in (None, fingerprint):
            raise ConfigError(
                f"the tokenizer differs from the tokenizer of train.from_run={config.train.from_run}: give the same "
                "data and tokenizer, or tokenizer=file and tokenizer.path=... with the tokenizer.json of its folder"
            )

    def load_into(self, model: Decoder) -> tuple[list[str], list[str]]:
        """Set the parameters of `model` to the weights of this start.

        Returns: names of the scheme's parameters that keep their initial values, and names of weights that were not
        used.
        Raises: ConfigError if the decoders differ, or for any difference if `checkpoint` is set.
        """
        weights = self.load()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        # A checkpoint that is continued exactly has every weight: none may be missing, and none is drawn.
        names = () if self.checkpoint else {*shapes, *weights}
        scheme_names = {name for name in names if name.startswith("scheme.") or ".kind." in name}
        loaded = {n for n in weights if n not in scheme_names or (n in shapes and shapes[n] == weights[n].shape)}
        fresh = scheme_names & shapes.keys() - loaded
        loaded_weights = {name: weights[name] for name in loaded}
        checkpoint.put_weights(model, loaded_weights, fresh)
        return sorted(fresh), sorted(weights.keys() - loaded)


# ---------------------------------------------------------------- another run, or a Hugging Face folder


def continued_start(config: Config) -> Start | None:
    """Return the weights that `train.from_run` names, with their moments if the run keeps them.

    Raises: ConfigError as `start_of`, or if the run cannot go on at the checkpoint's step.
    """
    train = config.train
    start = start_of(train.from_run, config.seed, config.runs_dir)
    if start is None or not train.keep_schedule:
        return start
    if start.folder is None:
        raise ConfigError(
            f"train.from_run={train.from_run} has no moments to go on with: name a checkpoint of a run that was "
            "trained here (RUN/checkpoints/step=N), or leave out train.keep_schedule"
        )
    exact = start_at(start.folder)
    source = start.identity or {}  # a run that was trained here has one
    step = checkpoint.step_of(start.folder)
    per_step = source["train.tokens"] // source["train.num_steps"]
    if train.tokens_per_step != per_step:
        raise ConfigError(
            f"train.keep_schedule=true needs steps of {per_step} tokens, as in {start.name}, and train.batch_size="
            f"{train.batch_size} x train.context_length={train.context_length} is {train.tokens_per_step}: change one"
        )
    optimizer = source.get("train.optimizer", fingerprints.TRAIN_DEFAULTS["optimizer"])
    if optimizer != train.optimizer:
        raise ConfigError(
            f"train.keep_schedule=true keeps the moments of {optimizer}: take train.optimizer={optimizer}, or leave it "
            "out"
        )
    if step >= train.num_steps:
        raise ConfigError(
            f"{start.name} has taken {step} steps, and this run has {train.num_steps}: raise train.tokens, which "
            "counts from the first step"
        )
    return exact


def start_of(from_run: str | None, seed: int, runs_dir: str | Path) -> Start | None:
    """Return the weights to start from that `train.from_run` names, or None if it is not set.

    Arguments: from_run, a finished run; a checkpoint in a run (`<run>/checkpoints/step=00000200`); the folder of a
    scheme's runs, for its only run or the run of the same seed; or a folder in Hugging Face's format.
    Raises: ConfigError if it names no run with weights, or if its model has another architecture.
    """
    if from_run is None:
        return None
    path, runs_dir, folder = Path(from_run).expanduser(), Path(runs_dir), None
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return _start_from_folder(path)
    if at_step := re.fullmatch(r"step=(\d+)", path.name):
        # A checkpoint is in <run>/checkpoints/step=<n>.
        run = run_named(str(path.parents[1]), runs_dir)
        folder = run.path / "checkpoints" / f"step={int(at_step[1]):08d}"
        has_weights = all((folder / name).is_file() for name in (checkpoint.MODEL, checkpoint.SUMS))
        if has_weights:
            _check(folder)
    else:
        run = _finished_run(path, seed, runs_dir)
        if subject := run.manifest.subject:
            return _start_from_folder(Path(subject["path"]))
        has_weights = run.weights_digest is not None
    if not has_weights:
        steps = ", ".join(sorted(file.name for file in run.path.glob("checkpoints/step=*"))) or "no weights"
        raise ConfigError(
            f"train.from_run={path}: there are no such weights ({run.name} has {steps}): name another run or step"
        )
    return _start_from_run(run, folder)


def _check(folder: Path) -> None:
    try:
        checkpoint.check_state(folder)
    except checkpoint.TornCheckpoint as error:
        raise ConfigError(f"train.from_run={folder}: {error}: name another step") from None


def _finished_run(path: Path, seed: int, runs_dir: Path) -> Run:
    """Return the finished run that `path` means: its only run, or the one of this seed.

    Raises: ConfigError if there is none, or several.
    """
    runs = runs_named([str(path)], runs_dir)
    candidates = runs
    if len(runs) > 1:
        candidates = [run for run in runs if run.path.name == f"seed={seed}"]
    if len(candidates) != 1:
        choices = candidates or runs
        names = ", ".join(run.name for run in choices[:5])
        if len(choices) > 5:
            names += " and others"
        raise ConfigError(
            f"train.from_run={path}: it has {len(candidates)} runs of seed {seed}, and one is needed: name a run "
            f"(there are {names})"
        )
    [run] = candidates
    if run.manifest.status != FINISHED:
        raise ConfigError(
            f"train.from_run={path}: {run.name} is {run.manifest.status}: finish it first (run its train command again)"
        )
    return run


def _start_from_run(run: Run, folder: Path | None) -> Start:
    # Return the weights of a run at its checkpoint `folder`. None means its last weights, which may be in a pack.
    if folder is None:
        manifest, digest, load, name = run.manifest, str(run.weights_digest), run.load_weights, run.name
        step, batches = manifest.num_steps, manifest.fingerprints.batches or ""
    else:
        step, batches = checkpoint.step_of(folder), checkpoint.read_state(folder).get("batches", "")
        manifest, digest = checkpoint.manifest_in(folder), checkpoint.weights_digest(folder.parent, step)
        load, name = partial(run.load_weights, step), f"{run.name} at step {step}"
    row = run.config.scheme.to_mapping()
    tokens_before = manifest.continued["tokens"] if manifest.continued else 0
    # The run may itself have continued another: only its own tokens grow with its steps.
    tokens = tokens_before + round(step / manifest.num_steps * (manifest.tokens - tokens_before))
    return Start(
        name=name,
        folder=folder or checkpoint.newest(run.path / "checkpoints", lambda text: None),
        scheme=manifest.scheme,
        positions=Positions(row, described(row), run.config.train.context_length),
        model=asdict(run.config.model),
        load=load,
        digest=digest,
        tokens=tokens,
        training_flops=manifest.training_flops and manifest.training_flops * tokens / manifest.tokens,
        batches=batches,
        identity=manifest.identity,
        initial_weights=manifest.fingerprints.initial_weights,
        tokenizer=manifest.fingerprints.tokenizer,
    )


def _start_from_folder(folder: Path) -> Start:
    # transformers is optional, so it is imported when a folder is read.
    from posbench.huggingface import continuing

    source, notes = continuing.checked_source(folder)
    load = partial(continuing.load_weights, source)
    load()  # tensors that do not fit are refused before any text is read
    return Start(
        name=source.name,
        scheme=source.name,
        positions=continuing.positions(source),
        model=continuing.sizes(source),
        load=load,
        digest=source.digest,
        tokenizer_file=folder / "tokenizer.json",
        notes=notes,
    )


# ---------------------------------------------------------------- a checkpoint that is continued exactly


def start_at(folder: Path) -> Start:
    """Return a Start that continues a run exactly from its checkpoint `folder`.

    Raises: ConfigError if the run's files cannot be read.
    """
    # A checkpoint is in <run>/checkpoints/step=<n>.
    start = _start_from_run(Run(folder.parents[1]), folder)
    return replace(start, checkpoint=folder, load=partial(checkpoint.load_tensors, folder, checkpoint.MODEL))


def trunk_start(config: Config, manifest: Manifest, say: Say) -> Start | None:
    """Return the checkpoint of a longer run, its trunk, from which a shorter run (a branch) can start.

    Returns: None if the run is not a branch or must begin with its first step; `say` tells why.
    """
    if not config.train.is_branch:
        return None
    step = config.train.decay_begins  # a branch differs from its trunk from here on
    start: Start | None = None
    why_not = "its name is not the name of a branch"
    if config.trunk_name is not None:
        trunk = Run(Path(config.runs_dir) / config.trunk_name / config.scheme.name / f"seed={config.seed}")
        try:
            folder = checkpoint.at_step(trunk.path / "checkpoints", step)
            why_not = f"{trunk.path} has no checkpoint of step {step}"
            if folder is not None:
                differing = _disagreements(trunk.config, checkpoint.manifest_in(folder), config, manifest)
                why_not = ""
                if differing:
                    why_not = f"{trunk.path} differs in {'; '.join(differing)}"
                start = start_at(folder)
        except (checkpoint.TornCheckpoint, ConfigError) as error:
            why_not = f"the checkpoint of step {step} in {trunk.path} cannot be used: {error}"
    if why_not:
        say(f"{manifest.run_name}: trained from its first step ({why_not})")
        return None
    say(f"{manifest.run_name}: begins at step {step} of {config.trunk_name}/{manifest.scheme}/seed={manifest.seed}")
    return start


def _disagreements(trunk: Config, trunk_manifest: Manifest, config: Config, manifest: Manifest) -> list[str]:
    # Return what differs between a branch and its trunk, besides their lengths, so it cannot begin there.

    def differing(names: tuple[str, ...], trunk_part: object, branch_part: object) -> list[str]:
        return [name for name in names if getattr(trunk_part, name) != getattr(branch_part, name)]

    def without_length(manifest: Manifest) -> dict[str, Any]:
        return {key: value for key, value in manifest.identity.items() if key not in _LENGTH_FIELDS}

    prints = differing(_SAME_FINGERPRINTS, trunk_manifest.fingerprints, manifest.fingerprints)
    return [
        *fingerprints.changes(without_length(trunk_manifest), without_length(manifest)),
        *(f"fingerprint of {name}" for name in prints),
        *(f"train.{name}" for name in differing(_SAME_SETTINGS, trunk.train, config.train)),
    ]
