"""The decoder: the definition's logits on every path, and the same initial weights under every scheme."""

from functools import partial

import numpy as np
import pytest
import torch

from posbench import reference
from posbench.composition import choices, compose
from posbench.config import ConfigError
from posbench.model import build_model
from posbench.schemes import SCHEMES, Scheme
from posbench.schemes.alibi import Alibi
from posbench.schemes.rotary import Rotary
from posbench.size import num_parameters
from posbench.verify import MODEL, VOCAB, random_tokens, randomise
from tests.rows import rows


def shared(model):
    """The tensors that every scheme's decoder has."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("scheme.")}


@pytest.mark.slow
def test_initial_weights_are_byte_equal_across_schemes_under_one_seed():
    """Those that a scheme has: a kind of attention may lack queries, keys or values."""

    def parts(scheme):
        model = build_model(compose([f"scheme={scheme}", "model=tiny", "seed=5"]), VOCAB)
        found = {}
        for name, tensor in model.shared_parts():
            found.setdefault(name, []).append(tensor.detach().numpy().tobytes())
        return found

    first = parts("nope")
    for name in choices("scheme"):
        torch.manual_seed(hash(name))  # the global stream is no part of it
        other = parts(name)
        assert other == {part: first[part] for part in other} and len(other) >= len(first) - 2, name


def test_initial_weights_differ_under_another_seed_and_by_name():
    one, other = (shared(build_model(compose(["model=tiny", f"seed={seed}"]), VOCAB)) for seed in (5, 6))
    for key in one:
        if one[key].ndim > 1:
            assert (one[key] - other[key]).abs().max() > 1e-3
    assert not torch.equal(one["blocks.0.ffn.down.weight"], one["blocks.1.ffn.down.weight"])
    assert one["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert one["blocks.0.ffn.down.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 2 layers: 1 / sqrt(4)


class Learned(Scheme):
    """A bias with parameters of its own, drawn when it is made."""

    def __init__(self, shape):
        super().__init__(shape)
        self.table = torch.nn.Parameter(torch.randn(32, shape.num_heads))

    def bias(self, q, gate, at):
        return lambda b, h, i, j: self.table[(i + at.query - j - at.key).clamp(0, 31), h]


def test_a_schemes_own_parameters_come_from_the_seed_and_change_no_shared_one(monkeypatch):
    monkeypatch.setitem(SCHEMES, "learned", Learned)

    def model(seed, *words):
        return build_model(compose(["model=tiny", f"seed={seed}", *words]), VOCAB)

    learned = [model(seed, "scheme=nope", "scheme.kind=learned") for seed in (5, 5, 6)]
    assert torch.equal(learned[0].scheme.table, learned[1].scheme.table)
    assert not torch.equal(learned[0].scheme.table, learned[2].scheme.table)
    plain = shared(model(5, "scheme=nope"))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in shared(learned[0]).items())
    learned[0].nll(random_tokens(), random_tokens()).mean().backward()
    assert learned[0].scheme.table.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "extra", [[], ["model.num_kv_heads=6"], ["model.tied_embeddings=true"]], ids=["gqa", "mha", "tied"]
)
@pytest.mark.parametrize("name", ["qkvo_rope", "alibi", "sinusoidal"])
def test_logits_equal_the_definition(name, extra):
    config = compose([f"scheme={name}", *MODEL, *extra])
    model = build_model(config, VOCAB)
    randomise(model)
    model = model.double()
    tokens = torch.cat((random_tokens(70), random_tokens(70).flip(1)))
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        logits = model(tokens, offset=9).numpy()
    for row, sequence in zip(logits, tokens.tolist(), strict=True):
        assert np.abs(row - reference.logits(weights, config, sequence, offset=9)).max() < 1e-12


def test_losses_are_those_of_the_logits():
    model = build_model(compose(["scheme=qkvo_rope", *MODEL]), VOCAB).double()
    tokens, targets = random_tokens(60).view(2, 30), random_tokens(60).view(2, 30).roll(-1, 1)
    expected = -model(tokens).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        assert torch.allclose(model.nll(tokens, targets), expected, rtol=0, atol=1e-12)
        assert torch.allclose(model.nll(tokens, targets, last=7), expected[:, -7:], rtol=0, atol=1e-12)
    assert torch.allclose(model.nll(tokens, targets), expected, rtol=0, atol=1e-12)  # with a gradient


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_the_configuration_promises(tied):
    config = compose(["scheme=qk_rope", *MODEL, f"model.tied_embeddings={tied}"])
    assert sum(p.numel() for p in build_model(config, VOCAB).parameters()) == sum(
        num_parameters(config, VOCAB).values()
    )


def test_a_vocabulary_larger_than_the_table_is_refused():
    with pytest.raises(ConfigError, match=r"512 tokens but model\.vocab_size=300"):
        build_model(compose(["model=tiny", "model.vocab_size=300", "tokenizer=bytes"]), 512)
    model = build_model(compose(["model=tiny", "model.vocab_size=600", "tokenizer=bytes"]), 512)
    assert model.embedding.weight.shape[0] == 600


class ValuesAndBias(Rotary):
    """Rotations and a bias in one graph; q and k stay as the projection lays them out, which has been miscompiled."""

    def __init__(self, shape):
        super().__init__(shape, sites="vo")
        self.alibi = Alibi(shape)

    def bias(self, q, gate, at):
        return self.alibi.bias(q, gate, at)


@pytest.mark.slow
def test_a_compiled_block_in_bfloat16_equals_the_eager_one(monkeypatch):
    """At the demo's shape, and at a length that is no multiple of a block.

    torch 2.13 has miscompiled attention in query blocks on CPUs, at some shapes and silently: NaN or 1e38 for a logit.
    """
    monkeypatch.setitem(SCHEMES, "values_and_bias", ValuesAndBias)
    config = compose(
        ["scheme=nope", "scheme.kind=values_and_bias", "model=demo", "model.num_layers=1", "model.init_std=0.05"]
    )
    eager, compiled = build_model(config, VOCAB), build_model(config, VOCAB)
    compiled.compile_blocks()
    for model in (eager, compiled):
        model.compute_dtype = torch.bfloat16

    tokens = random_tokens(8 * 256).view(8, 256)
    losses = [model.nll(tokens, tokens.roll(-1, 1)) for model in (eager, compiled)]
    assert (losses[0] - losses[1]).abs().max() < 0.1 and (losses[0] - losses[1]).abs().mean() < 0.01
    for loss in losses:
        loss.mean().backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert one.grad.norm() > 0 and (one.grad - other.grad).norm() <= 0.05 * one.grad.norm()

    tokens = random_tokens(3 * 150).view(3, 150)
    logits = [model(tokens) for model in (eager, compiled)]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()
    with torch.no_grad():  # never compiled: what was read before would be in the code of the steps that follow
        assert torch.equal(eager(tokens), compiled(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", rows())
def test_a_sequence_read_in_pieces_gives_the_hidden_states_of_one_pass(name):
    queries = []

    def watched(mix, q, k, v, x, *rest):
        queries.append(x.shape[1])
        return mix(q, k, v, x, *rest)

    config = compose([f"scheme={name}", *MODEL, "train.context_length=256"])
    model = build_model(config, VOCAB)
    randomise(model)
    model = model.double()
    for block in model.blocks:
        kind = block.attention.kind
        kind.mix = partial(watched, kind.mix)
    tokens = torch.cat((random_tokens(150), random_tokens(150).flip(1)))
    with torch.no_grad():
        whole = model.hidden(tokens, offset=11)
        for model.piece in (7, 64, 149):  # 149 leaves a last piece of one token
            queries.clear()
            assert (model.hidden(tokens, offset=11) - whole).abs().max() <= 1e-13 * whole.abs().max()
            assert max(queries) == model.piece and sum(queries) == 150 * config.model.num_layers
    queries.clear()
    model.hidden(tokens)  # with a gradient, which pieces do not keep
    assert set(queries) == {150}
