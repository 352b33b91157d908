"""What the benchmarks promise of themselves; their figures are nobody's promise."""

import io
import weakref
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import attention_by_length, memory_by_length, peers, profile_step, shapes
from posbench import bench
from posbench.machine.device import choose_device

TINY = shapes.Shape(layers=1, width=32, heads=2, context=16, batch=2, vocab=64)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_named_as_a_model_is_that_model(name):
    from posbench import compose

    if name not in ("A", "B"):
        ours, theirs = shapes.config_of(shapes.SHAPES[name], "nope", "float32", False).model, compose([f"model={name}"])
        assert replace(ours, name=name, tied_embeddings=theirs.model.tied_embeddings) == theirs.model


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_contenders_that_are_measured_alone_do_not_stand_in_memory_together(alone, monkeypatch):
    alive, most = weakref.WeakSet(), []
    step = peers.Ours.step

    def stepped(self, tokens):
        alive.add(self)
        most.append(len(alive))
        return step(self, tokens)

    monkeypatch.setattr(peers.Ours, "step", stepped)
    result = peers.compare("tiny", "float32", [False], 2, 1, "posbench q", keep=False, alone=alone)
    assert set(result["contenders"]) == {"posbench qk_rope", "posbench qkvo_rope"} and max(most) == (1 if alone else 2)


def test_a_scheme_of_ones_own_choice_is_a_contender():
    made = peers.contenders(TINY, "float32", [False], True, "posbench t5", choose_device_of_tiny())
    assert list(made) == ["posbench t5"]


@pytest.mark.slow
def test_a_contender_that_fails_keeps_no_other_from_being_measured(monkeypatch):
    def step(self, tokens, step=peers.Ours.step):
        if self.training_step.model.scheme.first.sites == {"q", "k"}:
            raise RuntimeError("out of memory")
        return step(self, tokens)

    monkeypatch.setattr(peers.Ours, "step", step)
    result = peers.compare("tiny", "float32", [False], 1, 1, "posbench qk_rope,posbench qkvo_rope", keep=False)
    assert set(result["contenders"]) == {"posbench qkvo_rope"}
    assert result["failed"] == {"posbench qk_rope": "RuntimeError: out of memory"}


def choose_device_of_tiny():
    return choose_device(shapes.config_of(TINY, "nope", "float32", False).train)


def test_a_profile_names_operations_of_a_step():
    contender = peers.Ours(TINY, "nope", "float32", False)
    rows = profile_step.operations(contender, torch.randint(64, (2, 17)), choose_device_of_tiny())
    seconds = [seconds for _, seconds, _ in rows]
    assert seconds == sorted(seconds, reverse=True) and "aten::mm" in {name for name, _, _ in rows}


def test_evaluation_is_scored_once_before_it_is_timed(monkeypatch):
    times = iter([9.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(bench, "window_seconds", lambda *args: next(times))
    words = ["model=tiny", "train.device=cpu", "train.compile=false"]
    figures = bench.bench_evaluation(words, ["nope"], [8], rounds=3)["schemes"]["nope"]["8"]
    assert (figures["first_seconds"], figures["seconds"]) == (9.0, 2.0)


def test_mfu_is_shown_of_the_datasheet_too_where_it_states_a_rate(monkeypatch):
    monkeypatch.setattr(bench, "datasheet_rate", lambda name: 2e12)
    words = ["model=tiny", "train.context_length=16", "train.batch_size=2", "train.device=cpu", "train.compile=false"]
    result = bench.bench_training(words, ["nope"], rounds=1, steps=1)
    console = Console(file=io.StringIO(), width=80)
    bench._show_training(result, console)
    shown, figures = console.file.getvalue(), result["schemes"]["nope"]
    assert (
        "sheet" in shown and "datasheet's 2,000 GFLOP/s" in shown and f"{100 * figures['mfu_datasheet']:.1f}%" in shown
    )


def test_a_ratio_is_that_of_two_turns_in_a_row(monkeypatch):
    """On a machine that halves its speed in between: the second scheme takes 1.25 times as long as the first."""
    speeds = iter([speed for pair in (1.0, 0.5, 0.5, 1.0, 1.0, 0.5) for speed in (pair, pair)])
    rates = iter([1000.0, 1000.0, 1000.0, 800.0] * 3)
    monkeypatch.setattr(bench.Contender, "rate", lambda self, steps: next(rates) * next(speeds))
    words = ["model=tiny", "train.context_length=16", "train.batch_size=2", "train.device=cpu", "train.compile=false"]
    figures = bench.bench_training(words, ["nope", "qk_rope"], rounds=3, steps=1)["schemes"]
    assert figures["qk_rope"]["step_to_first"] == pytest.approx(0.8)
    assert figures["qk_rope"]["step_to_first_quartiles"] == pytest.approx([0.8, 0.8])
    assert figures["qk_rope"]["tokens_per_second"] == 800.0 * 0.5


def test_attention_by_length_says_from_where_a_row_is_faster(capsys):
    def at(*milliseconds: float) -> dict[str, dict[str, float]]:
        return {
            str(256 << 2 * n): {"seconds": ms / 1e3, "peak_memory_bytes": 2.0**20} for n, ms in enumerate(milliseconds)
        }

    attention_by_length.show(
        {attention_by_length.BASE: at(1, 16, 256), "linear_nope": at(4, 16, 64), "alibi": at(2, 32, 512)}
    )
    said = capsys.readouterr().out
    assert "qk_rope: 256 1.0 ms 1 MiB, 1024 16.0 ms 1 MiB, 4096 256.0 ms 1 MiB" in said
    assert "linear_nope is faster than qk_rope from about 1,024 tokens" in said
    assert "alibi is faster than qk_rope not up to 4,096 tokens" in said


def test_pictures_by_length_are_drawn(tmp_path):
    figures = {
        scheme: {str(length): {"seconds": length / 1e4, "peak_memory_bytes": 2.0**28} for length in (1024, 2048)}
        for scheme in ("qk_rope", "alibi")
    }
    for draw in (memory_by_length.draw, attention_by_length.draw):
        draw(figures, tmp_path / "drawn.svg")
        assert "</svg>" in (tmp_path / "drawn.svg").read_text()
