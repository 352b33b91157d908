"""The most likely tokens of a model, one by one."""

import torch


@torch.no_grad()
def greedy(model, tokens, length):
    """Return the ids of the most likely tokens that continue `tokens` [1, T] up to `length` tokens in all."""
    caches, ids = model.caches(length), []
    for _ in range(length - tokens.shape[1]):
        token = model.unembedding(model.hidden(tokens, caches=caches)[0, -1]).argmax()
        ids.append(int(token))
        # The caches hold the earlier tokens, so each is read once.
        tokens = token.view(1, 1)
    return ids
