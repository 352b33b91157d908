"""What `posbench plan` counts, against counts made another way."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from posbench import build_model, compose
from posbench.bench import bench_training
from posbench.cli import app
from posbench.composition import choices, conf_dir
from posbench.config import TokenizerConfig
from posbench.data.tokenizer import TOKENIZERS
from posbench.model import Decoder
from posbench.plan import plan, training_memory
from posbench.size import forward_flops_per_token, num_parameters, training_flops_per_token
from posbench.training import train
from tests.conftest import small_run


def test_flops_are_those_of_the_products_that_run() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = compose(["model=tiny", "scheme=nope", "model.num_kv_heads=2", "train.context_length=32"])
    model = build_model(config, 300)
    tokens = torch.randint(300, (2, 33))
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1]).sum().backward()
    whole = training_flops_per_token(config, 300) * 64
    # The definition counts half of the keys for each query; the kernel counts all, and its backward recomputes.
    attention = 6 * config.model.num_layers * config.model.d_model * 32 * 64
    matrices = whole - attention
    counted = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    assert sum(n for kind, n in counted.items() if "mm" in kind and "bmm" not in kind) == matrices
    assert training_flops_per_token(config, 300) == 3 * forward_flops_per_token(config, 300, 32)


@pytest.mark.slow
def test_a_plan_counts_the_sweep_that_train_would_make() -> None:
    demo = plan(["experiment=demo"])
    assert (demo.runs, len(demo.schemes), demo.seeds) == (33, 11, 3)
    assert demo.tokens_a_run == 977 * 1024
    more = plan(["experiment=demo", "seed=0,1,2", "scheme=nope,alibi", "train.tokens=400_000"])
    assert (more.runs, more.schemes, more.seeds) == (6, ["nope", "alibi"], 3)
    assert more.training_flops == pytest.approx(6 / 33 * 390 / 977 * demo.training_flops)
    one = plan(["scheme=nope", "seed=4"])
    assert (one.runs, one.seeds) == (1, 1)


def test_hours_follow_from_the_rate_and_the_share() -> None:
    words = ["experiment=kexue_1b", "scheme=nope,alibi", "seed=0,1,2"]
    half, quarter = plan(words, mfu=0.5), plan(words, mfu=0.25, gpus=4)
    assert quarter.hours == pytest.approx(2 * half.hours)
    assert quarter.wall_hours == pytest.approx(quarter.hours * 2 / 6)  # 6 runs on 4: two rounds
    total = half.training_flops + half.validation_flops + half.evaluation_flops
    assert half.hours == pytest.approx(total / 0.5 / 989e12 / 3600)
    given = plan(words, device="nonsense", flops_per_second=1e15, mfu=1.0)
    assert given.hours == pytest.approx(total / 1e15 / 3600)


@pytest.mark.slow
@pytest.mark.parametrize("every", ["null", "7"])
def test_validation_is_what_a_run_reads_without_a_gradient(
    every: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    nll = Decoder.nll

    def counted(model: Decoder, tokens: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        read.append(tokens.numel())
        return nll(model, tokens, *rest, **named)

    monkeypatch.setattr(Decoder, "nll", counted)
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"{n} " + "words " * 50, encoding="utf-8")
    words = ["experiment=demo", "scheme=nope", "seed=0", "model=tiny", "tokenizer=bytes", "data=files"]
    words += [f"data.path={tmp_path}/*.txt"]
    words += [f"data.cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}/runs", "data.validation_fraction=0.3"]
    words += ["train.steps=12", "train.context_length=32", "train.batch_size=2", f"train.validate_every={every}"]
    words += ["train.validation_tokens=100", "evaluation.max_tokens=1000", "train.compile=false"]
    train(compose(words))
    config = compose(words)
    forward = forward_flops_per_token(config, 257, 32)
    assert plan(words).validation_flops == sum(read) * forward > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in choices("experiment") if name != "demo"])
def test_the_cost_in_an_experiments_header_is_what_plan_says(name: str) -> None:
    header = (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"\(posbench plan\): (\d+) runs .*, (\S+) FLOPs, (?:about ([\d,]+) H100-hours)?", header)
    said = plan([f"experiment={name}"])
    assert found
    assert int(found[1]) == said.runs and found[2] == f"{said.training_flops:.1e}"
    assert not found[3] or found[3] == f"{said.hours:,.0f}"


@pytest.mark.slow
def test_memory_is_about_what_a_compiled_step_keeps() -> None:
    words = ["model=tiny", "model.d_model=128", "train.context_length=640", "train.batch_size=2", "scheme=qk_rope"]
    config = compose([*words, "train.dtype=bfloat16"])
    model = build_model(config, 512)
    model.compute_dtype = torch.bfloat16
    model.compile_blocks()
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(512, (2, 641))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    estimate = training_memory(config, 512)
    rounded = 2 * num_parameters(config, 512)["body"]
    gradients_of_the_loss = 4 * 512 * 128 + 2 * 128 * 1280
    assert sum(kept.values()) == pytest.approx(estimate["activations"] + rounded + gradients_of_the_loss, rel=0.25)


def test_the_real_vocabulary_of_a_tokenizer_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of a file or of the hub too, and by `bench` alike."""
    tokenizer = TOKENIZERS["bpe"](TokenizerConfig(kind="bpe", vocab_size=300), ["some words to learn merges of"] * 9)
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(tmp_path / "t.json"))
    monkeypatch.setitem(TOKENIZERS, "hub", lambda config, texts: tokenizer)
    entries = tokenizer.get_vocab_size()
    sizes = ["model=tiny", "model.d_model=16", "model.num_heads=2", "train.context_length=16", "train.batch_size=1"]
    for words in (["tokenizer=file", f"tokenizer.path={tmp_path}/t.json"], ["tokenizer=hub", "tokenizer.name=gpt2"]):
        small = [*words, *sizes, "scheme=nope", "seed=0", "train.compile=false"]
        tables = 2 - compose(small).model.tied_embeddings
        planned = plan(small)
        assert planned.parameters_embedding == tables * entries * 16
        timed = bench_training(small, ["nope"], rounds=1, steps=1)
        total = planned.parameters_embedding + planned.parameters_body
        assert timed["vocab_size"] == entries and timed["schemes"]["nope"]["parameters"] == total


