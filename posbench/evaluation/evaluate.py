"""Score one run by each requested protocol at each length, and store the results in its `eval/` folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.config.units import duration, short_length
from posbench.data import Dataset
from posbench.evaluation import subjects
from posbench.evaluation.protocols import Advance, EvalProtocol, Scored, protocol_named
from posbench.evaluation.request import Request
from posbench.model.architecture import Architecture, build_architecture
from posbench.model.decoder import Decoder, ScoredModel
from posbench.runs import Run
from posbench.runs.checkpoint import weights_digest
from posbench.runs.fingerprints import code_fingerprint
from posbench.runs.results import BFLOAT16, FILE_CHANGED, Result, ResultKey, row_name
from posbench.system.console import Say
from posbench.system.device import Device, choose_device, exhaustion_explained, flushed_denormals, keep_freed_memory

Begin = Callable[..., object]  # called with `description` and `total` (tokens, about) before each length is scored
Tell = Callable[[Result, bool], object]  # called with each result and whether it is new


def score_split(
    model: ScoredModel,
    corpus: Dataset,
    split_name: str,
    protocol: str,
    length: int,
    settings: EvaluationConfig,
    anchor: int | None = None,
    advance: Advance = lambda tokens: None,
) -> Scored:
    """Score a model on one split by a protocol at one length, and return the rows and the header to store.

    Arguments: anchor, the longest length of the comparison, which decides what text is scored (default: `length`);
    advance, called with the number of tokens after each forward pass.
    Returns: the rows (such as document, start, targets, nll in nats, bytes), and a header with nll_mean (nats per
    target) and, if bytes are counted, bits_per_byte.
    """
    eval_protocol = protocol_named(protocol)
    began = time.perf_counter()
    split = corpus.splits[split_name]
    rows, figures = eval_protocol.score(model, corpus, split, length, settings, anchor or length, advance)
    header = {
        "protocol": protocol,
        "split": split.name,
        "length": length,
        **figures,
        "settings": {key: getattr(settings, key) for key in eval_protocol.decided_by},
        "data": corpus.fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint,
        "seconds": round(time.perf_counter() - began, 3),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "code": code_fingerprint(),
    }
    if eval_protocol.place:
        header["protocol_place"] = eval_protocol.place
    if eval_protocol.shares_targets:
        header["anchor"] = anchor or length
    return rows, header


def evaluate_run(
    run: Run,
    corpus: Dataset,
    request: Request,
    advance: Advance = lambda tokens: None,
    tell: Tell = lambda result, is_new: None,
    notice: Say = lambda text: None,
    begin: Begin = lambda description, total: None,
) -> list[Result]:
    """Score a finished run by each protocol at its lengths, except lengths that already have a result.

    Arguments: corpus, the run's own text or the one that the request names; advance, called with the number of tokens
    after each forward pass; tell, called with each result and whether it is new; begin, called with a `description` and
    a `total` of tokens before each length.
    Returns: the results, new and old, at the requested lengths that the scheme supports.
    Raises: ConfigError if the weights are another run's, or the run was trained on other text or with another
    tokenizer.
    """
    _check(run, corpus, request)
    stored = {result.key: result for result in run.results()[0]}
    results = []
    # The first variant is the run without changed options.
    for variant in request.variants:
        for part in _planned(run, corpus, variant, stored, notice):
            result = part.stored
            if result is None:
                begin(description=part.description, total=part.tokens)
                result = part.scorer.score(part.protocol, part.key, advance)
                # Scoring a subject takes minutes and often prints into a log, which shows no bar.
                if run.manifest.subject is not None:
                    notice(f"{run.config.scheme.name}: {part.description} in {duration(result.header['seconds'])}")
            # A later part with the same key is then not scored again.
            stored[result.key] = result
            tell(result, part.stored is None)
            results.append(result)
    return results


@dataclass(frozen=True)
class _Part:
    scorer: _Scorer
    protocol: EvalProtocol
    key: ResultKey
    stored: Result | None  # the stored result, if it is usable
    tokens: int  # to read, about

    @property
    def description(self) -> str:
        return f"{row_name(self.protocol.name, self.scorer.options)} {short_length(self.key.length)}"


def _planned(
    run: Run, corpus: Dataset, request: Request, results: Mapping[ResultKey, Result], notice: Say
) -> Iterator[_Part]:
    """Yield what to score for one variant of the request: a part per protocol and length, with its result if stored.

    `notice` tells of lengths that are left out. Raises: ConfigError if a protocol does not apply to the run.
    """
    is_subject = run.manifest.subject is not None
    # Options may belong to the task, which then makes other problems.
    if request.under and not is_subject:
        corpus = corpus.with_options(run.config_under(request.under).data)
    scorer = _SubjectScorer(run, corpus, request) if is_subject else _Scorer(run, corpus, request)
    longest = scorer.longest
    for protocol in map(protocol_named, request.protocols_of(run.config.evaluation.protocols)):
        protocol.check(run.config)
        lengths = _lengths(protocol, run.config, corpus, request, notice)
        # A length that this scheme does not support counts too, so that all schemes are scored on the same targets.
        anchor = max(lengths) if lengths and protocol.shares_targets else 0
        unchanged = [length for length in lengths if scorer.changes_nothing(length)]
        if unchanged:
            notice(
                f"{run.config.scheme.name}: {' '.join(request.under)} changes nothing at "
                f"{', '.join(map(short_length, unchanged))} (factor 1 up to the training length): not scored again"
            )
        for length in (length for length in lengths if length not in unchanged):
            tokens = corpus.window(length)
            # None: no limit.
            if longest is not None and tokens > longest:
                notice(f"{run.config.scheme.name} is defined up to {longest} tokens: longer lengths are skipped")
                continue
            key = scorer.key(protocol, length, anchor)
            stored_result = results.get(key)
            is_usable = stored_result is not None and not request.again and scorer.is_usable(protocol, stored_result)
            tokens_read = protocol.tokens_read(protocol.settings(run.config), tokens, anchor or tokens)
            if not is_usable:
                stored_result = None
            yield _Part(scorer, protocol, key, stored_result, tokens_read)


def _check(run: Run, corpus: Dataset, request: Request) -> None:
    # Raise ConfigError if the run was trained with another tokenizer or, unless another is requested, other text.
    prints = run.manifest.fingerprints
    fingerprints = {"tokenizer": (corpus.tokenizer_fingerprint, prints.tokenizer)}
    # Another text cannot have the run's fingerprint.
    if request.data is None:
        fingerprints["text"] = (corpus.fingerprint, prints.data)
    for part, (now, trained) in fingerprints.items():
        if now != trained:
            raise ConfigError(
                f"{run.name} was trained with another {part} (fingerprint {trained[:12]}, now {now[:12]}): "
                "evaluate it with the data it was trained on"
            )


def _lengths(protocol: EvalProtocol, config: Config, corpus: Dataset, request: Request, notice: Say) -> list[int]:
    """Return the lengths to score by a protocol, without default lengths that the text is too short for.

    Raises: ConfigError if a requested length, or every length, is too long for the text, or the split is empty.
    """
    split = corpus.splits[protocol.split]
    if split.num_tokens == 0:
        raise ConfigError(
            f"data={config.data.name} has no {protocol.split} text, which protocol {protocol.name} scores: evaluate "
            "another text (--data files --data data.path=FOLDER)"
        )
    lengths = request.lengths_of(protocol, config, corpus.splits["test"])
    if not lengths and protocol.shares_targets:
        raise ConfigError(
            f"the test split has too little text for the shortest length of protocol {protocol.name}, "
            f"{config.trained_length // 2} tokens: ask for shorter lengths (--length)"
        )
    refused = {}
    # The split of a task has None as its number of tokens: tasks make problems of any length.
    text_lengths = lengths if split.num_tokens else []
    for length in text_lengths:
        try:
            protocol.check_length(split, length, protocol.settings(config))
        except ConfigError as error:
            refused[length] = error
    if refused:
        first_error = next(iter(refused.values()))
        if request.lengths or len(refused) == len(lengths):
            raise first_error
        # Default lengths that the text is too short for are only left out.
        notice(f"{protocol.name}: without {', '.join(map(str, refused))} of the default lengths: {first_error}")
    return [length for length in lengths if length not in refused]


class _Scorer:
    # The model is loaded at the first length that needs it.

    def __init__(self, run: Run, corpus: Dataset, request: Request) -> None:
        self.run, self.corpus, self.request = run, corpus, request
        step = request.at_step
        self.at_step = None if step == run.manifest.num_steps else step  # None: the last step
        self.options = tuple(sorted(request.under))
        # Entries of a result's `under` besides the options: what else differs from the run as trained, on its own text.
        self.marks = [] if self.at_step is None else [f"step={step}"]
        # A pack's rounded weights have a digest of their own.
        if run.weights_digest != run.manifest.weights:
            self.marks.append(BFLOAT16)
        if run.check_scheme_files(request.scheme_changed):
            self.marks.append(FILE_CHANGED)
        if request.data is not None:
            self.marks.append(f"data={request.data.name}")

    @cached_property
    def architecture(self) -> Architecture:
        return build_architecture(self.run.config_under(self.request.under))

    @property
    def longest(self) -> int | None:
        """Return the most tokens that the model can read; None means no limit."""
        return self.architecture.scheme.longest

    def changes_nothing(self, length: int) -> bool:
        """Return whether the options leave the model as it is in windows of `length` tokens."""
        return False

    @cached_property
    def _decoder(self) -> Decoder:
        return self.run.load_model(self.request.under, self.at_step, self.request.scheme_changed, self.architecture)

    def model(self, length: int, device: Device) -> ScoredModel:
        """Return the model for windows of `length` tokens, on the device."""
        decoder = self._decoder
        decoder.to(device.torch).compute_dtype = device.dtype
        if device.compiled:
            decoder.allow_compiled_attention()
        return decoder

    def key(self, protocol: EvalProtocol, length: int, anchor: int) -> ResultKey:
        return ResultKey(protocol.name, length, (*self.options, *self.marks), anchor)

    def is_usable(self, protocol: EvalProtocol, result: Result) -> bool:
        """Return whether a stored result has the current settings, the requested number format and this text."""
        header, settings = result.header, protocol.settings(self.run.config)
        has_same_settings = all(_recorded(header, name) == getattr(settings, name) for name in protocol.decided_by)
        has_same_text = header.get("data") == self.corpus.fingerprint
        return has_same_settings and has_same_text and self.request.dtype in ("auto", header["dtype"])

    @flushed_denormals()
    def score(self, protocol: EvalProtocol, key: ResultKey, advance: Advance) -> Result:
        """Score one length and store the result. Raises: ConfigError if a loss is not finite or memory runs out."""
        device, settings = self.device(), protocol.settings(self.run.config)
        keep_freed_memory()
        length, anchor = key.length, key.anchor or None
        model = self.model(length, device)
        model.piece = self.request.piece or settings.piece
        remedy = (
            f"sequences of {length} tokens in pieces of {min(length, model.piece)} (--piece), "
            f"{settings.batch_tokens} tokens at once (evaluation.batch_tokens). Give a smaller --piece"
        )
        with exhaustion_explained(device, remedy):
            rows, header = score_split(
                model, self.corpus, protocol.split, protocol.name, length, settings, anchor, advance
            )
        # Every column of losses is checked, since protocols have several.
        if not rows.filter(regex="nll$").apply(lambda losses: losses.abs() < math.inf).all(axis=None):
            raise ConfigError(
                f"{self.run.name}: a loss of {protocol.name} at {length} tokens is not a finite number in "
                f"{header['dtype']}, so there is no result: try --dtype float32"
            )
        # The share of the scored split's 13-grams that also occur in the training text; None means unknown.
        header["overlap"] = self.corpus.overlap["splits"].get(header["split"], {}).get("share")
        header["weights"] = self.run.weights_digest
        if self.at_step is not None:
            step_digest = weights_digest(self.run.path / "checkpoints", self.at_step)
            header["weights"] = step_digest or self.run.weights_digest
        return self.run.store(key, rows, header)

    def device(self) -> Device:
        """Return the device to score on, with training's number format unless the request names another."""
        dtype = self.request.dtype
        if dtype == "auto":
            dtype = str(self.run.manifest.device.get("dtype", "auto"))
        return choose_device(replace(self.run.config.train, device=self.request.device, dtype=dtype))


def _recorded(header: Mapping[str, Any], name: str) -> Any:
    default = EvaluationConfig.__dataclass_fields__[name].default
    # A result from before a setting was recorded may have it as a figure, and else has its default.
    return header["settings"].get(name, header.get(name, default))


class _SubjectScorer(_Scorer):
    @property
    def longest(self) -> int | None:
        subject = self.run.manifest.subject
        assert subject is not None
        return subject.get("longest")

    def changes_nothing(self, length: int) -> bool:
        return subjects.changes_nothing(self.run, self.request.under, length)

    def model(self, length: int, device: Device) -> ScoredModel:
        from posbench.huggingface.loading import load

        return load(subjects.source_of(self.run), self.request.under, length, device)
