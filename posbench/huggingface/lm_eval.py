"""Run EleutherAI's lm-eval (pip install 'lm_eval[hf]') on exported models, with the arguments of lm-eval.

python -m posbench.huggingface.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai

Tasks that score whole texts (wikitext) need pretrained=FOLDER,add_bos_token=False, because lm-eval adds BOS itself.
"""

from lm_eval.__main__ import cli_evaluate

import posbench.huggingface  # noqa: F401  registers our classes

if __name__ == "__main__":
    cli_evaluate()
