"""Where a branch begins: at the checkpoint that its trunk kept of the step where the branch's decay begins.

Until then the two are the same run, so a branch that begins there ends with the same bytes as one that is trained from
its first step: weights, moments and rows of metrics (but for times).
"""

from __future__ import annotations

from pathlib import Path

from posbench.config import Config, ConfigError
from posbench.runs import Manifest, Run, checkpoint, fingerprints
from posbench.runs.manifest import Fingerprints
from posbench.training.loop import Notice

_OWN = {"train.tokens", "train.num_steps"}  # of the identity: what a branch differs in from its trunk
_SAME = ("data", "tokenizer", "code", "scheme_code", "initial_weights")  # of the fingerprints
_ROWS = ("log_every", "steps_between_validations", "validation_tokens")  # of the training: which rows are logged


def trunk_checkpoint(config: Config, manifest: Manifest, name: str, notice: Notice) -> Path | None:
    """The trunk's checkpoint from which the run of `config` begins; None where it begins with its first step.

    Arguments: manifest, of the run before its first step; name, of the run; notice is told which it is, and why.
    """
    if not config.train.is_branch:
        return None
    step = config.train.decay_begins
    found, why = None, "its name is not that of a branch"
    if config.trunk_name is not None:
        trunk = Run(Path(config.runs_dir) / config.trunk_name / config.scheme.name / f"seed={config.seed}")
        try:
            found = checkpoint.at_step(trunk.path / "checkpoints", step)
            missing = f"{trunk.path} has no checkpoint of step {step}"
            why = _why_not(found, trunk, config, manifest) if found else missing
        except (checkpoint.TornCheckpoint, ConfigError) as error:
            why = f"the checkpoint of step {step} in {trunk.path} cannot be used: {error}"
    if found is None or why:
        notice(f"{name}: trained from its first step ({why})")
        return None
    notice(f"{name}: begins at step {step} of {trunk.name}")
    return found


def _why_not(found: Path, trunk: Run, config: Config, manifest: Manifest) -> str:
    """What a checkpoint of the trunk differs in from this run at that step; empty where it is the same."""
    before = checkpoint.manifest_in(found)
    here, there = ({k: v for k, v in each.identity.items() if k not in _OWN} for each in (manifest, before))
    differing = fingerprints.differences(there, here)
    differing += [f"fingerprint of {name}" for name in _SAME if _print(before, name) != _print(manifest, name)]
    settings = (trunk.config.train, config.train)
    differing += [f"train.{name}" for name in _ROWS if len({getattr(each, name) for each in settings}) > 1]
    return f"{trunk.path} differs in {'; '.join(differing)}" if differing else ""


def _print(manifest: Manifest, name: str) -> object:
    prints: Fingerprints = manifest.fingerprints
    return getattr(prints, name)
