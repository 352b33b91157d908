"""The wandb run of one training run: what is sent to it, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posbench.config import Config, ConfigError
from posbench.runs import FINISHED, Manifest, Run, read_metrics
from posbench.tracking.connection import first_line, say_once
from posbench.tracking.opening import Opened, Place, chosen_mode, open_run
from posbench.tracking.recordings import figures_in, new_id, single_figures, stored_id
from posbench.tracking.tracker import Evaluated, LineChart, Notice, Tracker

_COMPARED = ("loss",)  # figures that are also logged, once: wandb draws a metric of one value as a bar for each run


def open_tracker(config: Config, run: Run, manifest: Manifest, notice: Notice) -> Tracker:
    """The tracker that `config.tracking` asks for, with the rows of `metrics.jsonl` already in it.

    `manifest` is run.json as it will be; where the folder's own names a wandb run already, that one is resumed.
    Never raises: where the server cannot be had, the run is recorded offline; where that fails too, it is not tracked.
    """
    if config.tracking.backend == "none":
        return Tracker()
    try:
        mode = chosen_mode()
        if mode == "disabled":
            return Tracker()
        tracker = WandbTracker(config, run, manifest, notice, offline=mode == "offline")
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
        self._cells = {"scheme": config.scheme.name, "seed": config.seed}
        folder = recordings_folder(run)
        self.id = run_id = stored_id(run) or new_id(config, run, manifest)
        about = {
            "project": config.tracking.project,
            "entity": config.tracking.entity,
            "group": config.experiment_name,
            "job_type": "train",
            "config": _run_config(config, manifest),
            "id": run_id,
        }
        labels = {"name": run_name(config), "tags": _tags(config), "notes": config.tracking.notes}
        self._opened: Opened = open_run(Place(folder, config.tracking.init_timeout, notice), about, labels, offline)
        self._run: Any = self._opened.run
        self._rows = 0  # of metrics.jsonl, gone through `log`
        mode = "online" if self._opened.is_online else "offline"
        self.record = {"id": run_id, "project": config.tracking.project, "mode": mode, "folder": str(folder)}
        self._guard(lambda: self._define_charts({"train/*": "tokens", "validation/*": "tokens"}))
        if manifest.status == FINISHED and not self._opened.is_online:
            self._guard(self._carry_figures)

    def _carry_figures(self) -> None:
        """An offline recording's summary takes the place of the server's: it begins with all that was there."""
        self._run.summary.update({**single_figures(self._opened.known), **figures_in(self._opened.replaced)})

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
        if self._run:
            self._opened.drop_replaced()

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl as `train/loss`, `validation/loss` ... at `tokens`, unless the server has it."""
        self._rows += 1
        if self._rows <= self._opened.known_rows:
            return  # a resumed run repeats its rows exactly, so counting them tells which are new
        values = {
            f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step", "tokens")
        }
        self._guard(lambda: self._run.log({"tokens": row["tokens"], **_numbers(values)}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Single figures of the whole run, such as its final loss, which is also a bar beside those of other runs."""
        self._guard(lambda: self._run.summary.update(_numbers(values)))
        bars = _numbers({f"comparison/{name}": values.get(name) for name in _COMPARED})
        if not self._has(bars):
            self._guard(lambda: self._run.log(bars))

    def evaluations(
        self,
        stored: Sequence[Evaluated],
        columns: Sequence[str],
        axes: Mapping[str, str],
        charts: Mapping[str, LineChart],
    ) -> None:
        """All stored evaluations: summary keys and points of those the server lacks; with them the table and charts.

        Offline table and charts are logged each time, because wandb finds them by the summary.
        """
        if stored:
            self._guard(lambda: self._evaluations(stored, columns, axes, charts))

    def _evaluations(
        self,
        stored: Sequence[Evaluated],
        columns: Sequence[str],
        axes: Mapping[str, str],
        charts: Mapping[str, LineChart],
    ) -> None:
        import wandb

        self._define_charts(axes)
        table, is_news = wandb.Table(columns=[*self._cells, *columns]), False
        for evaluated in stored:
            table.add_data(*self._cells.values(), *(evaluated.row.get(name) for name in columns))
            figures = _numbers(evaluated.summary)
            if not self._has(figures):
                is_news = True
                self._run.summary.update(figures)
                for point in evaluated.points:
                    self._run.log(_numbers(point))
        if is_news or not self._opened.is_online:
            self._run.log({"eval/results": table, **{key: _drawn(chart) for key, chart in charts.items()}})

    def _has(self, figures: Mapping[str, Any]) -> bool:
        """Whether the server has all of these."""
        return all(self._opened.known.get(key) == value for key, value in figures.items())

    def finish(self, failed: bool = False) -> None:
        """Close the run, waiting for the server no longer than `tracking.init_timeout`; harmless when called twice."""
        run, self._run = self._run, None
        if run is not None:
            self._opened.close(failed)

    def _guard(self, action: Callable[[], Any]) -> None:
        """Ask something of wandb; after its first error the run continues untracked."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            because = first_line(error)
            say_once(self._notice, f"wandb failed ({because}): no longer tracked, metrics.jsonl has everything")
            self.finish(failed=True)


def recordings_folder(run: Run) -> Path:
    """Where wandb records the run: one folder an experiment, so that one `wandb sync` takes all its runs."""
    return run.path.parents[1] / "wandb"


def run_name(config: Config) -> str:
    """`vo_rope/seed=03`: a list sorted by name has the seeds of a scheme together and in order."""
    return config.tracking.name or f"{config.scheme.name}/seed={config.seed:02d}"


def _tags(config: Config) -> list[str]:
    """Each once: wandb refuses a run with the same tag twice."""
    return list(dict.fromkeys([config.scheme.name, config.model.name, config.data.name, *config.tracking.tags]))


def _run_config(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What wandb filters and groups by: the configuration without this machine's folders, and facts of the manifest."""
    mapping = config.to_mapping()
    del mapping["runs_dir"], mapping["tracking"], mapping["data"]["cache_dir"]
    facts = ("fingerprints", "versions", "device", "num_parameters", "is_relative")
    content = asdict(manifest)
    return {**mapping, **{name: content[name] for name in facts}}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that are null or not finite."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _drawn(chart: LineChart) -> Any:
    """As wandb's own line chart: a colour for each run that is shown, a dash for each value of `dash`."""
    import wandb

    table = wandb.Table(columns=list(chart.columns), data=[list(row) for row in chart.rows])
    return wandb.plot.line(table, x=chart.x, y=chart.y, stroke=chart.dash, title=chart.title)
