"""One run scored by one protocol at one length, stored window by window under its `eval/` folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols import PROTOCOLS, protocol_named
from posbench.runs import Run
from posbench.runs.readings import Reading, store

if TYPE_CHECKING:
    import pandas as pd

    from posbench.data import Corpus
    from posbench.model import Decoder

SETTINGS = ("targets", "windows", "max_tokens", "passage")  # those that decide what is scored
_CODE = ("evaluation/scoring.py", "evaluation/windows.py", "attention/*.py", "model.py", "schemes/base.py")
BOS = "one beginning-of-document token before each document; never a target"


def parse_length(text: str) -> int:
    """Tokens from `8192`, `8k` (8192) or `1m` (1048576). Raises: ConfigError for anything else, or below 2."""
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", text.strip())
    length = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if not 2 <= length <= 1 << 24:
        raise ConfigError(f"--length {text!r} is no length: give tokens from 2 to 16m, such as 4096 or 8k (8192)")
    return length


def score_split(
    model: Decoder,
    corpus: Corpus,
    split_name: str,
    protocol: str,
    length: int,
    settings: EvaluationConfig,
    anchor: int | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of windows and its summary, as stored under `eval/`.

    Arguments: anchor, the longest length of a `fixed` comparison (default: `length`).
    Returns: the rows (document, start, targets, nll in nats, bytes) and a mapping with nll_mean (nats per target) and
    bits_per_byte.
    """
    from posbench.runs.fingerprints import code_fingerprint

    protocol_ = PROTOCOLS[protocol]
    began = time.perf_counter()
    read = 0

    def count(tokens: int) -> None:
        nonlocal read
        read += tokens
        advance(tokens)

    rows, figures = protocol_.score(model, corpus, corpus.splits[split_name], length, settings, anchor or length, count)
    seconds = time.perf_counter() - began
    summary = {
        "protocol": protocol,
        "split": split_name,
        "length": length,
        **({"anchor": anchor or length} if protocol_.has_anchor else {}),
        **figures,
        "crosses_documents": protocol_.crosses_documents,
        "bos": BOS,
        "settings": {key: getattr(settings, key) for key in SETTINGS},
        "data": corpus.fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint,
        "seconds": seconds,
        "tokens_per_second": read / seconds,
        "dtype": str(model.compute_dtype or model.embedding.weight.dtype).removeprefix("torch."),
        "device": str(model.embedding.weight.device),
        "code": code_fingerprint((*_CODE, *protocol_.code())),
    }
    return rows, summary


def evaluate_run(
    run: Run,
    corpus: Corpus,
    lengths: Mapping[str, Sequence[int]],
    settings: EvaluationConfig,
    device: str = "auto",
    dtype: str = "auto",
    again: bool = False,
    advance: Callable[[int], object] = lambda tokens: None,
    tell: Callable[[dict[str, Any], bool], object] = lambda summary, is_new: None,
    notice: Callable[[str], object] = lambda text: None,
) -> list[dict[str, Any]]:
    """Score a finished run by each protocol at its lengths; what it already holds is not scored again.

    `fixed` results keep one anchor: asking for a longer length than any before scores the others again on the new
    targets, so that all lengths of a run stay comparable; `notice` is told.
    Arguments: tell, called with each summary as soon as it is there, and whether it is new.
    Returns: the summaries, new and old, of the lengths asked for.
    Raises: ConfigError where the run is not finished, its configuration or weights are another run's, or it was trained
    on other text or with another tokenizer.
    """
    from posbench.machine.device import choose_device
    from posbench.machine.memory import exhaustion_explained

    manifest = run.manifest
    manifest.check_current("evaluated")
    if not run.is_finished:
        raise ConfigError(f"{run.name} is {manifest.status}, not finished: give its train command again to finish it")
    run.check_config()
    for what, ours, theirs in (
        ("text", corpus.fingerprint, manifest.fingerprints.data),
        ("tokenizer", corpus.tokenizer_fingerprint, manifest.fingerprints.tokenizer),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{run.name} was trained with another {what} (fingerprint {theirs[:12]}, now {ours[:12]}): "
                "evaluate it with the data it was trained on"
            )
    config = run.config
    chosen = choose_device(replace(config.train, device=device, dtype=dtype))
    model: Decoder | None = None
    results = []
    for protocol, of_protocol in lengths.items():
        have = {n: h for n, h in _stored(run, protocol).items() if not again and _same_settings(h, settings)}
        wanted = sorted(set(of_protocol))
        has_anchor = protocol_named(protocol).has_anchor
        anchor = max([*wanted, *have]) if has_anchor else 0
        if has_anchor and any(s["anchor"] != anchor for s in have.values()):
            notice(
                f"{protocol}: {anchor} tokens is the longest length now, so what was scored at "
                f"{', '.join(map(str, have))} is scored again, on its targets"
            )
            wanted = sorted({*wanted, *have})
            have = {}
        for length in wanted:
            is_new = length not in have
            if is_new:
                if model is None:
                    model = run.load_model().to(chosen.torch)
                    model.compute_dtype = chosen.dtype
                    model.piece = settings.piece
                chosen.reset_peak_memory()
                advice = (
                    f"sequences of {length} tokens in pieces of {min(length, settings.piece)} (--piece), "
                    f"{settings.batch_tokens} tokens at once (evaluation.batch_tokens). Give a smaller --piece"
                )
                split = PROTOCOLS[protocol].split
                with exhaustion_explained(chosen, advice):
                    rows, summary = score_split(
                        model, corpus, split, protocol, length, settings, anchor or None, advance
                    )
                summary["peak_memory_bytes"] = chosen.peak_memory_bytes()
                reading = Reading(protocol, length)
                have[length] = dict(store(run, reading, rows, {**summary, "weights": manifest.weights}).header)
            tell(have[length], is_new)
            results.append(have[length])
    return results


def _stored(run: Run, protocol: str) -> dict[int, dict[str, Any]]:
    """Length -> header of what the run holds for a protocol; without older results that lack a figure of today's."""
    results, _ = run.results()
    return {
        result.length: dict(result.header)
        for result in results
        if result.protocol == protocol and PROTOCOLS[protocol].has_facts(result.header)
    }


def _same_settings(summary: dict[str, Any], settings: EvaluationConfig) -> bool:
    return all(summary["settings"].get(key) == getattr(settings, key) for key in SETTINGS)
