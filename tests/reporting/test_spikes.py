"""Gradient spikes are measured against a run's own usual norm, and named by scheme."""

from __future__ import annotations

from pathlib import Path

from fabricate import run_of

from posbench.reporting.findings import find
from posbench.reporting.sections.training import spike_words, spikes_text, training
from posbench.runs import append_metrics


def log_norms(folder: Path, scheme: str, seed: int, norms: dict[int, float]) -> None:
    """Rows of training with these largest norms, by step, and 0.9 to 1.1 elsewhere."""
    file = run_of(folder, scheme, seed).path / "metrics.jsonl"
    file.unlink()
    for step in range(1, 196):
        row = {"kind": "train", "step": step, "tokens": step * 2048, "loss": 3.0, "lr": 1e-3, "grad_norm": 0.8}
        append_metrics(file, {**row, "grad_norm_max": norms.get(step, 1.0 + (step % 3 - 1) / 10), "skipped_steps": 0})


def test_a_spike_is_named_with_its_size_and_place(own: Path) -> None:
    warmup = find(own).config.train.warmup_steps
    log_norms(own, "nope", 0, {**dict.fromkeys(range(1, warmup), 7.0), warmup: 12.0})  # the usual norm is of later
    log_norms(own, "nope", 1, {150: 9.9})
    log_norms(own, "alibi", 0, {})
    findings = find(own)
    assert [(each.scheme, each.seed, each.has_spike) for each in findings.gradients] == [
        ("alibi", 0, False),
        ("nope", 0, True),
        ("nope", 1, False),
    ]
    [words] = spike_words(findings)
    assert f"nope, 1 of 2 runs (up to 12 times, seed 0, step {warmup} or shortly before)" in words
    assert spikes_text(findings) == "nope seed 0: 12 times"
    section = training(findings, ["curves"])
    assert section is not None and section.on_terminal


def test_runs_that_did_not_log_it_are_not_said_to_be_free_of_spikes(own: Path) -> None:
    findings = find(own)
    assert spike_words(findings) == [] and spikes_text(findings) == "not recorded"
    section = training(findings, ["curves"])
    assert section is not None and not section.on_terminal
