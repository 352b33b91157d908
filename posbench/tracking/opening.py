"""How a wandb run is opened, resumed and closed: online where there is a server, else offline, which is said once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench.tracking.connection import Process, answers, first_line, init, say_once
from posbench.tracking.recordings import is_uploaded, recordings, uploaded
from posbench.tracking.tracker import Notice

_CONNECT_TIMEOUT = 5.0  # seconds for the connection alone; `tracking.init_timeout` bounds the talk that follows


def chosen_mode() -> str:
    """`online`, `offline` or `disabled`: by WANDB_MODE, else by what `wandb offline` or `wandb disabled` stored."""
    mode = os.environ.get("WANDB_MODE", "").strip().lower()
    if mode == "disabled":
        return mode
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a server that never answers would cost 10 s at exit
    import wandb

    stored = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings.mode
    mode = mode or str(stored)
    return "offline" if mode == "dryrun" else mode


@dataclass(frozen=True)
class Place:
    """Where a run is recorded, and who is told about it."""

    folder: Path  # of recordings
    timeout: float  # seconds, `tracking.init_timeout`
    notice: Notice

    def say_offline(self, because: str) -> None:
        say_once(self.notice, f"wandb records offline ({because}); upload with: wandb sync {self.folder}")


@dataclass(frozen=True)
class Opened:
    """A wandb run that is open, and what the server has of it."""

    place: Place
    run: Any  # wandb's
    is_online: bool
    known: Mapping[str, Any]  # its summary on the server
    known_rows: int  # of its history on the server
    replaced: list[Path]  # earlier recordings that were never uploaded: all of them is recorded again

    def drop_replaced(self) -> None:
        for folder in self.replaced:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self, failed: bool) -> None:
        """Wait for the server no longer than the timeout."""
        try:
            self.run.finish(exit_code=1 if failed else 0)
        except Exception as error:
            seconds = self.place.timeout
            because = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else first_line(error)
            rest = f"upload the rest with: wandb sync --include-online {self.place.folder}"
            say_once(self.place.notice, f"wandb did not receive all of the run ({because}); {rest}")


def open_run(place: Place, about: Mapping[str, Any], labels: Mapping[str, Any], offline: bool) -> Opened:
    """Open a run, or resume it.

    Arguments: about, of `wandb.init`, the id among them; labels, its name, tags and notes, which people change in
    wandb: they are sent for a run that the server does not have, and left alone afterwards.
    Raises: whatever wandb raises when not even an offline run can be made.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    earlier = recordings(place.folder, about["id"])
    about = {
        **about,
        "resume": "allow",
        "reinit": "create_new",  # neither touches nor ends a wandb run of the caller's own
        "dir": str(place.folder.parent.absolute()),
    }
    replaced = [folder for folder in earlier if not is_uploaded(folder)]
    if offline:
        place.say_offline("WANDB_MODE=offline")
    online = None if offline else _go_online(place, about if earlier else {**about, **labels}, earlier)
    if online is None:
        known, rows = uploaded(earlier)
        run = init({**about, **({} if rows else labels)}, place.timeout, "offline")
        return Opened(place, run, False, known, rows, replaced)
    if not online.resumed:
        for name, value in labels.items() if earlier else ():
            if value is not None:
                setattr(online, name, value)
        return Opened(place, online, True, {}, 0, replaced)
    return Opened(place, online, True, dict(online.summary), online.starting_step, replaced)  # `step` is 0 at first


def _go_online(place: Place, arguments: Mapping[str, Any], earlier: set[Path]) -> Any:
    """The run on the server; None without key or server, which is said once and not tried again in this process."""
    import wandb

    if Process.offline_because is None:
        server = wandb.setup().settings.base_url
        if not wandb.login(prompt=False, verify=False):
            Process.offline_because = "no wandb key: `wandb login` stores one"
        elif not answers(server, min(place.timeout, _CONNECT_TIMEOUT)):
            Process.offline_because = f"{server} cannot be reached"
        else:
            try:
                return init(arguments, place.timeout, "online")
            except Exception as error:
                Process.offline_because = f"{server} cannot be used: {first_line(error)}"
                wandb.teardown()  # else it goes on trying, and the id stays taken
                for started in recordings(place.folder, arguments["id"]) - earlier:
                    shutil.rmtree(started, ignore_errors=True)
    place.say_offline(Process.offline_because)
    return None
