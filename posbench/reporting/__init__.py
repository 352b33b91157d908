"""From run folders to evidence: one row a run, paired statistics, tables, plots and one HTML page.

    frame = results("runs/demo")                      # one row a run
    paths = report("runs/demo", against="kexue-10862")  # prints the tables; table.csv, report.md, report.html, plots
    trend_report(["runs/ladder_s-512k", "runs/ladder_s"])  # how gaps change with size and tokens
    compare(["runs/demo/qk_rope/seed=0", "runs/demo/vo_rope/seed=0"])

The way of the data: `frame` (runs as rows) -> `joining` (which of them may be compared) -> `findings` (losses, gaps,
the chain; by `statistics`) -> `tables` and `plots` -> `report`. This room reads run folders and writes reports; it
never changes a run.
"""

from posbench.reporting.compare import compare
from posbench.reporting.frame import results
from posbench.reporting.published import list_published
from posbench.reporting.report import report, trend_report
from posbench.reporting.scheme_plots import plot_schemes

__all__ = ["compare", "list_published", "plot_schemes", "report", "results", "trend_report"]
