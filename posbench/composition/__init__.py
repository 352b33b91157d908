"""From words such as `scheme=vo_rope` to a typed, checked `Config`: where Hydra ends and posbench begins."""

from posbench.composition.compose import checked, choices, complete, compose, conf_dir, run_application, sweep_of, typed

__all__ = ["checked", "choices", "complete", "compose", "conf_dir", "run_application", "sweep_of", "typed"]
