"""EleutherAI's lm-eval (pip install 'lm_eval[hf]') with our classes registered; it takes lm-eval's words.

python -m posbench.huggingface.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai

Tasks that score whole texts (wikitext) need pretrained=FOLDER,add_bos_token=False: lm-eval adds BOS to those itself.
"""

from lm_eval.__main__ import cli_evaluate

import posbench.huggingface  # noqa: F401  registers them

if __name__ == "__main__":
    cli_evaluate()
