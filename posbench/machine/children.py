"""Python processes that posbench starts, itself or through a library: none imports from the working folder.

`python -m module` and `python -c` put the working folder first on the path, so a `wandb.py` in a folder that somebody
downloaded would run in place of wandb. `PYTHONSAFEPATH` (Python 3.11) leaves it out, in whatever is started below us:
workers of joblib and torchrun, the compiler's, a launcher's jobs, the reader of wandb's recordings.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]  # where `posbench` is imported from: a folder of packages, or a checkout


def shield_children() -> None:
    """Keep the working folder off the path of every Python process that is started from here on.

    A checkout that is not installed, in which `python -m posbench` was given, stays importable: it is posbench itself.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if HOME not in (Path(place).resolve() for place in sys.path[1:] if place):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
