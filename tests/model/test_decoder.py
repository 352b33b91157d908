"""The decoder: the definition's logits on every path, and the same initial weights under every scheme."""

import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from posbench import reference
from posbench.attention import Softmax
from posbench.catalogue.choices import choices
from posbench.composition.compose import compose
from posbench.model.architecture import build_architecture, checked_architecture
from posbench.model.decoder import build_model
from posbench.model.size import num_parameters
from posbench.verify import VOCAB, certificate_config, random_tokens, randomise
from tests.refusals import refuses
from tests.rows import built, difference, rows


def shared(model):
    """Return the tensors that every scheme's decoder has."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("scheme.")}


def test_initial_weights_are_byte_equal_across_schemes_under_one_seed():
    """Compare the weights that a scheme has: a kind of attention may lack queries, keys or values."""

    def parts(scheme):
        config = replace(certificate_config("nope"), scheme=certificate_config(scheme).scheme, seed=5)
        model = build_model(config, VOCAB)
        tensors = {}
        for name, tensor in model.shared_parts():
            tensors.setdefault(name, []).append(tensor.detach().numpy().tobytes())
        return tensors

    first = parts("nope")
    for name in choices("scheme"):
        torch.manual_seed(zlib.crc32(name.encode()))  # initial weights must not depend on the global generator
        scheme_parts = parts(name)
        assert scheme_parts == {part: first[part] for part in scheme_parts} and len(scheme_parts) >= len(first) - 2, (
            name
        )


def test_initial_weights_differ_under_another_seed_and_by_name():
    first, second = (shared(build_model(compose(["model=tiny", f"seed={seed}"]), VOCAB)) for seed in (5, 6))
    for key in first:
        if first[key].ndim > 1:
            assert difference(first[key], second[key]) > 1e-3
    assert not torch.equal(first["blocks.0.ffn.down.weight"], first["blocks.1.ffn.down.weight"])
    assert first["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["blocks.0.ffn.down.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 2 layers: 1 / sqrt(4)


def test_a_vocabulary_larger_than_the_table_is_refused():
    refuses(
        r"512 tokens but model\.vocab_size=300",
        build_model,
        compose(["model=tiny", "model.vocab_size=300", "tokenizer=bytes"]),
        512,
    )
    config = compose(["model=tiny", "model.vocab_size=600", "tokenizer=bytes"])
    refuses(
        r"700 tokens but model\.vocab_size=600: .*\"bos_token\"",
        replace(config, train=replace(config.train, from_run="folder")).check_vocabulary,
        700,
    )
    model = build_model(config, 512)
    assert model.embedding.weight.shape[0] == 600


@torch.no_grad()
@pytest.mark.parametrize("name", rows())
def test_positions_of_a_batchs_own_are_those_of_the_definition_and_in_pieces(name):
    config, model, tokens = certificate_config(name), built(name), random_tokens(44).view(2, 22)
    positions = torch.from_numpy(np.random.RandomState(1).randint(1, 6, (2, 22)).cumsum(1))
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    logits = model(tokens, positions=positions)
    for row, sequence, row_positions in zip(logits.numpy(), tokens.tolist(), positions.tolist(), strict=True):
        assert np.abs(row - reference.logits(weights, config, sequence, positions=row_positions)).max() < 1e-12
    consecutive = torch.arange(9, 31).expand(2, 22)
    assert difference(model(tokens, positions=consecutive), model(tokens, offset=9)) < 1e-12
    for model.piece in (8, 5, 1):
        assert difference(model(tokens, positions=positions), logits) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("name", rows())
def test_documents_of_a_window_are_read_as_if_each_were_alone(name):
    plain = certificate_config(name)
    config = replace(plain, data=replace(plain.data, document_mask=True))
    if not all(isinstance(kind, Softmax) for kind in build_architecture(plain).kinds):
        refuses(r"data\.document_mask=true needs scheme\.attention={kind: softmax}", checked_architecture, config)
        return
    model, bos = build_model(config, VOCAB, bos_id=VOCAB - 1), VOCAB - 1
    randomise(model)
    model, tokens = model.double(), random_tokens(80).view(2, 40) % bos
    starts = ([0, 11, 12, 33, 40], [0, 5, 30, 40])
    for row, bounds in zip(tokens, starts, strict=True):
        row[list(bounds[1:-1])] = bos
    model.bos_id = None
    alone = torch.cat(
        [
            torch.cat([model(row[None, begin:end]) for begin, end in pairwise(bounds)], 1)
            for row, bounds in zip(tokens, starts, strict=True)
        ]
    )
    model.bos_id = bos
    for model.piece in (None, 9):
        assert difference(model(tokens), alone) < 1e-12
    with torch.enable_grad():
        assert difference(model(tokens), alone) < 1e-12
    caches = model.caches(40)
    decoded = [model.hidden(piece, caches=caches) for piece in tokens.split([13, 1, 1, 17, *8 * [1]], 1)]
    assert difference(model.unembedding(torch.cat(decoded, 1)), alone) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["qk_rope", "qkvo_rope", "fox", "hybrid_qk_rope", "qwen3_next", "shared_kv_qk_rope", "shared_kv_qkvo_rope"]
)
def test_normalised_queries_and_keys_and_biases_are_those_of_the_definition(name):
    both = certificate_config(name, ("model.qk_norm=true", "model.qkv_bias=true"))
    model, plain = build_model(both, VOCAB), build_model(certificate_config(name), VOCAB)
    for key, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), "what both have begins alike"
    assert sum(num_parameters(model.architecture, VOCAB).values()) == sum(
        p.numel() for key, p in model.named_parameters() if not key.startswith("scheme.")
    )
    randomise(model)
    model, tokens = model.double(), random_tokens(17)
    logits = model(tokens, offset=5)[0]
    for switched_off in ("", "q_norm", "k_norm", "qkv.bias"):
        weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
        weights |= {key: 0 * value for key, value in weights.items() if switched_off and switched_off in key}
        apart = np.abs(logits.numpy() - reference.logits(weights, both, tokens[0].tolist(), offset=5)).max()
        assert (apart > 1e-4) if switched_off else (apart < 1e-12)
    model.piece = 7
    assert difference(model(tokens, offset=5)[0], logits) < 1e-12
