"""Kill runs and damage checkpoints, many times: `python -m tests.faults.torture --kills 200 --faults 1000`.

Exits 0 when every killed run ended byte-equal, no bad checkpoint was loaded, and no fault cost more than one interval.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> None:
    """Run both batteries and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="processes to kill")
    parser.add_argument("--faults", type=int, default=1000, help="checkpoints to damage")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the damages")
    asked = parser.parse_args()

    from tests.faults.kills import Battery
    from tests.faults.storage import damage

    with tempfile.TemporaryDirectory(prefix="posbench-torture-") as place:
        battery = Battery(Path(place))
        problems = damage(battery, asked.faults, asked.seed) + battery.kill(asked.kills, asked.seed)
    raise SystemExit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
