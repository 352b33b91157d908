"""Log runs to Weights & Biases, and reports as artifacts. Only this module imports wandb.

    tracker = open_tracker(config, run, run.manifest, say)
    run.update_manifest(wandb=tracker.record)  # the wandb id, so that a resumed run continues its wandb run
    tracker.log_missing(run.logged)            # if the run was resumed
    tracker.log(row)                           # each new row of metrics.jsonl
    tracker.summary({"loss": 2.71})
    tracker.finish()

The run folder has everything. Errors of wandb are printed, and the run continues untracked.
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

_unreachable: dict[str, str] = {}  # server -> error; this process does not ask these servers again


class Tracker:
    """The wandb run of a posbench run. Without one, as with `tracking=none`, every method does nothing.

    `record` has id, project, mode (online, offline) and the folder of recordings.
    """

    def __init__(self, wandb_run: Any = None, record: dict[str, Any] | None = None, say: Say = print) -> None:
        self.record = record
        self._run, self._say = wandb_run, say

    def log(self, row: Mapping[str, Any]) -> None:
        """Log one line of metrics.jsonl as `train/loss`, `validation/loss` and so on at `tokens`."""
        figures = {f"{row['kind']}/{name}": row[name] for name in row if name not in ("kind", "step", "tokens")}
        self._ask(lambda: self._run.log({"tokens": row["tokens"], **_finite(figures)}))

    def log_missing(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the metrics of earlier processes that wandb does not have."""

        # wandb writes to disk every 15 seconds, so a killed process loses its newest rows. Online, the server's count
        # of rows tells which are missing; offline, the recordings do.
        def log() -> None:
            recorded = set()
            if rows and self._run.offline:
                recorded = _recorded(self._run)
            # `step` is the count of rows that the server has.
            for row in rows[self._run.step :]:
                if (row["tokens"], row["kind"]) not in recorded:
                    self.log(row)

        self._ask(log)

    def summary(self, figures: Mapping[str, float | None]) -> None:
        """Log numbers of the whole run, such as its final loss; None, infinite and NaN are skipped."""
        self._ask(lambda: self._run.summary.update(_finite(figures)))

    def finish(self, failed: bool = False) -> None:
        """Close the wandb run, as failed or not, within `tracking.init_timeout` seconds."""
        self._ask(lambda: self._run.finish(exit_code=int(failed)))
        # A finished wandb run takes no more rows.
        self._run = None

    def _ask(self, action: Callable[[], object]) -> None:
        # An error of wandb must never stop training.
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._run = None
            self._say(f"wandb failed ({_first_line(error)}): no longer tracked, metrics.jsonl has everything")


def open_tracker(config: Config, run: Run, manifest: Manifest, say: Say) -> Tracker:
    """Return the tracker that `config.tracking` asks for. If `manifest` names a wandb run, that one is resumed.

    Never raises: without a key or a server the run is recorded offline; if that fails too, the tracker does nothing.
    """
    tracking = config.tracking
    if tracking.backend == "none" or os.environ.get("WANDB_MODE") == "disabled":
        return Tracker()
    folder = run.experiment_folder / "wandb"  # one per experiment, so that one `wandb sync` uploads all its runs
    # A resumed run keeps its id, so it continues its wandb run.
    run_id = (manifest.wandb or {}).get("id") or secrets.token_hex(8)
    mapping, facts = config.to_mapping(), asdict(manifest)
    # Folders of this machine, and how the run is tracked, are not uploaded.
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
            name=tracking.name or f"{config.scheme.name}/seed={config.seed}",
            # without duplicates, because wandb refuses a run that has the same tag twice
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
    # Return (tokens, kind) of the rows in the recordings of a wandb run on this disk.
    rows = set()
    # wandb's own program reads its recordings. Keys are `kind/figure`, as `Tracker.log` writes them, and `tokens`.
    for recording in Path(wandb_run.settings.wandb_dir).glob(f"*-{wandb_run.id}"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(recording)]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
            record = json.loads(line)
            if record["type"] == "history":
                row = record["history"]["item"]
                rows |= {(row["tokens"], name.partition("/")[0]) for name in row if "/" in name}
    return rows


def offline_hint(folder: str | Path) -> str:
    """Return a sentence that says how to upload what wandb recorded in a folder."""
    return f"wandb recorded offline; upload with: wandb sync {folder}"


def log_report(folder: Path, experiment: str, tracking: Mapping[str, Any]) -> str:
    """Log a report's folder as the wandb artifact `report-<experiment>`; return a sentence with its location.

    Never raises: if wandb fails, the sentence says so.
    """
    project = str(tracking.get("project") or "posbench")
    about = {"project": project, "entity": tracking.get("entity"), "group": experiment, "job_type": "report"}
    ignored_messages: list[str] = []  # the returned sentence says it if wandb records offline
    try:
        import wandb

        with _init(20.0, ignored_messages.append, **about, name=f"report of {experiment}", dir=folder) as run:
            artifact = wandb.Artifact(f"report-{experiment}", type="report")
            for file in sorted(folder.rglob("*")):
                # wandb keeps its own recordings in a folder of this name.
                if file.is_file() and "wandb" not in file.relative_to(folder).parts:
                    artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
            run.log_artifact(artifact)
            location = f"the report is at {run.url}"
            if run.offline:
                location = offline_hint(folder / "wandb")
    except Exception as error:
        return f"the report was not sent to wandb ({_first_line(error)}); its files are complete"
    return f"artifact report-{experiment} of project {project}: {location}"


def _init(timeout: float, say: Say, **about: Any) -> Any:
    """Begin a wandb run: offline if WANDB_MODE says so, without a key, or if the server does not answer in time.

    Arguments: timeout, in seconds; about, arguments of `wandb.init`. Raises: errors of wandb.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise an unreachable server costs 10 s at exit
    import wandb

    # Nothing about the machine, code or environment is uploaded.
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
    stored = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings  # such as from `wandb offline`
    mode: Any = os.environ.get("WANDB_MODE") or stored.mode
    server = str(stored.base_url)
    if mode == "online" and server not in _unreachable and wandb.login(prompt=False, verify=False):
        try:
            return wandb.init(**about, mode="online")
        except Exception as error:
            _unreachable[server] = _first_line(error)
            say(f"wandb records offline: {server} cannot be used ({_unreachable[server]})")
            wandb.teardown()  # otherwise it keeps trying, and the id stays in use
    # There is no key, or the server cannot be used.
    if mode == "online":
        mode = "offline"
    return wandb.init(**about, mode=mode)


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
