"""EleutherAI's lm-eval (pip install 'lm_eval[hf]') with our classes registered; it takes lm-eval's words.

python -m posbench.huggingface.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai
"""

from lm_eval.__main__ import cli_evaluate

import posbench.huggingface  # noqa: F401  registers them

if __name__ == "__main__":
    cli_evaluate()
