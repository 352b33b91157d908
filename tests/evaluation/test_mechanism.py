"""Scores of heads on models built to have them, and recomputed from the projections of a layer."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posbench.composition.compose import compose
from posbench.config import EvaluationConfig
from posbench.data import Problems, Split
from posbench.evaluation.protocols import MECHANISM
from posbench.evaluation.protocols.mechanism import scores
from posbench.model.decoder import build_model
from tests.refusals import refuses

VOCABULARY, LENGTH = 16, 64
BACK = """
from posbench.schemes import Scheme


class Back(Scheme):
    def __init__(self, shape, distances):
        super().__init__(shape)
        self.distances = distances

    def bias(self, q, k, gates, at):
        at_head = q.new_tensor(self.distances)
        return lambda b, h, i, j: 100.0 * (at.distance(b, i, j) == at_head[h])
"""


@pytest.fixture(scope="module")
def split():
    starts = np.arange(0, 2200, 200)
    return Split("test", np.random.default_rng(0).integers(VOCABULARY, size=2000), starts, np.diff(starts), None)


def decoder(*words):
    sizes = ("model=tiny", "model.num_layers=2", "model.d_model=32", "model.num_heads=4", "model.init_std=0.2")
    return build_model(compose([*sizes, f"train.context_length={LENGTH}", *words]), VOCABULARY)


def rows_of(model, split):
    corpus = SimpleNamespace(bos_id=0)
    rows, _ = MECHANISM.score(model, corpus, split, LENGTH, EvaluationConfig(), LENGTH, lambda tokens: None)
    return rows


def figures(rows, measure):
    sums = rows[rows["measure"] == measure].groupby(["layer", "head", "first"])[["value", "queries"]].sum()
    return sums["value"] / sums["queries"]


def test_a_head_that_attends_so_far_back_shows_it(tmp_path, split):
    (tmp_path / "back.py").write_text(BACK)
    behind_earlier_self = LENGTH // 2 - 1
    distances = f"[0,1,6,{behind_earlier_self}]"
    model = decoder(f"scheme={tmp_path / 'back.py'}:Back", f"+scheme.distances={distances}")
    rows = rows_of(model, split)
    attention = figures(rows, "attention")[1]
    assert {head: attention[head].idxmax() for head in range(4)} == {0: 0, 1: 1, 2: 5, 3: 17}
    assert attention.groupby("head").max().to_numpy() == pytest.approx(1, abs=1e-9)
    measures = scores(rows)
    assert measures["previous_token"][0].round(9).to_list() == [0, 1, 0, 0]
    assert measures["induction"][0].round(9).to_list() == [0, 0, 0, 1]
    assert figures(rows, "bias")[0, 2][5] == pytest.approx(100 / 4)  # one of the distances 5 to 8


def test_norms_show_which_frequencies_are_used(split):
    model = decoder("scheme=qk_rope")
    width, pair = model.config.head_width, 2
    with torch.no_grad():
        q, _, _ = model.blocks[1].attention.qkv.weight.view(3, 4, width, -1)
        q[3, [pair, pair + width // 2]] = 0
    rows = rows_of(model, split)
    norms = figures(rows, "q_norm")[1, 3]
    assert norms[pair] == 0 and (norms.drop(pair) > 0).all()
    assert (figures(rows, "k_norm") > 0).all()
    assert not set(rows_of(decoder("scheme=nope"), split)["measure"]) & {"q_norm", "k_norm", "bias"}


@pytest.mark.parametrize(
    "words",
    [
        ("scheme=alibi", "model.num_kv_heads=2"),
        ("scheme=nope", "+scheme.attention.sink=true"),
        ("scheme=nope", "+scheme.window=8"),
    ],
)
def test_attention_is_the_softmax_of_what_passes_a_layer(words, split):
    model, projections = decoder(*words), []
    model.blocks[0].attention.qkv.register_forward_hook(lambda module, inputs, out: projections.append(out))
    rows = rows_of(model, split)
    measured = (
        rows[(rows["layer"] == 0) & (rows["measure"] == "attention")].groupby(["start", "head", "first"])["value"].sum()
    )
    H, D, kv = 4, model.config.head_width, model.config.num_kv_heads or 4
    q, k, _ = projections[0].double().split([H * D, kv * D, kv * D], dim=-1)
    start = rows["start"].iloc[0]
    for head in range(H):
        keys = k[0].view(LENGTH, kv, D)[:, head // (H // kv)]
        weights = q[0].view(LENGTH, H, D)[:, head] @ keys.T / math.sqrt(D)
        i, j = np.indices((LENGTH, LENGTH))
        shifted = weights.numpy() - (2.0 ** (-8 * (head + 1) / H) * (i - j) if "alibi" in words[0] else 0)
        unnormed = np.exp(shifted) * (j <= i) * (i - j < (8 if "window" in words[1] else LENGTH))
        shares = unnormed / (unnormed.sum(1, keepdims=True) + ("sink" in words[1]))  # the sink's logit is 0
        for first, last in ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 63)):
            in_range = (i - j >= first) & (i - j <= last) & (i >= LENGTH // 2)
            assert measured[start, head, first] == pytest.approx(shares[in_range].sum(), abs=2e-5)


def test_it_is_read_without_a_trace_and_refuses_attention_without_weights(split):
    model = decoder("scheme=fox")
    model.piece = 16
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        logits = model(tokens)
        rows = rows_of(model, split)
        assert torch.equal(model(tokens), logits) and model.piece == 16
    shares = rows[rows["measure"] == "attention"].groupby(["start", "layer", "head"])["value"].sum() / (LENGTH / 2)
    assert shares.to_numpy() == pytest.approx(1)
    refuses("has none", MECHANISM.check, compose(["scheme=nope", "+scheme.attention.kind=linear"]))


@pytest.mark.parametrize("positions", ["window", "subset"])
def test_problems_of_a_task_are_windows_of_their_own_positions(tmp_path, positions):
    (tmp_path / "back.py").write_text(BACK)
    back = [f"scheme={tmp_path}/back.py:Back", "+scheme.distances=[0,1,2,3]"]
    words = ["data=copy", "data.lengths=[2,8]", "data.longest=12", f"data.positions={positions}"]
    config = compose([*back, *words, "model=tiny", "model.num_heads=4", "model.d_model=32"])
    problems = Problems(config.data)
    model = build_model(config, problems.vocab_size)
    rows, header = MECHANISM.score(
        model, problems, problems.splits["test"], 8, EvaluationConfig(), 8, lambda tokens: None
    )
    attention = figures(rows, "attention")
    assert attention.groupby(["layer", "head"]).sum().to_numpy() == pytest.approx(1, abs=1e-6)
    assert "induction" not in header and set(rows["start"]) == set(range(32))
    at_own_distance = [attention[0, head, head] for head in range(4)]
    if positions == "window":
        assert at_own_distance == pytest.approx([1] * 4, abs=1e-6)
    else:  # tokens are farther apart than rows: few are exactly this far back
        assert at_own_distance[0] == pytest.approx(1, abs=1e-6)
        assert max(at_own_distance[1:]) < 0.9
