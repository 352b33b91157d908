"""A report in wandb: its folder as an artifact, in the group of its experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def log_report(folder: Path, experiment: str, tracking: Mapping[str, Any]) -> str:
    """Log the folder of a report as an artifact of type `report`; return a sentence that says where it is.

    Arguments: tracking, with `project` and `entity`. wandb's own settings say whether it is online (WANDB_MODE).
    Never raises for what wandb cannot do: the sentence says it.
    """
    import wandb

    project = str(tracking.get("project") or "posbench")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False)
    try:
        with wandb.init(
            project=project,
            entity=tracking.get("entity"),
            group=experiment,
            job_type="report",
            name=f"report of {experiment}",
            dir=str(folder),
            mode=cast(Any, os.environ.get("WANDB_MODE")),  # wandb reads it once a process
            reinit="create_new",
            settings=settings,
        ) as run:
            artifact = wandb.Artifact(f"report-{experiment}", type="report")
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "wandb" not in file.relative_to(folder).parts:
                    artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
            run.log_artifact(artifact)
            where = f" at {run.url}" if run.url else f" offline (upload with: wandb sync {folder / 'wandb'})"
    except Exception as error:
        return f"the report was not sent to wandb ({str(error).splitlines()[0]}); its files are complete"
    return f"the report is in wandb{where}: artifact report-{experiment} of project {project}"
