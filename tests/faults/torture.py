"""Kill runs many times: `python -m tests.faults.torture --kills 200`. Exits 0 when every run ended byte-equal."""

import argparse
import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main():
    """Kill runs and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args()

    from tests.faults.kills import Battery

    with tempfile.TemporaryDirectory(prefix="posbench-torture-") as place:
        battery = Battery(Path(place))
        problems = battery.kill(asked.kills, asked.seed)
    raise SystemExit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
