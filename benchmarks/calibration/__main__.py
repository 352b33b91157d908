"""How often the tests and intervals of a report are right: trials with a known truth.

    python -m benchmarks.calibration                        # a minute and a half of one core; prints Markdown
    python -m benchmarks.calibration --only intervals       # or pairs
    python -m benchmarks.calibration --cells > cells.csv    # every cell of the pairs: noise, truth, seeds, rule, rate

The seed of the trials is not one under which rules were tried out, and `--seed` takes another.
"""

from __future__ import annotations

import argparse
import csv
import sys

from benchmarks.calibration import HELD_OUT, intervals, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1500, help="of a cell; intervals take twice as many")
    parser.add_argument("--seed", type=int, default=HELD_OUT)
    parser.add_argument("--only", choices=["pairs", "intervals"])
    parser.add_argument("--cells", action="store_true", help="every cell of the pairs as CSV, in place of the tables")
    options = parser.parse_args()
    if options.cells:
        table = csv.writer(sys.stdout)
        table.writerow(["what", "noise", "truth", "seeds", "rule", "rate"])
        found = pairs.cells(options.trials, options.seed)
        table.writerows([c.what, c.noise, c.truth, c.seeds, c.rule, f"{c.rate:.4f}"] for c in found)
        return
    if options.only != "intervals":
        print(pairs.markdown(list(pairs.cells(options.trials, options.seed))))
    if options.only != "pairs":
        for held in (intervals.over_documents, intervals.over_seeds, intervals.together):
            print(intervals.markdown(list(held(2 * options.trials, options.seed))))


if __name__ == "__main__":
    main()
