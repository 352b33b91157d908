"""What a run begins with in place of initial weights (`train.from_run`): another run's, or a Hugging Face folder's.

Weights of the decoder are taken over. Those of the scheme, and of its kind of attention, are too where both have them
by the same name and shape; others start from the seed. AdamW's moments start at zero, and the schedule anew. Batches go
on behind those that the other run has read, so that a run which continues another for its last tenth reads what one
that was trained through has read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ConfigError
from posbench.runs.pretrained import Positions, described, read_pretrained
from posbench.system.files import sum_of

if TYPE_CHECKING:
    from torch import Tensor

    from posbench.model.decoder import Decoder


@dataclass(frozen=True)
class Origin:
    """A model that a run begins with."""

    name: str  # experiment/scheme/seed=n, with the step where it is not the last; or the folder's name
    scheme: str  # the name of its row; of a Hugging Face folder, its own name
    positions: Positions
    model: dict[str, Any]  # its sizes, the fields of ModelConfig
    load: Callable[[], dict[str, Tensor]]  # its weights by our names
    digest: str  # of the weights' files
    tokens: int = 0  # it was trained on before; 0: not known
    training_flops: float | None = None
    batches: str = ""  # the chain over those it read (`posbench.data.batches.chained`)
    identity: dict[str, Any] | None = None  # of the run's manifest
    initial_weights: dict[str, str] | None = None  # digests of what that run began with
    tokenizer: str | None = None  # fingerprint of the run's tokenizer
    tokenizer_file: Path | None = None  # of a Hugging Face folder; may not exist

    def check_tokenizer(self, config: Config, fingerprint: str) -> None:
        """Raises: ConfigError where the run's tokenizer is not the one of the text that is to be read."""
        if self.tokenizer not in (None, fingerprint):
            raise ConfigError(
                f"the text is read with another tokenizer than that of train.from_run={config.train.from_run}: give "
                "the same data and tokenizer, or tokenizer=file and tokenizer.path=... with the tokenizer.json of its "
                "folder"
            )


def origin_of(from_run: str | None, seed: int, runs_dir: str | Path) -> Origin | None:
    """What `train.from_run` names; None where it names nothing.

    Arguments: from_run, a finished run as every command names one, a checkpoint's folder in it
    (`.../checkpoints/step=00000200`), the folder of a row, of whose runs that of the same seed is taken (where there is
    but one, that), or a folder with `config.json` and safetensors files in Hugging Face's form.
    Raises: ConfigError where there is no such model, and for a model of another architecture.
    """
    if from_run is None:
        return None
    place = Path(from_run).expanduser()
    if (place / "config.json").is_file():
        return _of_hugging_face(place)
    return _of_run(place, seed, Path(runs_dir))


def _of_run(place: Path, seed: int, runs_dir: Path) -> Origin:
    from posbench.runs.checkpoint import read_state
    from posbench.runs.finding import run_named, runs_named
    from posbench.runs.manifest import FINISHED

    at_step = re.fullmatch(r"step=(\d+)", place.name)
    if at_step:
        run = run_named(str(place.parents[1]), runs_dir)
    else:
        of_row = runs_named([str(place)], runs_dir)
        of_seed = [each for each in of_row if len(of_row) == 1 or each.path.name == f"seed={seed}"]
        if len(of_seed) != 1:
            there = ", ".join(each.name for each in (of_seed or of_row)[:5])
            raise ConfigError(
                f"train.from_run={place}: it has {len(of_seed)} runs of seed {seed}, and one is needed: name a run "
                f"(there are {there}{' and others' if len(of_seed or of_row) > 5 else ''})"
            )
        [run] = of_seed
    manifest = run.manifest
    step = int(at_step[1]) if at_step else manifest.num_steps
    if not at_step and manifest.status != FINISHED:
        raise ConfigError(
            f"train.from_run={place}: {run.name} is {manifest.status}: finish it first (run its train command again)"
        )
    folder = run.path / "checkpoints" / f"step={step:08d}"
    if not (folder / "model.safetensors").is_file() if at_step else run.weights_digest is None:
        kept = ", ".join(sorted(path.name for path in folder.parent.glob("step=*"))) or "no weights"
        raise ConfigError(f"train.from_run={place}: there are no such weights ({run.name} has {kept})")
    row = run.config.scheme.to_mapping()
    before = manifest.continued["tokens"] if manifest.continued else 0
    tokens = before + round(step / manifest.num_steps * (manifest.tokens - before))
    return Origin(
        name=run.name + (f" at step {step}" if at_step else ""),
        scheme=manifest.scheme,
        positions=Positions(row, described(row)),
        model=asdict(run.config.model),
        load=lambda: run.load_weights(step if at_step else None),
        digest=sum_of(folder / "model.safetensors") if at_step else str(run.weights_digest),
        tokens=tokens,
        training_flops=manifest.training_flops and manifest.training_flops * tokens / manifest.tokens,
        batches=read_state(folder)["batches"] if at_step else manifest.fingerprints.batches or "",
        identity=manifest.identity,
        initial_weights=manifest.fingerprints.initial_weights,
        tokenizer=manifest.fingerprints.tokenizer,
    )


def _of_hugging_face(folder: Path) -> Origin:
    pretrained = read_pretrained(folder)
    sums = "".join(sum_of(file) for file in pretrained.files)
    return Origin(
        name=pretrained.name,
        scheme=pretrained.name,
        positions=pretrained.positions,
        model=pretrained.sizes,
        load=pretrained.load,
        digest=hashlib.sha256(sums.encode()).hexdigest(),
        tokenizer_file=pretrained.tokenizer_file,
    )


def begin_with(model: Decoder, weights: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Set the model's parameters from `weights`, but for those of a scheme's own that differ.

    Returns: the scheme's parameters that stay as they started, and those of `weights` that the model has no place for.
    Raises: ConfigError where the decoders differ.
    """
    from posbench.runs.checkpoint import put_weights

    here = {name: p.shape for name, p in model.named_parameters()}
    of_scheme = {name for name in {*here, *weights} if name.startswith("scheme.") or ".kind." in name}
    taken = {n for n in weights if n not in of_scheme or (n in here and here[n] == weights[n].shape)}
    fresh = of_scheme & here.keys() - taken
    put_weights(model, {name: weights[name] for name in taken}, fresh)
    return sorted(fresh), sorted(weights.keys() - taken)
