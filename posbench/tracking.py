"""Where metrics go besides `metrics.jsonl`: nowhere, or Weights & Biases. The one importer of wandb.

    tracker = open_tracker(config, run, run.manifest, notice=print)  # metrics.jsonl is cut back to the checkpoint
    run.update_manifest(wandb=tracker.record)                        # at once, so that a resumed run finds its id
    failed = True
    try:
        tracker.log(row)                                             # each row just appended to metrics.jsonl
        tracker.summary({"loss": 2.71})
        failed = False
    finally:
        tracker.finish(failed)

The run folder is the truth and the wandb run a view of it: an opened tracker first sends the rows of `metrics.jsonl`
that wandb lacks. So a run that was killed, resumed, or evaluated a week later has every row once, and an offline
recording is complete in itself: the newest replaces the older ones.

Tracking never stops a run: what goes wrong here is said once, and the run goes on untracked. The configuration is
scrubbed of credentials, and wandb collects nothing about the machine. docs/wandb.md says what is found in the project.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from posbench.composition.credentials import scrub
from posbench.config import Config, ConfigError
from posbench.runs import Manifest, Run

Notice = Callable[[str], None]
Evaluation = tuple[dict[str, Any], Path]  # the content of eval/<protocol>/<length>.json, and the parquet beside it

_BY_LENGTH = ("fixed", "nonoverlapping", "sliding")  # protocols whose figures make a curve by length
_TABLE = (
    "protocol",
    "split",
    "length",
    "targets_total",
    "nll",
    "perplexity",
    "bits_per_byte",
    "drop",
    "documents",
    "windows",
)
_MAX_NLL = 700.0  # nats; exp of more is no float
_CONNECT_TIMEOUT = 5.0  # seconds for the connection alone; `tracking.init_timeout` bounds the talk that follows


class Tracker:
    """The tracker that tracks nothing (`tracking=none`), and the interface of the one that does."""

    id: str | None = None
    record: dict[str, Any] | None = None  # what the caller stores as `wandb` of run.json

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Single figures of the whole run, such as its final loss."""

    def evaluations(self, stored: list[Evaluation]) -> None:
        """All stored evaluations of the run."""

    def finish(self, failed: bool = False) -> None:
        """Close the run; harmless when called twice."""


