"""EleutherAI's lm-eval with our classes registered: `python -m posbench.huggingface.lm_eval` takes lm-eval's words.

python -m posbench.huggingface.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai
"""

from __future__ import annotations

import posbench.huggingface  # noqa: F401  registers them
from posbench.config import ConfigError


def main() -> None:
    """lm-eval's own command line. Raises: ConfigError where it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package {error.name} is not installed: pip install 'lm_eval[hf]'") from error
    cli_evaluate()


if __name__ == "__main__":
    main()
