"""posbench: where should position go? One small decoder, many position schemes, one fair comparison.

config = posbench.compose(["scheme=vo_rope", "model=tiny", "seed=3"])  # overrides, as on the command line
model = posbench.build_model(config, vocab_size=512)                   # a torch.nn.Module
logits = model(tokens, offset=37)                                      # [B, T] int64 -> [B, T, V]
run = posbench.load_run("runs/demo/vo_rope/seed=0")                    # .config .manifest .metrics ...
run = posbench.train(config)                                           # as `posbench train` does
losses = posbench.evaluate("runs/demo", lengths=["8k"])                # a DataFrame, one row per result
frame = posbench.results("runs/demo")                                  # a DataFrame, one row per run
rows = posbench.results("runs/demo", tidy=True)                        # one row per scored window and metric
files = posbench.report("runs/demo", latex=True)                       # paths of tables, figures and pages
verdict = posbench.judge("runs/demo", scheme="alibi").verdict          # better, worse, equal or open
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posbench.version import __version__

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `_MODULES`
    from posbench.analysis.table import results
    from posbench.analysis.verdict import judge
    from posbench.api import evaluate, train
    from posbench.composition.compose import compose
    from posbench.config import Config, ConfigError
    from posbench.model.decoder import build_model
    from posbench.reporting.report import report
    from posbench.runs import Run, load_run
    from posbench.schemes import SCHEMES
    from posbench.system.signals import Stopped
    from posbench.training import Died

__all__ = [
    "SCHEMES",
    "Config",
    "ConfigError",
    "Died",
    "Run",
    "Stopped",
    "__version__",
    "build_model",
    "compose",
    "evaluate",
    "judge",
    "load_run",
    "report",
    "results",
    "train",
]

_MODULES = {
    "compose": "posbench.composition.compose",
    "build_model": "posbench.model.decoder",
    "train": "posbench.api",
    "evaluate": "posbench.api",
    "load_run": "posbench.runs",
    "results": "posbench.analysis.table",
    "report": "posbench.reporting.report",
    "judge": "posbench.analysis.verdict",
    "SCHEMES": "posbench.schemes",
    "Config": "posbench.config",
    "Run": "posbench.runs",
    "ConfigError": "posbench.config",
    "Died": "posbench.training",
    "Stopped": "posbench.system.signals",
}


# Python calls this for a missing name: modules are imported when first used, so that `import posbench` is fast.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'posbench' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
