"""`posbench sample`: how a trained model continues a text. It only shows; the protocols of `posbench eval` measure.

Each token is read once: keys, values and states of earlier tokens are cached (`posbench.attention.KVCache`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.data.tokenizer import find_bos

if TYPE_CHECKING:
    from posbench.model import Decoder
    from posbench.runs import Run


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn from the model's distribution."""

    temperature: float = 1.0  # what the logits are divided by; 0: always the likeliest token
    top_k: int | None = None  # of so many likeliest tokens alone; None: of all
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """What a model wrote."""

    text: str  # without the prompt
    tokens: int  # drawn
    ended: str  # why it stopped, a phrase


def sample(run: Run, prompt: str, tokens: int, drawing: Drawing, scheme_changed: bool = False) -> Sample:
    """At most `tokens` tokens after BOS and the prompt, up to the end of the document.

    Raises: ConfigError if the run has no weights, the prompt is not text, or the scheme is not defined for so many
    tokens.
    """
    model, tokenizer = run.load_model(scheme_changed=scheme_changed), run.tokenizer
    bos = find_bos(tokenizer)
    given = [*([] if bos is None else [bos]), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    if not given:
        raise ConfigError(f"{run.name} was trained on a task: give the beginning of a problem with --prompt")
    length, ended = len(given) + tokens, f"after {tokens} tokens"
    longest = model.scheme.longest
    if longest is not None and length > longest:
        length, ended = longest, f"at {longest} tokens, as far as the scheme is defined"
        if len(given) >= longest:
            raise ConfigError(
                f"the prompt has {len(given)} tokens and the scheme is defined up to {longest}: shorten it"
            )
    drawn = []
    for token in continued(model, torch.tensor([given]), length, drawing):
        if token == bos:
            ended = "where the model ended the document"
            break
        drawn.append(token)
    text = tokenizer.decode([*given, *drawn])[len(tokenizer.decode(given)) :]
    return Sample(text, len(drawn), ended)


@torch.no_grad()
def continued(model: Decoder, tokens: Tensor, length: int, drawing: Drawing) -> Iterator[int]:
    """Tokens drawn one after another behind `tokens` [1, T], until `length` are there."""
    generator = torch.Generator().manual_seed(drawing.seed)
    caches = model.caches(length)
    for _ in range(length - tokens.shape[1]):
        logits = model.unembedding(model.hidden(tokens, caches=caches)[0, -1]).float().cpu()
        token = _drawn(logits, drawing, generator)
        yield token
        tokens = tokens.new_tensor([[token]])


def _drawn(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    if drawing.temperature == 0:
        return int(logits.argmax())
    if drawing.top_k is not None and drawing.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(drawing.top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / drawing.temperature).softmax(-1), 1, generator=generator))
