"""The wandb server, which may be absent, and what is said about it once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from posbench.tracking.tracker import Notice


class Process:
    """What holds for all runs of this process: a sweep waits for an absent server once, and says a thing once."""

    offline_because: ClassVar[str | None] = None
    said: ClassVar[set[str]] = set()


def say_once(notice: Notice, message: str) -> None:
    if message not in Process.said:
        Process.said.add(message)
        notice(message)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def init(arguments: Mapping[str, Any], timeout: float, mode: Literal["online", "offline"]) -> Any:
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


def answers(address: str, timeout: float) -> bool:
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
