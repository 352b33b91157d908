"""From words such as `scheme=vo_rope` to a typed, checked `Config`: where Hydra ends and posbench begins."""

from posbench.composition.application import run_application
from posbench.composition.choices import choices, conf_dir
from posbench.composition.completion import complete
from posbench.composition.compose import checked, compose, typed
from posbench.composition.sweep import sweep_of

__all__ = ["checked", "choices", "complete", "compose", "conf_dir", "run_application", "sweep_of", "typed"]
