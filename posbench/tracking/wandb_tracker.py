"""One wandb run: what is sent to it, and when."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posbench.composition.credentials import scrub
from posbench.config import Config, ConfigError
from posbench.runs import Manifest, Run, read_metrics
from posbench.tracking.connection import Process, answers, first_line, init, say_once
from posbench.tracking.recordings import is_uploaded, new_id, recordings, stored_id, uploaded
from posbench.tracking.tracker import Evaluated, Notice, Tracker

_CONNECT_TIMEOUT = 5.0  # seconds for the connection alone; `tracking.init_timeout` bounds the talk that follows


def open_tracker(config: Config, run: Run, manifest: Manifest, notice: Notice) -> Tracker:
    """The tracker that `config.tracking` asks for, with the rows of `metrics.jsonl` already in it.

    `manifest` is run.json as it will be; where the folder's own names a wandb run already, that one is resumed.
    Never raises: where the server cannot be had, the run is recorded offline; where that fails too, it is not tracked.
    """
    mode = os.environ.get("WANDB_MODE", "").strip().lower()
    if config.tracking.backend == "none" or mode == "disabled":
        return Tracker()
    try:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a server that never answers would cost 10 s at exit
        import wandb

        mode = mode or wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings.mode
        if mode == "disabled":  # by `wandb disabled`, which writes it to a settings file
            return Tracker()
        tracker = WandbTracker(config, run, manifest, notice, offline=mode in ("offline", "dryrun"))
    except Exception as error:
        say_once(notice, f"wandb cannot record here ({first_line(error)}): not tracked, metrics.jsonl has everything")
        return Tracker()
    try:
        tracker.replay(run.path / "metrics.jsonl")
    except ConfigError as torn:
        say_once(notice, f"{torn}: {run.name} is not tracked")
        tracker.finish(failed=True)
        return Tracker()
    return tracker


class WandbTracker(Tracker):
    """One wandb run, online or offline. `open_tracker` makes it."""

    def __init__(self, config: Config, run: Run, manifest: Manifest, notice: Notice, offline: bool) -> None:
        """Open the run, or resume it. Raises: whatever wandb raises when not even an offline run can be made."""
        self._notice = notice
        self._timeout = config.tracking.init_timeout
        self._labels = {"scheme": config.scheme.name, "seed": config.seed}
        self._folder = run.path.parents[1] / "wandb"  # one an experiment: one `wandb sync` takes all its runs
        self._folder.mkdir(parents=True, exist_ok=True)
        self.id = run_id = stored_id(run) or new_id(config, run, manifest)
        self._earlier = recordings(self._folder, run_id)
        arguments: dict[str, Any] = {
            "project": config.tracking.project,
            "entity": config.tracking.entity,
            "group": config.experiment_name,
            "job_type": "train",
            "name": config.tracking.name or f"{config.scheme.name}/seed={config.seed}",
            "tags": _tags(config),
            "notes": config.tracking.notes,
            "config": _run_config(config, manifest),
            "id": run_id,
            "resume": "allow",
            "reinit": "create_new",  # neither touches nor ends a wandb run of the caller's own
            "dir": str(self._folder.parent.absolute()),
        }
        if offline:
            self._say_offline("WANDB_MODE=offline")
        online = None if offline else self._go_online(arguments)
        self._run: Any = online or init(arguments, self._timeout, "offline")
        if online:
            self._known = dict(online.summary) if online.resumed else {}
            self._known_rows = online.starting_step if online.resumed else 0  # `step` is 0 until the first row
        else:
            self._known, self._known_rows = uploaded(self._earlier)
        self._rows = 0  # of metrics.jsonl, gone through `log`
        mode = "online" if online else "offline"
        self.record = {"id": run_id, "project": config.tracking.project, "mode": mode, "folder": str(self._folder)}
        self._guard(lambda: self._define_charts({"train/*": "tokens", "validation/*": "tokens"}))

    def _go_online(self, arguments: dict[str, Any]) -> Any:
        """The run on the server; None without key or server, which is said once and not tried again in this process."""
        import wandb

        if Process.offline_because is None:
            server = wandb.setup().settings.base_url
            if not wandb.login(prompt=False, verify=False):
                Process.offline_because = "no wandb key: `wandb login` stores one"
            elif not answers(server, min(self._timeout, _CONNECT_TIMEOUT)):
                Process.offline_because = f"{server} cannot be reached"
            else:
                try:
                    return init(arguments, self._timeout, "online")
                except Exception as error:
                    Process.offline_because = f"{server} cannot be used: {first_line(error)}"
                    wandb.teardown()  # else it goes on trying, and the id stays taken
                    for started in recordings(self._folder, arguments["id"]) - self._earlier:
                        shutil.rmtree(started, ignore_errors=True)
        self._say_offline(Process.offline_because)
        return None

    def _say_offline(self, because: str) -> None:
        say_once(self._notice, f"wandb records offline ({because}); upload with: wandb sync {self._folder}")

    def _define_charts(self, charts: Mapping[str, str]) -> None:
        """Name the x axis of each chart; axes get no panel of their own."""
        for axis in dict.fromkeys(charts.values()):
            self._run.define_metric(axis, hidden=True)
        for metrics, axis in charts.items():
            self._run.define_metric(metrics, step_metric=axis)

    def replay(self, metrics: Path) -> None:
        """Send the rows of `metrics.jsonl` that the server lacks, then drop the older recordings of such rows."""
        for row in read_metrics(metrics):
            self.log(row)
        for folder in self._earlier if self._run else ():
            if not is_uploaded(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl as `train/loss`, `validation/loss` ... at `tokens`, unless the server has it."""
        self._rows += 1
        if self._rows <= self._known_rows:
            return  # a resumed run repeats its rows exactly, so counting them tells which are new
        values = {
            f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step", "tokens")
        }
        self._guard(lambda: self._run.log({"tokens": row["tokens"], **_numbers(values)}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Single figures of the whole run, such as its final loss."""
        self._guard(lambda: self._run.summary.update(_numbers(values)))

    def evaluations(self, stored: Sequence[Evaluated], columns: Sequence[str], charts: Mapping[str, str]) -> None:
        """All stored evaluations: summary keys and curves of those the server lacks, and with them one table of all."""
        if stored:
            self._guard(lambda: self._evaluations(stored, columns, charts))

    def _evaluations(self, stored: Sequence[Evaluated], columns: Sequence[str], charts: Mapping[str, str]) -> None:
        import wandb

        self._define_charts(charts)
        table, is_news = wandb.Table(columns=[*self._labels, *columns]), False
        for evaluated in stored:
            table.add_data(*self._labels.values(), *(evaluated.row.get(name) for name in columns))
            figures = _numbers(evaluated.summary)
            if not all(self._known.get(key) == value for key, value in figures.items()):
                is_news = True
                self._run.summary.update(figures)
                for point in evaluated.points:
                    self._run.log(_numbers(point))
        if is_news:
            self._run.log({"eval/results": table})

    def finish(self, failed: bool = False) -> None:
        """Close the run, waiting for the server no longer than `tracking.init_timeout`; harmless when called twice."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=1 if failed else 0)
        except Exception as error:
            because = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else first_line(error)
            rest = f"upload the rest with: wandb sync --include-online {self._folder}"
            say_once(self._notice, f"wandb did not take all of the run ({because}); {rest}")

    def _guard(self, action: Callable[[], Any]) -> None:
        """Ask something of wandb; after its first error the run continues untracked."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            because = first_line(error)
            say_once(self._notice, f"wandb failed ({because}): tracked no further, metrics.jsonl has everything")
            self.finish(failed=True)


def _tags(config: Config) -> list[str]:
    """Each once: wandb refuses a run with the same tag twice."""
    return list(dict.fromkeys([config.scheme.name, config.model.name, config.data.name, *config.tracking.tags]))


def _run_config(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What wandb filters and groups by: the configuration without this machine's folders, and facts of the manifest."""
    mapping = config.to_mapping()
    del mapping["runs_dir"], mapping["tracking"], mapping["data"]["cache_dir"]
    facts = ("fingerprints", "versions", "device", "num_parameters", "is_relative")
    content = asdict(manifest)
    return dict(scrub({**mapping, **{name: content[name] for name in facts}}))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that are null or not finite."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
