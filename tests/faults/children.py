"""Work done in a forked child, which may be killed at a chosen moment.

Forking saves the seconds that importing torch takes. The parent imports and forks, and computes nothing itself.
"""

import functools
import importlib
import os
import signal
import sys
import time
import traceback

LOG = "children.log"


def in_child(work, folder, kill_after=None):
    """Run `work` in a child and wait for it, or kill it after `kill_after` seconds. What it prints goes to a log.

    Returns: its exit status, 0 for success, or minus the number of the signal that ended it.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            work()
            os._exit(0)
        except SystemExit as left:
            os._exit(left.code if isinstance(left.code, int) else 1)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # of a child that has ended: no effect, its status is still to be fetched
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_all():
    """Import what a run imports, before the first fork."""
    import torch

    for module in (
        "pandas",
        "pyarrow.parquet",
        "safetensors.torch",
        "torch._dynamo",
        "posbench.evaluation.protocols",
        "posbench.training",
    ):
        importlib.import_module(module)
    torch.set_num_threads(1)


class Moments:
    """The moments of a run at which something is half done: before and after each write, rename, sync, step ...

    `at` kills this process at its n-th moment (0-based); without it the moments are counted, and named in `seen`.
    """

    def __init__(self, at=None):
        self.at = at
        self.seen = []

    def happen(self, name):
        """Count one more moment, and kill the process if it is the chosen one."""
        if len(self.seen) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(name)

    def watch(self):
        """Install hooks, for the rest of this process, into every call whose middle may matter."""
        import pyarrow.parquet

        from posbench import runs
        from posbench.model.decoder import Decoder
        from posbench.runs import checkpoint
        from posbench.training.optimizers import AdamW

        sys.addaudithook(self._opened)
        for place, name in (
            (os, "fsync"),
            (os, "rename"),
            (os, "replace"),
            (os, "mkdir"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "pwrite"),
            (checkpoint, "save_file"),
            (pyarrow.parquet, "write_table"),
            (runs, "append_metrics"),
            (Decoder, "nll"),
            (AdamW, "step"),
        ):
            setattr(place, name, self._around(name, getattr(place, name)))

    def _around(self, name, original):
        @functools.wraps(original)
        def watched(*arguments, **keywords):
            self.happen(f"before {name}")
            result = original(*arguments, **keywords)
            self.happen(f"after {name}")
            return result

        return watched

    def _opened(self, event, arguments):
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.happen("open to write")
