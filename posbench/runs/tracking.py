"""Each run as a run of Weights & Biases, and a report as an artifact. The one module that imports wandb.

    tracker = open_tracker(config, run, run.manifest, say)
    run.update_manifest(wandb=tracker.record)  # its id, so that it is resumed when the run is
    tracker.log_missing(run.logged)            # of a run that is resumed
    tracker.log(row)                           # each new row of metrics.jsonl
    tracker.summary({"loss": 2.71})
    tracker.finish()

The run folder has everything; the wandb run is a copy of it. An error of wandb is printed, and the run continues
untracked. Offline is wandb's own business: WANDB_MODE chooses it, `wandb sync` uploads a recording.
A run that is resumed logs the rows since its last checkpoint again, and earlier rows that a kill kept from wandb.
docs/experiments.md says what is found where.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posbench.config import Config, chosen_experiment
from posbench.runs import Manifest, Run
from posbench.system.console import Say

_unreachable: dict[str, str] = {}  # servers that did not answer in this process, which are not asked again, and why


class Tracker:
    """A run's run of wandb. Without one, as with `tracking=none`, every method does nothing.

    `record` is what run.json keeps as `wandb`: id, project, mode (online, offline) and the folder of recordings.
    """

    def __init__(self, wandb_run: Any = None, record: dict[str, Any] | None = None, say: Say = print) -> None:
        self.record = record
        self._run, self._say = wandb_run, say

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, as `train/loss`, `validation/loss` and so on at `tokens`."""
        figures = {f"{row['kind']}/{name}": row[name] for name in row if name not in ("kind", "step", "tokens")}
        self._ask(lambda: self._run.log({"tokens": row["tokens"], **_finite(figures)}))

    def log_missing(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log those of `rows`, which earlier processes wrote, that wandb lacks.

        wandb writes a recording every 15 seconds, so a kill loses the newest rows. The server counts the rows it has.
        """

        def log() -> None:
            recorded = _recorded(self._run) if rows and self._run.offline else set()
            for row in rows[self._run.step :]:
                if (row["tokens"], row["kind"]) not in recorded:
                    self.log(row)

        self._ask(log)

    def summary(self, figures: Mapping[str, float | None]) -> None:
        """Single figures of the whole run, such as its final loss. What is None or not finite is left out."""
        self._ask(lambda: self._run.summary.update(_finite(figures)))

    def finish(self, failed: bool = False) -> None:
        """Close the run, and wait for the server no longer than `tracking.init_timeout`."""
        self._ask(lambda: self._run.finish(exit_code=int(failed)))
        self._run = None

    def _ask(self, action: Callable[[], object]) -> None:
        """Call wandb; after its first error the run continues untracked."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._run = None
            self._say(f"wandb failed ({_first_line(error)}): no longer tracked, metrics.jsonl has everything")


def open_tracker(config: Config, run: Run, manifest: Manifest, say: Say) -> Tracker:
    """The tracker that `config.tracking` asks for; the wandb run that `manifest` names is resumed.

    Never raises: without a key or a server the run is recorded offline; where that fails too, it is not tracked.
    """
    tracking = config.tracking
    if tracking.backend == "none" or os.environ.get("WANDB_MODE") == "disabled":
        return Tracker()
    folder = run.path.parents[1] / "wandb"  # one of an experiment, so that one `wandb sync` takes all its runs
    run_id = (manifest.wandb or {}).get("id") or secrets.token_hex(8)
    mapping, facts = config.to_mapping(), asdict(manifest)
    del mapping["runs_dir"], mapping["tracking"]
    mapping["data"].pop("cache_dir", None)
    mapping["experiment"] = {"name": config.experiment_name, **chosen_experiment(mapping, config.experiment_name)}
    facts = {name: facts[name] for name in ("fingerprints", "versions", "device", "num_parameters", "is_relative")}
    try:
        wandb_run = _init(
            tracking.init_timeout,
            say,
            id=run_id,
            resume="allow",
            dir=folder.parent,
            project=tracking.project,
            entity=tracking.entity,
            group=config.experiment_name,
            job_type="train",
            name=tracking.name or f"{config.scheme.name}/seed={config.seed:02d}",
            # each once: wandb refuses a run with the same tag twice
            tags=list(dict.fromkeys([config.scheme.name, config.model.name, config.data.name, *tracking.tags])),
            notes=tracking.notes,
            config={**mapping, **facts},
        )
        for kind in ("train", "validation", "order"):
            wandb_run.define_metric(f"{kind}/*", step_metric="tokens")
    except Exception as error:
        say(f"wandb cannot record here ({_first_line(error)}): not tracked, metrics.jsonl has everything")
        return Tracker()
    mode = "offline" if wandb_run.offline else "online"
    record = {"id": run_id, "project": tracking.project, "mode": mode, "folder": str(folder)}
    return Tracker(wandb_run, record, say)


def _recorded(wandb_run: Any) -> set[tuple[int, str]]:
    """Return (tokens, kind) of each row in the recordings that earlier processes made of a run."""
    rows = set()
    for recording in Path(wandb_run.settings.wandb_dir).glob(f"*-{wandb_run.id}"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(recording)]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
            record = json.loads(line)
            if record["type"] == "history":
                row = record["history"]["item"]
                rows |= {(row["tokens"], name.partition("/")[0]) for name in row if "/" in name}
    return rows


def offline_hint(folder: str | Path) -> str:
    """How to upload what wandb recorded in a folder."""
    return f"wandb recorded offline; upload with: wandb sync {folder}"


def log_report(folder: Path, experiment: str, tracking: Mapping[str, Any]) -> str:
    """Log the folder of a report as an artifact `report-<experiment>`; return a sentence that says where it is.

    Arguments: tracking, the configuration of a run, with `project` and `entity`.
    Never raises for what wandb cannot do: the sentence says it.
    """
    project = str(tracking.get("project") or "posbench")
    about = {"project": project, "entity": tracking.get("entity"), "group": experiment, "job_type": "report"}
    told: list[str] = []
    try:
        import wandb

        with _init(20.0, told.append, **about, name=f"report of {experiment}", dir=folder) as run:
            artifact = wandb.Artifact(f"report-{experiment}", type="report")
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "wandb" not in file.relative_to(folder).parts:
                    artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
            run.log_artifact(artifact)
            where = offline_hint(folder / "wandb") if run.offline else f"the report is at {run.url}"
    except Exception as error:
        return f"the report was not sent to wandb ({_first_line(error)}); its files are complete"
    return f"artifact report-{experiment} of project {project}: {where}"


def _init(timeout: float, say: Say, **about: Any) -> Any:
    """`wandb.init`: quiet, without prompts, and without a word about the machine, the code or the environment.

    Offline by WANDB_MODE, without a key, and where the server does not answer within `timeout` seconds.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a server that never answers would cost 10 s at exit
    import wandb

    settings = wandb.Settings(
        init_timeout=timeout,
        finish_timeout=timeout,
        finish_timeout_raises=True,
        silent=True,
        console="off",
        symlink=False,
        program="posbench",
        host="",
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    about = {**about, "dir": str(about["dir"]), "reinit": "create_new", "settings": settings}
    stored = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings  # by `wandb offline`, say
    mode: Any = os.environ.get("WANDB_MODE") or stored.mode
    server = str(stored.base_url)
    if mode == "online" and server not in _unreachable and wandb.login(prompt=False, verify=False):
        try:
            return wandb.init(**about, mode="online")
        except Exception as error:
            _unreachable[server] = _first_line(error)
            say(f"wandb records offline: {server} cannot be used ({_unreachable[server]})")
            wandb.teardown()  # else it goes on trying, and the id stays taken
    return wandb.init(**about, mode="offline" if mode == "online" else mode)


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
