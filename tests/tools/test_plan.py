"""Counts of `posbench plan` equal counts made another way."""

from functools import partial

import pytest
import torch
from scipy.stats import nct, t

from posbench import build_model, compose
from posbench.config import TokenizerConfig
from posbench.data.text.tokenizer import TOKENIZERS
from posbench.model.size import forward_flops_per_token, num_parameters, training_flops_per_token
from posbench.system.console import console
from posbench.tools.bench import bench
from posbench.tools.plan import plan, training_memory
from posbench.training import train
from tests.conftest import small_run


def test_flops_are_those_of_the_products_that_run(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr("posbench.system.matmul.ONEDNN_IS_FASTER", False)  # the counter does not know oneDNN's
    config = compose(["model=tiny", "scheme=nope", "model.num_kv_heads=2", "train.context_length=32"])
    model = build_model(config, 300)
    tokens = torch.randint(300, (2, 33))
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1]).sum().backward()
    whole = training_flops_per_token(model.architecture, 300) * 64
    # The definition counts half of the keys for each query; the kernel counts all, and its backward recomputes.
    attention = 6 * config.model.num_layers * config.model.d_model * 32 * 64
    matrices = whole - attention
    counted = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    assert sum(n for kind, n in counted.items() if "mm" in kind and "bmm" not in kind) == matrices
    assert training_flops_per_token(model.architecture, 300) == 3 * forward_flops_per_token(model.architecture, 300, 32)


@pytest.mark.slow
def test_a_plan_counts_the_sweep_that_train_would_make():
    demo = plan(["experiment=demo", "seed=0"])
    assert (demo.runs, len(demo.schemes), demo.seeds) == (11, 11, 1)
    more = plan(["experiment=demo", "seed=0,1", "scheme=nope,alibi", "train.tokens=196_608"])
    assert (more.runs, more.schemes, more.seeds) == (4, ["nope", "alibi"], 2)
    assert plan(["experiment=tasks", "seed=0", "scheme=nope"]).first.experiment.name == "tasks", "not the first task's"
    assert more.flops == pytest.approx(4 / 11 * 192 / 384 * demo.flops)


@pytest.mark.slow
def test_memory_is_about_what_a_compiled_step_keeps(monkeypatch):
    # What is kept is decided before code is generated, which would take a quarter of a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    words = ["model=tiny", "model.d_model=128", "train.context_length=640", "train.batch_size=2", "scheme=qk_rope"]
    config = compose([*words, "train.dtype=bfloat16"])
    model = build_model(config, 512)
    model.compute_dtype = torch.bfloat16
    model.compile_blocks()
    saved_bytes = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}  # bytes; its own are not counted

    def pack(tensor):
        saved_bytes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    tokens = torch.randint(512, (2, 641))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    rounded = 2 * num_parameters(model.architecture, 512)["body"]
    gradients_of_the_loss = 4 * 512 * 128 + 2 * 128 * 1280
    estimate = training_memory(config, model.architecture, 512)["activations"] + rounded + gradients_of_the_loss
    assert sum(saved_bytes.values()) == pytest.approx(estimate, rel=0.25)


@pytest.mark.slow
def test_the_real_vocabulary_of_a_tokenizer_is_counted(tmp_path):
    """Check `plan` and `bench`."""
    tokenizer = TOKENIZERS["bpe"](TokenizerConfig(kind="bpe", vocab_size=300), ["some words to learn merges of"] * 9)
    tokenizer.save(str(tmp_path / "t.json"))
    words = ["tokenizer=file", f"tokenizer.path={tmp_path}/t.json", "scheme=nope", "seed=0", "train.compile=false"]
    words += ["model=tiny", "model.d_model=16", "model.num_heads=2", "train.context_length=16", "train.batch_size=1"]
    planned, entries = plan(words), tokenizer.get_vocab_size()
    assert planned.largest.parameters["embedding"] == (2 - compose(words).model.tied_embeddings) * entries * 16
    timed = bench(words, ["nope"], 1, 1, console(quiet=True))
    total = sum(planned.largest.parameters.values())
    assert timed["nope"]["parameters"] == total


@pytest.mark.slow
def test_epochs_are_planned_once_the_text_is_prepared(documents, tmp_path):
    words = [*small_run(documents, tmp_path / "cache", tmp_path / "runs"), "scheme=nope", "seed=0"]
    assert plan(words).epochs is None
    manifest = train(compose(words)).manifest
    assert plan(words).epochs == manifest.epochs == manifest.tokens / manifest.text_tokens


def test_a_search_is_planned_with_the_gap_that_its_test_can_find(tmp_path):
    """A gap of this size is significant at both of two independent rates in 80 % of cases, by scipy."""
    words = ["experiment=demo", "scheme=nope,alibi", f"runs_dir={tmp_path}", "experiment_name=fresh"]
    assert plan([*words, "seed=0,1,2"], search=True).runs == 2 * (5 * 2 + 2)
    planned = plan([*words, "experiment.planned_seeds=8"], search=True)
    assert planned.runs == 2 * (5 * 2 + 2 * 6)
    assert planned.detectable.startswith("3.9, 1.9, 1.3 standard deviations"), planned.detectable
    for seeds, gap in ((3, 3.9), (5, 1.9), (8, 1.3)):
        power = nct.sf(t.isf(0.025, seeds - 1), seeds - 1, gap * seeds**0.5)
        assert power**2 == pytest.approx(0.8, abs=0.05)


def test_a_plan_knows_what_muon_trains_and_what_its_step_costs():
    words = ["experiment=headline_muon", "scheme=qk_rope,path", "seed=0"]
    muon, adamw = plan(words), plan([*words, "train.optimizer=adamw"])
    assert adamw.muon_shares == {} and list(muon.muon_shares) == ["qk_rope", "path"]
    # q, k, v and out are 96 x 96; gate, up and down 96 x 256. Tables, norms and PaTH's own matrices are AdamW's.
    matrices = 3 * (4 * 96 * 96 + 3 * 96 * 256)
    assert muon.muon_shares["qk_rope"] == pytest.approx(matrices / (matrices + 2 * 512 * 96 + 7 * 96))
    assert muon.muon_shares["path"] < muon.muon_shares["qk_rope"]
    a_step = 3 * 5 * (4 * (4 + 2) * 96**3 + 3 * (4 * 96**2 * 256 + 2 * 96**3))
    assert muon.flops - adamw.flops == pytest.approx(2 * 6000 * a_step)
    assert adamw.largest.memory - muon.largest.memory == 4 * matrices
    assert muon.tokens_a_run == 6_144_000, "it is no branch, because its name is not the name of one"


def test_a_plan_counts_arms_and_only_the_steps_that_they_take_themselves():
    arms = (
        'train.arms={every:["train.context_length=512","train.batch_size=2"],qk_rope:{plain:[],nope:["scheme=nope"]}}'
    )
    words = ["scheme=qk_rope,alibi", "seed=0,1", "train.schedule=wsd", "train.tokens=1_024_000"]
    estimate = plan([*words, "train.context_length=128", arms])
    assert estimate.schemes == ["qk_rope", "alibi", "qk_rope_plain", "qk_rope_nope"] and estimate.runs == 8
    assert estimate.tokens_in_all == 2 * (2 * 1_024_000 + 2 * 204_800), "the decay is the last fifth"
