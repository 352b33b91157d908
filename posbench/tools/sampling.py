"""Let a trained model continue a text (`posbench sample`), for a quick look; `posbench eval` measures its quality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.data.text.tokenizer import find_bos, text_encoder
from posbench.model.decoder import Decoder
from posbench.runs import Run


@dataclass(frozen=True)
class SamplingConfig:
    """Settings for drawing the next token from the model's distribution."""

    temperature: float = 1.0  # divides the logits; 0: always the most likely token
    top_k: int | None = None  # number of most likely tokens to draw from; None: all
    seed: int = 0


def sample(run: Run, prompt: str, tokens: int, sampling: SamplingConfig, scheme_changed: bool = False) -> str:
    """Return the text that the model writes after BOS and the prompt, at most `tokens` tokens, up to the next BOS.

    Arguments: scheme_changed, True to accept a changed scheme file. Raises: ConfigError if the run has no weights, if a
    task's run gets no prompt, or if the prompt is longer than the scheme allows.
    """
    model, tokenizer = run.load_model(scheme_changed=scheme_changed), run.tokenizer
    bos = find_bos(tokenizer)
    prompt_ids = text_encoder(tokenizer).encode(prompt, add_special_tokens=False).ids
    context = prompt_ids if bos is None else [bos, *prompt_ids]
    if not context:
        raise ConfigError(f"{run.name} was trained on a task: give the beginning of a problem with --prompt")
    longest = model.scheme.longest or math.inf
    if len(context) >= longest:
        raise ConfigError(f"the prompt has {len(context)} tokens and the scheme is defined up to {longest}: shorten it")
    length = int(min(len(context) + tokens, longest))
    # The embedding may have more rows than the tokenizer has tokens.
    missing = sorted(set(range(model.embedding.num_embeddings)) - set(tokenizer.get_vocab().values()))
    generated = generate(model, torch.tensor([context]), length, sampling, missing)
    document = list(takewhile(lambda token: token != bos, generated))
    # The context is decoded too, because a token's text may depend on the tokens before it.
    return tokenizer.decode([*context, *document])[len(tokenizer.decode(context)) :]


@torch.no_grad()
def generate(
    model: Decoder, tokens: Tensor, length: int, sampling: SamplingConfig, missing: Sequence[int] = ()
) -> Iterator[int]:
    """Yield the ids of sampled tokens that continue `tokens` [1, T] up to `length` tokens in all.

    Arguments: missing, ids that the tokenizer does not have.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.caches(length)
    for _ in range(length - tokens.shape[1]):
        logits = model.unembedding(model.hidden(tokens, caches=caches)[0, -1]).float().cpu()
        logits[list(missing)] = float("-inf")
        token = _drawn(logits, sampling, generator)
        yield token
        # The caches hold the earlier tokens, so each is read once.
        tokens = tokens.new_tensor([[token]])


def _drawn(logits: Tensor, sampling: SamplingConfig, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator))
