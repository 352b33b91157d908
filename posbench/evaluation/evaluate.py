"""One run scored by one protocol at one length, stored window by window under its `eval/` folder."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols import PROTOCOLS, protocol_named
from posbench.machine.files import read_bytes, read_json, write_bytes, write_json
from posbench.runs import Run

if TYPE_CHECKING:
    import pandas as pd

    from posbench.data import Corpus
    from posbench.model import Decoder

SETTINGS = ("targets", "windows", "max_tokens", "passage")  # those that decide what is scored
_CODE = (
    "evaluation/scoring.py",
    "evaluation/windows.py",
    "evaluation/protocols/*.py",
    "attention/*.py",
    "model.py",
    "schemes/*.py",
)
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


def store(run: Run, rows: pd.DataFrame, summary: dict[str, Any]) -> None:
    """Write `eval/<protocol>/<length>.parquet`, then its `.json`: a result counts once both are there.

    Raises: ConfigError where the run folder cannot be written, or a link in it leads elsewhere.
    """
    folder = run.path / "eval" / summary["protocol"]
    _make_inside(run, folder)
    final = folder / f"{summary['length']}.parquet"
    buffer = io.BytesIO()
    rows.to_parquet(buffer, index=False)
    content = buffer.getvalue()
    write_bytes(final, content)
    write_json(final.with_suffix(".json"), {**summary, "parquet": _size_and_sum(content)})


def _size_and_sum(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _make_inside(run: Run, folder: Path) -> None:
    try:
        inside = folder.resolve().is_relative_to(run.path.resolve())
        if inside:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}): make it writable, or copy the run elsewhere"
        ) from error
    if not (inside and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"{folder} is read-only, or a link out of its run: make it writable, or copy the run elsewhere"
        )


def stored(run: Run, protocol: str) -> dict[int, dict[str, Any]]:
    """Length -> summary of the results that a run holds for `protocol`, the damaged and incomplete left out."""
    folder = run.path / "eval" / protocol
    found = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        summary = _summary(file)
        if summary is not None and is_whole(file.with_suffix(".parquet"), summary):
            found[int(file.stem)] = summary
    return dict(sorted(found.items()))


def is_whole(file: Path, summary: Mapping[str, Any]) -> bool:
    """Whether the windows are those that the summary was stored with; readable, where an older one does not say."""
    from pyarrow import ArrowException, parquet

    try:
        content = read_bytes(file)
        if "parquet" in summary:
            return bool(summary["parquet"] == _size_and_sum(content))
        parquet.read_metadata(io.BytesIO(content))
    except (OSError, ArrowException):
        return False
    return True


def _summary(file: Path) -> dict[str, Any] | None:
    """A stored result, or None where the file is none, or of `retrieval` before its shuffled control."""
    try:
        summary = read_json(file)
        whole = {"protocol": str, "length": int, "settings": dict, **PROTOCOLS[file.parent.name].facts}
        named = file.parent.name, file.stem
        if all(isinstance(summary[key], kind) for key, kind in whole.items()) and named == (
            summary["protocol"],
            str(summary["length"]),
        ):
            return dict(summary)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


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
    if not run.is_finished:
        raise ConfigError(
            f"{run.name} is {manifest.get('status')}, not finished: give its train command again to finish it"
        )
    run.check_config()
    data, tokenizer, _ = run.trained_on
    for what, ours, theirs in (
        ("text", corpus.fingerprint, data),
        ("tokenizer", corpus.tokenizer_fingerprint, tokenizer),
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
        have = {} if again else {n: s for n, s in stored(run, protocol).items() if _same_settings(s, settings)}
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
                of_split = (
                    model,
                    corpus,
                    PROTOCOLS[protocol].split,
                    protocol,
                    length,
                    settings,
                    anchor or None,
                    advance,
                )
                with exhaustion_explained(chosen, advice):
                    rows, summary = score_split(*of_split)
                summary["peak_memory_bytes"] = chosen.peak_memory_bytes()
                store(run, rows, summary)
                have[length] = summary
            tell(have[length], is_new)
            results.append(have[length])
    return results


def _same_settings(summary: dict[str, Any], settings: EvaluationConfig) -> bool:
    return all(summary["settings"].get(key) == getattr(settings, key) for key in SETTINGS)
