"""Define a run's configuration, without torch: `Config`, its groups (fields.py), rules for values and units."""

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
    keys_of,
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
    "keys_of",
    "nearest",
    "no_setting",
    "parse_length",
    "scored_length",
    "token_count",
    "type_words",
]
