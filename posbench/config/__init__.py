"""Define a run's configuration: `Config` (config.py), its groups (fields.py), rules for values (rules.py) and units.

This package imports no torch and nothing else of posbench.
"""

from posbench.config.config import Config, is_text, no_setting, type_words
from posbench.config.fields import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    SchemeConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    chosen_experiment,
)
from posbench.config.rules import (
    ConfigError,
    branch_name,
    check_name,
    nearest,
    parse_length,
    scored_length,
    token_count,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "SchemeConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
    "branch_name",
    "check_name",
    "chosen_experiment",
    "is_text",
    "nearest",
    "no_setting",
    "parse_length",
    "scored_length",
    "token_count",
    "type_words",
]