def open_tracker(config: Config, run: Run, manifest: Manifest, notice: Notice) -> Tracker:
    """The tracker that `config.tracking` asks for, with the rows of `metrics.jsonl` already in it.

    `manifest` is run.json as it will be (where the folder's own names a wandb run already, that one goes on); `notice`
    prints one line to the user.
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
        _say_once(notice, f"wandb cannot record here ({_first_line(error)}): not tracked, metrics.jsonl has everything")
        return Tracker()
    tracker.replay(run.path / "metrics.jsonl")
    return tracker


def log_evaluation(run: Run, notice: Notice) -> dict[str, Any] | None:
    """Bring the wandb run up to what the run folder holds: every stored evaluation as table, summary keys and curves.

    Tracks as the run was trained to. Returns what the caller stores as `wandb` of run.json (None: never tracked).
    """
    manifest = run.manifest
    tracker = open_tracker(run.config, run, manifest, notice)
    try:
        tracker.summary({"loss": manifest.loss, "bits_per_byte": manifest.bits_per_byte})
        if tracker.record is not None:
            tracker.evaluations(_stored_evaluations(run))
    finally:
        tracker.finish()
    return tracker.record or manifest.wandb


class WandbTracker(Tracker):
    """One wandb run, online or offline. `open_tracker` makes it."""

    def __init__(self, config: Config, run: Run, manifest: Manifest, notice: Notice, offline: bool) -> None:
        """Open the run, or go on with it. Raises: whatever wandb raises when not even an offline run can be made."""
        self._notice = notice
        self._timeout = config.tracking.init_timeout
        self._labels = {"scheme": config.scheme.name, "seed": config.seed}
        self._folder = run.path.parents[1] / "wandb"  # one an experiment: one `wandb sync` takes all its runs
        self._folder.mkdir(parents=True, exist_ok=True)
        self.id = run_id = _stored_id(run) or _run_id(config, run, manifest)
        self._earlier = _recordings(self._folder, run_id)
        arguments: dict[str, Any] = {
            "project": config.tracking.project,
            "entity": config.tracking.entity,
            "group": config.experiment_name,
            "job_type": "train",
            "name": f"{config.scheme.name}/seed={config.seed}",
            "tags": [config.scheme.name, config.model.name, config.data.name],
            "config": _run_config(config, manifest),
            "id": run_id,
            "resume": "allow",
            "reinit": "create_new",  # neither touches nor ends a wandb run of the caller's own
            "dir": str(self._folder.parent.absolute()),
        }
        if offline:
            self._say_offline("WANDB_MODE=offline")
        online = None if offline else self._go_online(arguments)
        self._run: Any = online or _init(arguments, self._timeout, "offline")
        if online:
            self._known = dict(online.summary) if online.resumed else {}
            self._known_rows = online.starting_step if online.resumed else 0  # `step` is 0 until the first row
        else:
            self._known, self._known_rows = _uploaded(self._earlier)
        self._rows = 0  # of metrics.jsonl, gone through `log`
        mode = "online" if online else "offline"
        self.record = {"id": run_id, "project": config.tracking.project, "mode": mode, "folder": str(self._folder)}
        self._guard(self._define_metrics)

    def _go_online(self, arguments: dict[str, Any]) -> Any:
        """The run on the server; None without key or server, which is said once and not tried again in this process."""
        import wandb

        if _Process.offline_because is None:
            server = wandb.setup().settings.base_url
            if not wandb.login(prompt=False, verify=False):
                _Process.offline_because = "no wandb key: `wandb login` stores one"
            elif not _answers(server, min(self._timeout, _CONNECT_TIMEOUT)):
                _Process.offline_because = f"{server} cannot be reached"
            else:
                try:
                    return _init(arguments, self._timeout, "online")
                except Exception as error:
                    _Process.offline_because = f"{server} cannot be used: {_first_line(error)}"
                    wandb.teardown()  # else it goes on trying, and the id stays taken
                    for started in _recordings(self._folder, arguments["id"]) - self._earlier:
                        shutil.rmtree(started, ignore_errors=True)
        self._say_offline(_Process.offline_because)
        return None

    def _say_offline(self, because: str) -> None:
        _say_once(self._notice, f"wandb records offline ({because}); upload with: wandb sync {self._folder}")

    def _define_metrics(self) -> None:
        """Tokens are the x axis of training, the length that of evaluation; axes get no panel of their own."""
        for axis in ("tokens", "eval/length", "eval/position/token", "eval/retrieval/gap"):
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric("train/*", step_metric="tokens")
        self._run.define_metric("validation/*", step_metric="tokens")
        for protocol in _BY_LENGTH:
            self._run.define_metric(f"eval/{protocol}/*", step_metric="eval/length")
        self._run.define_metric("eval/position/nll*", step_metric="eval/position/token")
        self._run.define_metric("eval/retrieval/drop", step_metric="eval/retrieval/gap")

    def replay(self, metrics: Path) -> None:
        """Send the rows of `metrics.jsonl` that the server lacks, then drop the older recordings of such rows."""
        if metrics.is_file():
            for line in metrics.read_text(encoding="utf-8").splitlines():
                self.log(json.loads(line))
        for folder in self._earlier if self._run else ():
            if not _is_uploaded(folder):
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

    def evaluations(self, stored: list[Evaluation]) -> None:
        """All stored evaluations: summary keys and curves of those the server lacks, and with them one table of all."""
        if stored:
            self._guard(lambda: self._evaluations(stored))

    def _evaluations(self, stored: list[Evaluation]) -> None:
        import wandb

        table, is_news = wandb.Table(columns=[*self._labels, *_TABLE]), False
        for result, rows in sorted(stored, key=lambda each: (each[0]["protocol"], each[0]["length"])):
            figures = _figures(result)
            cells = {**result, **figures}
            table.add_data(*self._labels.values(), *(cells.get(name) for name in _TABLE))
            summary = {f"eval/{result['protocol']}/{name}@{result['length']}": value for name, value in figures.items()}
            if not all(self._known.get(key) == value for key, value in summary.items()):
                is_news = True
                self._run.summary.update(summary)
                for point in _curve(result, figures, rows):
                    self._run.log(point)
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
            because = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else _first_line(error)
            rest = f"upload the rest with: wandb sync --include-online {self._folder}"
            _say_once(self._notice, f"wandb did not take all of the run ({because}); {rest}")

    def _guard(self, action: Callable[[], Any]) -> None:
        """Ask something of wandb; after its first error the run goes on untracked."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            because = _first_line(error)
            _say_once(self._notice, f"wandb failed ({because}): tracked no further, metrics.jsonl has everything")
            self.finish(failed=True)


class _Process:
    """What holds for all runs of this process: a sweep waits for an absent server once, and says a thing once."""

    offline_because: ClassVar[str | None] = None
    said: ClassVar[set[str]] = set()


def _say_once(notice: Notice, message: str) -> None:
    if message not in _Process.said:
        _Process.said.add(message)
        notice(message)


