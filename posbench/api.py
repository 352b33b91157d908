"""Call the commands as functions: `posbench.train` and `posbench.evaluate` (`posbench.report` is in `reporting`).

They print what the commands print (nothing with `quiet=True`) and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from posbench.composition.compose import compose
from posbench.config import Config
from posbench.evaluation.request import Request
from posbench.runs import Run
from posbench.system.console import console
from posbench.system.options import takes


def train(config: Config | Sequence[str], quiet: bool = False) -> Run:
    """Train the run that `config` describes, resume it if it was interrupted, or return it if it is finished.

    Arguments: config, from `posbench.compose`, or overrides such as `["scheme=vo_rope", "model=tiny"]`.
    Raises: ConfigError for errors that the user can fix; Died if the loss or gradients became infinite or NaN; Stopped
    (a BaseException, not an Exception) after Ctrl-C or SIGTERM, with a checkpoint to resume from.
    """
    # Imported here: torch takes seconds.
    from posbench.training import train as train_here

    if not isinstance(config, Config):
        config = compose(config)
    return train_here(config, console(quiet=True) if quiet else None)


@takes(Request)
def evaluate(
    runs: str | Path | Run | Iterable[str | Path | Run], *, options: Request, quiet: bool = False
) -> pd.DataFrame:
    """Score finished runs at lengths that have no result yet, and return all requested results.

    Arguments: runs, folders of runs or experiments. The options are as in `posbench eval`
    (`posbench.evaluation.request`): lengths, in tokens or as words such as `8k`, and protocols, both by default the
    experiment's; under, options of the scheme for this evaluation only (`rescale=yarn`), scored in addition to the runs
    as trained; data, a text that the runs were not trained on: `"wikitext103"`, or `["files", "data.path=~/notes",
    "data.name=notes"]`, by default scored at the training length only.
    Returns: one row per run, protocol, length and `under`: experiment, scheme, seed, protocol, length, under, data
    (name of the text; empty for the run's own), loss (nats/token), perplexity, bits_per_byte (None if not counted),
    targets (scored tokens), and accuracy and exact (shares of right answers and right problems; None for text).
    Raises: ConfigError if no run can be scored, or if scoring a run failed; earlier results are stored.
    """
    from posbench.evaluation.command import evaluate_runs
    from posbench.evaluation.subjects import runs_to_score
    from posbench.runs.results import perplexity

    sources = [runs] if isinstance(runs, (str, Path, Run)) else list(runs)
    names = [str(source.path if isinstance(source, Run) else source) for source in sources]
    output = console(quiet=quiet)
    evaluations = evaluate_runs(runs_to_score(names, options, Path("runs"), output), options, output)
    return pd.DataFrame(
        {
            "experiment": run.config.experiment_name,
            "scheme": run.config.scheme.name,
            "seed": run.config.seed,
            "protocol": result.protocol,
            "length": result.length,
            "under": " ".join(result.key.options),
            "data": result.key.data or "",
            "loss": result.header["nll_mean"],
            "perplexity": perplexity(result.header["nll_mean"]),
            "bits_per_byte": result.header.get("bits_per_byte"),
            "targets": result.header["targets_total"],
            "accuracy": result.header.get("accuracy"),
            "exact": result.header.get("exact"),
        }
        for run, result in evaluations
    )
