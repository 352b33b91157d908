"""The commands as functions: `posbench.train`, `posbench.evaluate`; `posbench.report` is that of `posbench.reporting`.

They print as the commands do (`quiet=True`: nothing), raise what the commands say, and return what was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posbench.composition import compose
from posbench.config import Config
from posbench.machine.signals import is_worker
from posbench.runs import Run, run_folder

if TYPE_CHECKING:
    import pandas as pd

    from posbench.machine.terminal import Terminal


def train(config: Config | Sequence[str], quiet: bool = False) -> Run:
    """Train the run that `config` names, resume it where it was cut off, or find it finished.

    Arguments: config, of `posbench.compose`, or its words, such as `["scheme=vo_rope", "model=tiny"]`.
    Raises: ConfigError for what the user can fix; Died where the numbers went wrong; Stopped, which is no Exception,
    after Ctrl-C or SIGTERM, with a checkpoint left to resume from.
    """
    from posbench.machine.device import spread
    from posbench.training import train as train_here
    from posbench.training.launch import launch
    from posbench.training.memory_check import check_memory

    if not isinstance(config, Config):
        config = compose(config)
    spread(config)
    check_memory(config)
    if config.launch.nproc > 1 and not is_worker():
        launch(config)
        return Run(run_folder(config))
    return train_here(config, _terminal() if quiet else None)


def evaluate(
    runs: str | Path | Run | Iterable[str | Path | Run],
    lengths: Iterable[int | str] = (),
    protocols: Iterable[str] = (),
    under: Iterable[str] = (),
    at_step: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    again: bool = False,
    jobs: int = 1,
    quiet: bool = False,
    data: str | Iterable[str] = (),
) -> pd.DataFrame:
    """Score finished runs at lengths that they have no result for, and return all results that were asked for.

    Arguments: runs, folders of runs or experiments; lengths, tokens or words such as `8k`, by default those of the
    run's experiment, as `protocols`; under, words of the scheme that hold here alone (`rescale=yarn`); data, another
    text than the runs were trained on: `"wikitext103"`, or `["files", "data.path=~/notes", "data.name=notes"]`, by
    default scored at the training length alone; the others as of `posbench eval`.
    Returns: one row a run, protocol, length and `under`: experiment, scheme, seed, protocol, length, under, data (the
    name of the text; empty: the run's own), loss (nats/token), perplexity, bits_per_byte (None where a protocol counts
    no bytes), targets.
    Raises: ConfigError where no run can be scored, or one of them could not be; what was scored is stored.
    """
    import pandas as pd

    from posbench.evaluation import Question, parse_length, text_named
    from posbench.evaluation.command import evaluate_runs
    from posbench.machine.terminal import Terminal
    from posbench.runs.named import runs_named
    from posbench.runs.readings import perplexity

    question = Question(
        lengths=tuple(parse_length(str(length)) for length in lengths),
        protocols=tuple(protocols),
        under=tuple(under),
        data=text_named([data] if isinstance(data, str) else list(data)),
        at_step=at_step,
        device=device,
        dtype=dtype,
        again=again,
    )
    several = [runs] if isinstance(runs, (str, Path, Run)) else list(runs)
    found = runs_named([str(each.path if isinstance(each, Run) else each) for each in several], Path("runs"))
    answers = evaluate_runs(found, question, _terminal() if quiet else Terminal(), jobs=jobs)
    return pd.DataFrame(
        {
            "experiment": answer.experiment,
            "scheme": answer.scheme,
            "seed": answer.seed,
            "protocol": answer.result.protocol,
            "length": answer.result.length,
            "under": " ".join(answer.result.reading.words),
            "data": answer.result.reading.data or "",
            "loss": answer.result.header["nll_mean"],
            "perplexity": perplexity(answer.result.header["nll_mean"]),
            "bits_per_byte": answer.result.header.get("bits_per_byte"),
            "targets": answer.result.header["targets_total"],
        }
        for answer in answers
    )


def _terminal() -> Terminal:
    from posbench.machine.terminal import Terminal

    return Terminal(quiet=True)
