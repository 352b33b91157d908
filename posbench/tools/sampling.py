"""`posbench sample`: how a trained model continues a text. For a look; `posbench eval` measures.

Each token is read once: keys, values and states of earlier tokens are cached (`posbench.attention.KVCache`).
"""

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
    """How the next token is drawn from the model's distribution."""

    temperature: float = 1.0  # what the logits are divided by; 0: always the likeliest token
    top_k: int | None = None  # of so many likeliest tokens alone; None: of all
    seed: int = 0


def sample(run: Run, prompt: str, tokens: int, sampling: SamplingConfig, scheme_changed: bool = False) -> str:
    """What the model writes after BOS and the prompt: at most `tokens` tokens, up to the end of the document.

    Raises: ConfigError if the run has no weights, the prompt is not text, or the scheme is not defined for so many
    tokens.
    """
    model, tokenizer = run.load_model(scheme_changed=scheme_changed), run.tokenizer
    bos = find_bos(tokenizer)
    given = [*([] if bos is None else [bos]), *text_encoder(tokenizer).encode(prompt, add_special_tokens=False).ids]
    if not given:
        raise ConfigError(f"{run.name} was trained on a task: give the beginning of a problem with --prompt")
    longest = model.scheme.longest or math.inf
    if len(given) >= longest:
        raise ConfigError(f"the prompt has {len(given)} tokens and the scheme is defined up to {longest}: shorten it")
    length = int(min(len(given) + tokens, longest))
    missing = sorted(set(range(model.embedding.num_embeddings)) - set(tokenizer.get_vocab().values()))
    tokens_drawn = generate(model, torch.tensor([given]), length, sampling, missing)
    drawn = list(takewhile(lambda token: token != bos, tokens_drawn))
    return tokenizer.decode([*given, *drawn])[len(tokenizer.decode(given)) :]


@torch.no_grad()
def generate(
    model: Decoder, tokens: Tensor, length: int, sampling: SamplingConfig, missing: Sequence[int] = ()
) -> Iterator[int]:
    """Draw tokens that continue `tokens` [1, T] up to `length`, but none of `missing`, which the tokenizer lacks."""
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.caches(length)
    for _ in range(length - tokens.shape[1]):
        logits = model.unembedding(model.hidden(tokens, caches=caches)[0, -1]).float().cpu()
        logits[list(missing)] = float("-inf")
        token = _drawn(logits, sampling, generator)
        yield token
        tokens = tokens.new_tensor([[token]])


def _drawn(logits: Tensor, sampling: SamplingConfig, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator))
