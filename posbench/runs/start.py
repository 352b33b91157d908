"""Other weights than its seed's that a run starts from: its trunk's, another run's, or a Hugging Face folder's.

`train.from_run` names a run or a folder. The decoder's weights are taken. Those of the scheme, and of its kind of
attention, are taken if both models have them by the same name and shape; others start from the seed. AdamW's moments
start at zero, and the schedule starts again. The batches continue after those that the source has read: a run that
continues another for its last tenth reads what a run that was trained in one go reads.

A branch is a shorter run of a family (`train.branch_tokens`): until its decay begins it is the same run as its trunk.
So a branch that starts at the trunk's checkpoint of that step ends with the same bytes as one that is trained from its
first step: weights, moments and rows of metrics (but for times).

A run that was cut off starts at its own newest checkpoint in the same way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ConfigError
from posbench.runs import checkpoint, fingerprints, pretrained
from posbench.runs.finding import run_named, runs_named
from posbench.runs.manifest import FINISHED, Manifest
from posbench.runs.pretrained import Positions, described
from posbench.runs.run import Run
from posbench.system.console import Say
from posbench.system.files import sum_of

if TYPE_CHECKING:
    from torch import Tensor

    from posbench.model.decoder import Decoder

# A branch may differ from its trunk in these fields of the identity, and in none of these fingerprints and settings:
# the settings decide which rows are logged.
_LENGTH = {"train.tokens", "train.num_steps", "scheme.continued.tokens", "scheme.continued.num_steps"}
_SAME_PRINTS = ("data", "tokenizer", "code", "initial_weights")
_SAME_SETTINGS = ("log_every", "steps_between_validations", "validation_tokens", "order_every")


@dataclass(frozen=True)
class Start:
    """Weights that a run starts from in place of those that its seed draws, and what is known of their source."""

    name: str  # experiment/scheme/seed=n, with the step if it is not the last; or the folder's name
    scheme: str  # name of the source's row; of a Hugging Face folder, the folder's name
    positions: Positions
    model: dict[str, Any]  # its sizes, the fields of ModelConfig
    load: Callable[[], dict[str, Tensor]]  # reads the weights, by our names
    digest: str  # SHA-256 of the weights' files
    checkpoint: Path | None = None  # intact, and continued exactly: with its moments, loop state and logged rows
    tokens: int = 0  # the source was trained on; 0: not known
    training_flops: float | None = None
    batches: str = ""  # chain over the batches that the source has read (`posbench.data.dataset.chained`)
    identity: dict[str, Any] | None = None  # of the source's manifest
    initial_weights: dict[str, str] | None = None  # digests of the source's own initial weights
    tokenizer: str | None = None  # fingerprint of the source's tokenizer
    tokenizer_file: Path | None = None  # of a Hugging Face folder; may not exist

    @property
    def record(self) -> dict[str, Any]:
        """Return what a manifest records of it, as `continued`."""
        return {"name": self.name, "scheme": self.scheme, "tokens": self.tokens, "weights": self.digest}

    def check_tokenizer(self, config: Config, fingerprint: str) -> None:
        """Raises: ConfigError if the run's tokenizer is not the tokenizer of the text that will be read."""
        if self.tokenizer not in (None, fingerprint):
            raise ConfigError(
                f"the text is read with another tokenizer than that of train.from_run={config.train.from_run}: give "
                "the same data and tokenizer, or tokenizer=file and tokenizer.path=... with the tokenizer.json of its "
                "folder"
            )

    def load_into(self, model: Decoder) -> tuple[list[str], list[str]]:
        """Set the model's parameters, except those of its scheme that differ. A checkpoint may differ in none.

        Returns: the scheme's parameters that keep their initial values, and the weights that the model has no place
        for.
        Raises: ConfigError if the decoders differ.
        """
        weights, shapes = self.load(), {name: p.shape for name, p in model.named_parameters()}
        names = () if self.checkpoint else {*shapes, *weights}
        of_scheme = {name for name in names if name.startswith("scheme.") or ".kind." in name}
        taken = {n for n in weights if n not in of_scheme or (n in shapes and shapes[n] == weights[n].shape)}
        fresh = of_scheme & shapes.keys() - taken
        checkpoint.put_weights(model, {name: weights[name] for name in taken}, fresh)
        return sorted(fresh), sorted(weights.keys() - taken)


# ---------------------------------------------------------------- another run, or a Hugging Face folder


def start_of(from_run: str | None, seed: int, runs_dir: str | Path) -> Start | None:
    """Return the start that `train.from_run` names, or None if it names nothing.

    Arguments: from_run, a finished run as every command names one, a checkpoint's folder in it
    (`.../checkpoints/step=00000200`), the folder of a row, of whose runs the one of the same seed is taken (or the only
    one), or a folder with `config.json` and safetensors files in Hugging Face's form.
    Raises: ConfigError if there is no such model, and for a model of another architecture.
    """
    if from_run is None:
        return None
    place, runs_dir, folder = Path(from_run).expanduser(), Path(runs_dir), None
    if (place / "config.json").is_file():
        return _of_folder(place)
    if at_step := re.fullmatch(r"step=(\d+)", place.name):
        run = run_named(str(place.parents[1]), runs_dir)
        folder = run.path / "checkpoints" / f"step={int(at_step[1]):08d}"
        has_weights = all((folder / name).is_file() for name in (checkpoint.MODEL, checkpoint.SUMS))
    else:
        run = _finished_run(place, seed, runs_dir)
        has_weights = run.weights_digest is not None
    if not has_weights:
        steps = ", ".join(sorted(path.name for path in run.path.glob("checkpoints/step=*"))) or "no weights"
        raise ConfigError(f"train.from_run={place}: there are no such weights ({run.name} has {steps})")
    return _of_run(run, folder)


