"""Options that a kind of attention does not support are refused before training."""

import re

import pytest

from posbench.composition.compose import compose
from posbench.model.architecture import checked_architecture
from tests.refusals import refuses

REFUSED = [
    ("gdn scheme.kind=alibi", "Alibi adds a bias to scores, and attention of the kind gdn has no scores: choose"),
    ("gdn +scheme.attention.convolution=-1", "scheme.attention.convolution=-1 must be a whole number, 0 or more"),
    ("gdn +scheme.attention.output_gate=head", "scheme.attention.output_gate='head' must be true, false or sigmoid"),
    ("gdn +scheme.attention.decay=token", "scheme.attention.decay='token' must be head or channel"),
    ("mla scheme.fraction=0.5", "PartialRotary changes k, and attention of the kind mla allows only a rotation of q"),
    ("mla scheme.sites=[q,k,v,o]", "PartialRotary changes k and v, and attention of the kind mla"),
    ("mla scheme.kind=key_offset", "KeyOffset changes k, and attention of the kind mla"),
    ("mla scheme.attention.shared=0.1", "scheme.attention.shared=0.1 of model.head_dim=16 is 1.6 channels"),
    ("mla scheme.attention.shared=1", "is 16 channels, which must be an even number, above 0 and below 16"),
    ("mla scheme.attention.latent_heads=0", "scheme.attention.latent_heads=0 must be a whole number, 1 or more"),
    ("mla +scheme.attention.shared_kv=true", "scheme.attention.shared_kv=true needs a kind of attention that has keys"),
    ("gqa_qk_rope scheme.attention.kv_heads=5", "is not a multiple of scheme.attention.kv_heads=5"),
    ("gqa_qk_rope scheme.sites=[q,k,v,o]", "Rotary changes k and v, and attention of the kind gqa"),
    ("nope scheme.attention.output_gate=heads", "attention.output_gate='heads' must be head, channel or null"),
    ("nope scheme.attention.sink=2", "attention.sink=2 must be true or false"),
    ("nope scheme.attention.kind=softmacs", "scheme.attention.kind='softmacs' is not known; did you mean 'softmax'"),
    ("nope scheme.attention.shared_kw=true", "shared_kw is not an option of 'softmax'; did you mean 'shared_kv'"),
    ("decay scheme.attention.normalise=2", "scheme.attention.normalise=2 must be true or false"),
    ("decay model.qk_norm=true", "no layer has it (scheme.attention is decay): leave it"),
    ("linear_nope +scheme.window=8", "scheme.window needs scheme.attention={kind: softmax}, and this is linear"),
    ("nope +scheme.window=0", "scheme.window=0 must be a whole number, 1 or more"),
    ("fox_qk_rope scheme.of=[{name:a,kind:nope,window:8}]", "set scheme.window next to scheme.of"),
]


@pytest.mark.parametrize("row, message", REFUSED)
def test_what_attention_does_not_support_is_refused_before_training(row, message):
    config = compose([f"scheme={row.split()[0]}", *row.split()[1:], "model.head_dim=16"])
    refuses(re.escape(message), checked_architecture, config)
