"""posbench: where should position go? One small decoder, many position schemes, one fair comparison.

    config = posbench.compose(["scheme=vo_rope", "model=tiny", "seed=3"])  # the words of the command line
    model = posbench.build_model(config, vocab_size=512)                   # a torch.nn.Module
    logits = model(tokens, offset=37)                                      # [B, T] int64 -> [B, T, V]
    run = posbench.load_run("runs/demo/vo_rope/seed=0")                    # .config .manifest .metrics ...
    frame = posbench.results("runs/demo")                                  # a DataFrame, one row a run

Names are imported when first used, so that `import posbench` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["SCHEMES", "ConfigError", "build_model", "compose", "load_run", "results"]

_HOMES = {
    "compose": "posbench.composition",
    "build_model": "posbench.model",
    "load_run": "posbench.runs",
    "results": "posbench.reporting",
    "SCHEMES": "posbench.schemes",
    "ConfigError": "posbench.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'posbench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