def _finished_run(place: Path, seed: int, runs_dir: Path) -> Run:
    runs = runs_named([str(place)], runs_dir)
    of_seed = [run for run in runs if len(runs) == 1 or run.path.name == f"seed={seed}"]
    if len(of_seed) != 1:
        names = ", ".join(run.name for run in (of_seed or runs)[:5])
        raise ConfigError(
            f"train.from_run={place}: it has {len(of_seed)} runs of seed {seed}, and one is needed: name a run "
            f"(there are {names}{' and others' if len(of_seed or runs) > 5 else ''})"
        )
    [run] = of_seed
    if run.manifest.status != FINISHED:
        raise ConfigError(
            f"train.from_run={place}: {run.name} is {run.manifest.status}: finish it first (run its train command "
            "again)"
        )
    return run


def _of_run(run: Run, folder: Path | None) -> Start:
    """Return the start at a checkpoint's folder; None: at the run's last weights, which a pack may hold."""
    if folder is None:
        manifest, digest, load, name = run.manifest, str(run.weights_digest), run.load_weights, run.name
        step, batches = manifest.num_steps, manifest.fingerprints.batches or ""
    else:
        step, batches = checkpoint.step_of(folder), checkpoint.read_state(folder).get("batches", "")
        manifest, digest = checkpoint.manifest_in(folder), checkpoint.weights_digest(folder.parent, step)
        load, name = partial(run.load_weights, step), f"{run.name} at step {step}"
    row = run.config.scheme.to_mapping()
    tokens_before = manifest.continued["tokens"] if manifest.continued else 0
    tokens = tokens_before + round(step / manifest.num_steps * (manifest.tokens - tokens_before))
    return Start(
        name=name,
        scheme=manifest.scheme,
        positions=Positions(row, described(row)),
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


def _of_folder(folder: Path) -> Start:
    config, files = pretrained.read_config(folder), pretrained.weight_files(folder)
    name = re.sub(r"[^\w.+-]", "_", folder.resolve().name).lstrip("_.+-")
    sizes = pretrained.sizes(config, name)
    return Start(
        name=name,
        scheme=name,
        positions=pretrained.positions(config),
        model=sizes,
        load=partial(pretrained.load_weights, files, sizes["tied_embeddings"]),
        digest=hashlib.sha256("".join(map(sum_of, files)).encode()).hexdigest(),
        tokenizer_file=folder / "tokenizer.json",
    )


# ---------------------------------------------------------------- a checkpoint that is continued exactly


def start_at(folder: Path) -> Start:
    """Return the start at an intact checkpoint, which continues its run exactly. Raises: ConfigError."""
    start = _of_run(Run(folder.parents[1]), folder)
    return replace(start, checkpoint=folder, load=partial(checkpoint.load_tensors, folder, checkpoint.MODEL))


def trunk_start(config: Config, manifest: Manifest, say: Say) -> Start | None:
    """Return the start of a branch at its trunk's checkpoint, or None if the run starts with its first step.

    Arguments: manifest, of the run before its first step; say, which prints which checkpoint it is, or why there is
    none.
    """
    if not config.train.is_branch:
        return None
    step, start, why = config.train.decay_begins, None, "its name is not that of a branch"
    if config.trunk_name is not None:
        trunk = Run(Path(config.runs_dir) / config.trunk_name / config.scheme.name / f"seed={config.seed}")
        try:
            folder = checkpoint.at_step(trunk.path / "checkpoints", step)
            why = f"{trunk.path} has no checkpoint of step {step}"
            if folder is not None:
                differing = _disagreements(trunk.config, checkpoint.manifest_in(folder), config, manifest)
                why = f"{trunk.path} differs in {'; '.join(differing)}" if differing else ""
                start = start_at(folder)
        except (checkpoint.TornCheckpoint, ConfigError) as error:
            why = f"the checkpoint of step {step} in {trunk.path} cannot be used: {error}"
    place = f"begins at step {step} of {config.trunk_name}/{manifest.scheme}/seed={manifest.seed}"
    say(f"{manifest.run_name}: {f'trained from its first step ({why})' if why else place}")
    return None if why else start


def _disagreements(trunk: Config, trunk_manifest: Manifest, config: Config, manifest: Manifest) -> list[str]:
    """Return how a trunk, at the branch's first step, differs from the branch; empty if they are the same run."""
    theirs, ours = ({k: v for k, v in m.identity.items() if k not in _LENGTH} for m in (trunk_manifest, manifest))
    prints, settings = (trunk_manifest.fingerprints, manifest.fingerprints), (trunk.train, config.train)
    return [
        *fingerprints.changes(theirs, ours),
        *(f"fingerprint of {name}" for name in _SAME_PRINTS if getattr(prints[0], name) != getattr(prints[1], name)),
        *(f"train.{name}" for name in _SAME_SETTINGS if getattr(settings[0], name) != getattr(settings[1], name)),
    ]
