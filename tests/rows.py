"""The rows of conf/scheme as parameters of a test (the fast ones have one of each way to act), and decoders of them."""

import pytest
import torch

from posbench.catalogue.choices import choices
from posbench.model.decoder import build_model
from posbench.verify import VOCAB, certificate_config, random_tokens, randomise

# Of each way of a scheme to act, of each kind of attention, and of what attention may share.
ONE_OF_EACH = (
    "alibi",
    "canon_qk_rope",
    "decay_vo_rope",
    "fire",
    "fox",
    "gdn",
    "hybrid_rotary_pct_25",
    "kda",
    "key_offset",
    "learned",
    "linear_qk_rope",
    "mla",
    "nope",
    "path",
    "pope",
    "qk_rope_learned",
    "qkvo_rope",
    "rope_nope_interleaved",
    "selective_rope",
    "shared_kv_qkvo_rope",
    "sink_qk_rope",
    "smear_nope",
    "ssmax",
    "t5",
    "transformer_xl",
    "window_rope_nope",
    "xpos",
)


def rows(fast=ONE_OF_EACH):
    """Return all rows as parameters of a test, and mark as slow those that are not in `fast`."""
    marks = {name: () if name in fast else pytest.mark.slow for name in choices("scheme")}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def built(name, *words):
    """Return a decoder in float64 with random weights under a row, changed by `words`."""
    model = build_model(certificate_config(name, words), VOCAB)
    randomise(model)
    return model.double()


def random(*sizes, seed=0):
    """Return normal numbers in float64, the same every time."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def difference(ours, theirs):
    """Return the largest difference between two tensors."""
    return (ours - theirs).abs().max()


def causal_mask(length):
    """Return what is added to scores [T, T]: -inf for keys after their query, and 0."""
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)


def first_layer(model, length, offset=0):
    """Return the first layer's attention, the positions that it reads of `length` tokens, and its scheme."""
    at = model._embed(random_tokens(length), offset, 0, length, None)[1][0]
    return model.blocks[0].attention, at, model.scheme[0]


def assert_same_gradients(ours, theirs, leaves, limit, least=1e-3, their_leaves=None):
    """Compare the gradients by `leaves` of two outputs, each of which must be at least `least`."""
    outputs = ((ours, leaves), (theirs, their_leaves or leaves))
    gradients = [torch.autograd.grad(output.sin().sum(), inputs, retain_graph=True) for output, inputs in outputs]
    for gradient, expected in zip(*gradients, strict=True):
        assert expected.abs().max() >= least and gradient.isfinite().all()
        assert (gradient - expected).abs().max() <= limit * expected.abs().max().clamp(min=1)


class Float64:
    """torch, with float64 under the name of float32: transformers casts to float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)