def _first_line(error: BaseException) -> str:
    return str(scrub((str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")))


def _init(arguments: Mapping[str, Any], timeout: float, mode: Literal["online", "offline"]) -> Any:
    """`wandb.init`, quiet, without prompts, and with no word about the machine, the code or the environment."""
    import wandb

    settings = wandb.Settings(
        init_timeout=timeout,
        finish_timeout=timeout,
        finish_timeout_raises=True,
        silent=True,
        console="off",
        symlink=False,  # `latest-run` means nothing where many runs share the folder
        program="posbench",  # else the path of the running script
        host="",  # else the name of the machine
        disable_git=True,
        disable_code=True,
        save_code=False,
        allow_offline_artifacts=False,  # a table stays in its run's folder, which may be synced from another machine
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    return wandb.init(**arguments, mode=mode, settings=settings)


def _answers(address: str, timeout: float) -> bool:
    """Whether something listens at `address`, known within `timeout` seconds even where the name server hangs."""
    if getproxies():
        return True  # the proxy's to find out, within `init_timeout`
    url = urlsplit(address)
    place = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout):
            answered.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


def _stored_id(run: Run) -> str | None:
    """The id that run.json keeps, when the run was tracked before."""
    with contextlib.suppress(ConfigError):
        return (run.manifest.wandb or {}).get("id")
    return None


def _run_id(config: Config, run: Run, manifest: Manifest) -> str:
    """The same for one run whenever it is opened; another in another folder, or once a folder is trained anew."""
    words = (config.experiment_name, config.scheme.name, config.seed, run.path.resolve(), manifest.started)
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()[:16]


def _recordings(folder: Path, run_id: str) -> set[Path]:
    """This run's folders: `offline-run-<time>-<id>`, `run-<time>-<id>`, with `-1` ... when two fall into one second."""
    name = re.compile(rf"(offline-)?run-\d+_\d+-{re.escape(run_id)}(-\d+)?")
    return {path for path in folder.iterdir() if name.fullmatch(path.name)}


def _is_uploaded(folder: Path) -> bool:
    """Whether the server has this recording: it was made online, or `wandb sync` left its mark."""
    return not folder.name.startswith("offline-") or any(folder.glob("*.wandb.synced"))


def _uploaded(recordings: Iterable[Path]) -> tuple[dict[str, Any], int]:
    """What the server has by the uploaded ones of these recordings: its summary, and the rows of its history."""
    summary: dict[str, Any] = {}
    rows = 0
    for folder in sorted(
        filter(_is_uploaded, recordings), key=lambda path: path.name.removeprefix("offline-")
    ):  # by time
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
        answer = subprocess.run(command, capture_output=True, timeout=60, check=True)
        found = json.loads(answer.stdout)["summary"]
        here = found.get("_step", -1) + 1
        rows = (
            rows + here if folder.name.startswith("offline-") else max(rows, here)
        )  # online it counts on, offline anew
        summary |= found
    return summary, rows


def _run_config(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What wandb filters and groups by: the configuration without this machine's folders, and facts of the manifest."""
    mapping = config.to_mapping()
    del mapping["runs_dir"], mapping["tracking"], mapping["data"]["cache_dir"]
    facts = ("fingerprints", "versions", "device", "num_parameters", "is_relative")
    content = asdict(manifest)
    return dict(scrub({**mapping, **{name: content[name] for name in facts}}))


def _stored_evaluations(run: Run) -> list[Evaluation]:
    """What lies in the run's eval folder, the damaged left out."""
    results, _ = run.results()
    return [(dict(r.header), run.path / "eval" / r.protocol / f"{r.reading.stem}.parquet") for r in results]


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one evaluation: nll in nats a token, its perplexity, bits a byte; of retrieval the drop of nll."""
    if result["protocol"] == "retrieval":
        return _numbers({"drop": result.get("drop")})
    nll = result.get("nll_mean")
    perplexity = math.exp(nll) if nll is not None and nll < _MAX_NLL else None
    return _numbers({"nll": nll, "perplexity": perplexity, "bits_per_byte": result.get("bits_per_byte")})


def _curve(result: Mapping[str, Any], figures: Mapping[str, Any], rows: Path) -> Iterator[dict[str, Any]]:
    """Points of the charts: one a length, one a gap, and those of loss by position from its stored rows."""
    protocol, length = result["protocol"], result["length"]
    values = {f"eval/{protocol}/{name}": value for name, value in figures.items()}
    if protocol in _BY_LENGTH:
        yield {"eval/length": length, **values}
    elif protocol == "retrieval" and "gap" in result:
        yield {"eval/retrieval/gap": result["gap"], **values}
    elif protocol == "position" and rows.is_file():
        for start, end, nll, targets in _sums(rows, ["bucket_start", "bucket_end"], ["nll", "targets"]):
            yield {"eval/position/token": (start + end - 1) / 2, f"eval/position/nll@{length}": nll / targets}


def _sums(file: Path, by: list[str], of: list[str]) -> list[tuple[Any, ...]]:
    """The columns `of` of a parquet file summed for each value of the columns `by`, in order; none without targets."""
    import pandas as pd

    sums = pd.read_parquet(file, columns=[*by, *of]).groupby(by, as_index=False)[of].sum()
    return [tuple(row) for row in sums[sums["targets"] > 0].itertuples(index=False, name=None)]


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that are null or not finite."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