def test_hours_on_this_machine_follow_from_steps_timed_here() -> None:
    words = ["experiment=demo", "scheme=nope,alibi", "seed=0", "model=tiny", "train.context_length=32"]
    short, long = (plan([*words, f"train.tokens={n}"], time_here=True) for n in (100_000, 10_000_000))
    assert short.machine and short.machine_hours and long.machine_hours
    assert 20 < long.machine_hours / short.machine_hours < 500  # of 100 times the tokens, on a machine that drifts
    assert plan(words).machine_hours is None


def test_it_prints_within_80_columns_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "experiment=demo", "scheme=nope,alibi", "seed=0", "--gpus", "4"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and max(map(len, shown.output.splitlines())) <= 80
    assert "on 4 of them" in shown.output and "on this machine" in shown.output
    planned = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert planned["runs"] == 2 and planned["tokens_a_run"] == 1_000_448 and planned["machine_hours"] > 0


def test_epochs_are_planned_once_the_text_is_prepared_and_recorded_and_said_when_it_is_trained_on(
    documents: Path, tmp_path: Path
) -> None:
    words = [*small_run(documents, tmp_path / "cache", tmp_path / "runs"), "experiment=demo", "scheme=nope", "seed=0"]
    assert plan(words).epochs is None
    said = StringIO()
    run = train(compose(words), Console(file=said, width=200))
    tokens, text_tokens = 12 * 4 * 32, run.manifest.text_tokens
    assert plan(words).epochs == run.manifest.epochs == tokens / text_tokens
    assert f"demo/nope/seed=0: 1.54k tokens, {tokens / text_tokens:.2g} epochs of a text of " in said.getvalue()
