"""What a run may be: one dataclass a config group, and every rule about their values.

A `Config` that exists is valid: each dataclass checks itself when it is made, so nothing is built, downloaded or
written from a configuration that cannot run. This module imports no torch; the rules that only a scheme knows (its own
options) are checked by `posbench.schemes.build_scheme`.

Words: a *group* is a folder of `conf/`; a *field* is a key of it. Errors are `ConfigError`, a `ValueError` that names
the field, the value and the remedy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from posbench.schedule import decay_begins, warmup_steps
from posbench.units import short_count, whole_number

MISSING: Any = (
    "???"  # omegaconf.MISSING: a value that must be given; written out so that `posbench --help` need not import it
)

DTYPES = ("auto", "float32", "bfloat16")
SCHEDULES = ("cosine", "wsd", "constant")
SOURCES = ("stdlib", "files", "hub")
TOKENIZERS = ("bpe", "bytes", "file", "hub")
TRACKERS = ("none", "wandb")
STRATEGIES = ("ddp", "fsdp")
_MOST_TOKENS = 1 << 45  # of one run: 35 trillion
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_MODEL_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class ConfigError(ValueError):
    """A value that a user can fix: the message names the cause, the value and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'qk_rope'?"` for the closest of `known`, or the empty string when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_name(what: str, name: str) -> None:
    """Hold a name that becomes a folder to letters of any script, digits and `._=+-`, at most 100 of them.

    Raises: ConfigError, so that no name leaves the runs folder or is hidden in it.
    """
    is_name = isinstance(name, str) and 1 <= len(name) <= 100 and name[0].isalnum()
    is_name = is_name and all(letter in "._=+-" or unicodedata.category(letter)[0] in "LMN" for letter in name)
    if not is_name or len(name.encode()) > 240:  # file systems take 255 bytes
        raise ConfigError(
            f"{what}={name!r} cannot name a folder: use 1 to 100 letters, digits and . _ = + - (at most 240 bytes), "
            "beginning with a letter or digit"
        )


def branch_name(trunk: str, tokens: int) -> str:
    """The experiment's name of a branch: `ladder_s` of two million tokens is `ladder_s-2M`."""
    return f"{trunk}-{short_count(tokens)}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    known = list(known)
    _require(value in known, f"{what}={value!r} is not known{nearest(str(value), known)} (known: {', '.join(known)})")


def _between(what: str, value: float, low: float, high: float) -> None:
    _require(
        isinstance(value, (int, float)) and low <= value <= high,  # NaN lies nowhere
        f"{what}={value} is out of range: it must lie between {low:g} and {high:g}",
    )


def _check_rate(what: str, value: float) -> None:
    _between(what, value, 1e-12, 10)


def count(what: str, value: Any) -> int:
    """A number of tokens, of `200k`, `20M` or `1e6` too. Arguments: what, the field. Raises: ConfigError."""
    number = whole_number(value)
    if number is None:
        raise ConfigError(f"{what}={value!r} is not a number of tokens: give a whole number, or 200k, 20M, 2.5B, 1e6")
    return number


def length(what: str, value: Any) -> int:
    """`count` of a window's length: `8k` is 8192, `1m` 1048576."""
    number = whole_number(value, 1024)
    if number is None:
        raise ConfigError(f"{what}={value!r} is not a length: give tokens from 2 to 16m, such as 4096 or 8k (8192)")
    return number


def _each(read: Callable[[str, Any], int], what: str, values: Any) -> list[int]:
    _require(isinstance(values, list), f"{what}={values!r} is not a list: give {what}=[...]")
    return [read(what, value) for value in values]


def _path(what: str, value: Any) -> Any:
    """A path, or a list of them, with `~` expanded. Raises: ConfigError for what cannot be one on this machine."""
    if isinstance(value, list):
        return [_path(what, word) for word in value]
    _require(value is None or isinstance(value, (str, Path)), f"{what}={value!r} is not a path or a list of paths")
    if value is None:
        return None
    _require("\0" not in str(value), f"{what}={value!r} contains a NUL character: remove it")
    address = _ADDRESS.match(str(value))
    _require(
        address is None,
        f"{what} is a web address ({address and address[0]}...), but only files of this machine are read: "
        "download it first, or see data=fineweb_edu for text of the Hugging Face hub",
    )
    return os.path.expanduser(value)  # noqa: PTH111 (`~` of an unknown user stays as it is)


@dataclass
class SchemeConfig:
    """One row of a table: its position scheme with its options, which the scheme's class checks, and its attention."""

    name: str  # the scheme's name in tables and the run folder, such as `vo_rope`
    kind: str  # the registered class that carries it out, such as `rotary`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the scheme's class
    attention: dict[str, Any] = field(default_factory=dict)  # the kind of attention and its options; {}: softmax
    lr: float | None = None  # peak learning rate of this row; None: train.lr

    def __post_init__(self) -> None:
        check_name("scheme.name", self.name)
        _require(
            isinstance(self.kind, str) and bool(self.kind),
            f"scheme.kind={self.kind!r} must name a kind of scheme, such as rotary",
        )
        _require(
            isinstance(self.attention, dict),
            f"scheme.attention={self.attention!r} is not a mapping: give scheme.attention={{kind: softmax}}",
        )
        if self.lr is not None:
            _check_rate("scheme.lr", self.lr)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> SchemeConfig:
        """From the flat form of `conf/scheme/*.yaml`, where the options stand beside `name` and `kind`."""
        for key in ("name", "kind"):
            _require(
                key in mapping,
                f"the scheme has no {key!r}: give scheme={{name: ..., kind: ...}} or a name from conf/scheme",
            )
        ours = ("name", "kind", "attention", "lr")
        options = {key: value for key, value in mapping.items() if key not in ours}
        return cls(mapping["name"], mapping["kind"], options, mapping.get("attention") or {}, mapping.get("lr"))

    def to_mapping(self) -> dict[str, Any]:
        """The flat form of `conf/scheme/*.yaml`."""
        attention = {"attention": self.attention} if self.attention else {}
        lr = {} if self.lr is None else {"lr": self.lr}
        return {"name": self.name, "kind": self.kind, **lr, **attention, **self.options}


@dataclass
class ModelConfig:
    """The LLaMA-style decoder: pre-norm RMSNorm, SwiGLU, no biases."""

    name: str = MISSING
    num_layers: int = MISSING
    d_model: int = MISSING  # C
    num_heads: int = MISSING  # H
    num_kv_heads: int | None = None  # null: as many as num_heads (no grouping)
    head_dim: int | None = None  # D; null: d_model / num_heads
    ffn_dim: int | None = None  # null: 8/3 d_model, rounded up to a multiple of 16
    tied_embeddings: bool = False
    vocab_size: int | None = None  # V; null: the tokenizer's
    norm_eps: float = 1e-5
    init_std: float = 0.02  # also the token embeddings', the unit of the sinusoidal amplitude

    def __post_init__(self) -> None:
        _between("model.num_layers", self.num_layers, 1, 1000)
        _between("model.d_model", self.d_model, 2, 1 << 16)
        _between("model.num_heads", self.num_heads, 1, 1024)
        if self.head_dim is None:
            _require(
                self.d_model % self.num_heads == 0,
                f"model.d_model={self.d_model} does not divide into model.num_heads={self.num_heads} heads: "
                "change one, or set model.head_dim",
            )
            self.head_dim = self.d_model // self.num_heads
        _between("model.head_dim", self.head_dim, 2, 1024)
        _require(
            self.head_dim % 2 == 0,
            f"model.head_dim={self.head_dim} is odd: rotations turn pairs of channels, so choose an even number",
        )
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        _between("model.num_kv_heads", self.num_kv_heads, 1, 1024)
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}: "
            "change one, because every key/value head serves the same number of query heads",
        )
        if self.ffn_dim is None:
            self.ffn_dim = math.ceil(8 * self.d_model / 3 / 16) * 16
        _between("model.ffn_dim", self.ffn_dim, 1, 1 << 20)
        if self.vocab_size is not None:
            _between("model.vocab_size", self.vocab_size, 2, 1 << 22)
        _between("model.norm_eps", self.norm_eps, 1e-12, 1e-2)
        _between("model.init_std", self.init_std, 1e-6, 10)


@dataclass
class DataConfig:
    """Where the text comes from. Splits are made of whole documents."""

    name: str = MISSING
    source: str = MISSING  # stdlib | files | hub
    path: Any = None  # files: one path or glob, or a list of them, split by a hash of each document
    train_path: Any = None  # files: explicit files of a split instead of `path` (train needs validation too)
    validation_path: Any = None
    test_path: Any = None  # null with train_path: no test text, so no lengths can be evaluated
    text_column: str = "text"
    cut_bytes: int | None = None  # files: cut text files at blank lines into documents of about this many bytes
    articles: bool = False  # rows are lines of WikiText: join them to articles, which begin at ` = Title = `
    repository: str | None = None  # hub: owner/name
    subset: str | None = None  # hub: the data set's own configuration
    revision: str | None = None  # hub: a commit, so that the text stays the same
    train_split: str = "train"  # hub: the repository's own split names; a null one is cut from train by hash
    validation_split: str | None = None
    test_split: str | None = None
    token_budget: Any = None  # stop reading train text once it gave this many tokens (about); null: all of it
    validation_fraction: float = 0.05  # of the documents, where validation or test is cut from `path` or train by hash
    test_fraction: float = 0.10
    tuning_fraction: float = 0.0  # above 0, for tuning: this part of train becomes validation, without a test split
    cache_dir: str | None = None  # token shards; null: $POSBENCH_CACHE, else posbench in the user's cache folder

    def __post_init__(self) -> None:
        _one_of("data.source", self.source, SOURCES)
        _between("data.validation_fraction", self.validation_fraction, 0.0, 0.5)
        _between("data.test_fraction", self.test_fraction, 0.0, 0.5)
        _between("data.tuning_fraction", self.tuning_fraction, 0.0, 0.5)
        _require(
            self.validation_fraction + self.test_fraction < 1,
            f"data.validation_fraction={self.validation_fraction} and data.test_fraction={self.test_fraction} "
            "leave no text to train on: lower them, together they must be below 1",
        )
        if self.cut_bytes is not None:
            _between("data.cut_bytes", self.cut_bytes, 1000, 1 << 27)
        if self.token_budget is not None:
            self.token_budget = count("data.token_budget", self.token_budget)
            _between("data.token_budget", self.token_budget, 1, 1 << 50)
        for name in ("path", "train_path", "validation_path", "test_path", "cache_dir"):
            setattr(self, name, _path(f"data.{name}", getattr(self, name)))
        explicit = [self.train_path, self.validation_path, self.test_path]
        if self.source == "files":
            _require(
                (self.path is not None) != (self.train_path is not None),
                "data=files needs data.path='...' (files to be split by document) or data.train_path='...' "
                "with data.validation_path='...' (one of the two)",
            )
            _require(
                self.train_path is None or self.validation_path is not None,
                "data.train_path is given without data.validation_path: name the held-out files too, or give "
                "data.path alone to have them split by document",
            )
        else:
            _require(
                self.path is None and explicit == [None, None, None],
                f"data.path and data.train_path are for your own files, but the source is {self.source!r}: give "
                "data=files too (in the YAML of an experiment: '- override /data: files' under 'defaults:')",
            )
        if self.source == "hub":
            _require(
                bool(_REPOSITORY.fullmatch(str(self.repository))),
                f"data.repository={self.repository!r} is not a repository of the hub: give owner/name, such as "
                "HuggingFaceFW/fineweb-edu",
            )


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    kind: str = MISSING  # bpe (byte-level, trained on the train split) | bytes | file | hub
    vocab_size: int = 4096  # bpe: entries, the 256 bytes and the beginning-of-document token among them
    path: str | None = None  # file: a tokenizer.json
    name: str | None = None  # hub: a repository with a tokenizer.json, such as gpt2 or owner/name
    revision: str | None = None  # hub: a commit, so that the tokenizer stays the same
    training_bytes: int = 20_000_000  # bpe: about how much of the train split it is trained on

    def __post_init__(self) -> None:
        _one_of("tokenizer.kind", self.kind, TOKENIZERS)
        _between("tokenizer.vocab_size", self.vocab_size, 258, 1 << 20)
        _between("tokenizer.training_bytes", self.training_bytes, 1000, 1 << 40)
        self.path = _path("tokenizer.path", self.path)
        _require(self.kind != "file" or bool(self.path), "tokenizer=file needs tokenizer.path=.../tokenizer.json")
        _require(
            self.kind != "hub" or bool(_MODEL_REPOSITORY.fullmatch(str(self.name))),
            f"tokenizer.name={self.name!r} is not a repository of the hub: give its name, such as "
            "tokenizer.name=gpt2 or tokenizer.name=EleutherAI/gpt-neox-20b",
        )


@dataclass
class TrainConfig:
    """The pre-training loop."""

    steps: int | None = None  # optimizer steps; null: as many whole steps as `tokens` allows
    tokens: Any = None  # token budget; ignored if `steps` is set
    context_length: Any = MISSING  # T, tokens
    batch_size: int = MISSING  # B, sequences per step (all micro-batches together)
    accumulation: int = 1  # micro-batches per step
    lr: float = MISSING  # peak learning rate
    lr_of: Any = None  # {scheme: rate}: rates of single schemes in place of lr (`posbench tune` finds them)
    lr_end_ratio: float = 0.1  # the last learning rate as a fraction of the peak
    warmup_ratio: float = 0.05  # fraction of the steps
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, linear decay) | constant
    decay_ratio: float = 0.2  # wsd: the fraction of the steps in which the rate decays
    branch_tokens: Any = field(default_factory=list)  # wsd: shorter runs that branch off this one, ascending
    trunk_tokens: Any = None  # wsd: tokens of the run that this one branches off; null: it is no branch
    weight_decay: float = 0.1  # matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0  # global norm; 0 switches clipping off
    device: str = "auto"  # auto (cuda where there is one) | cpu | cuda | cuda:1 ...
    dtype: str = "auto"  # auto (bfloat16 where the device is fast in it) | float32 | bfloat16
    compile: bool | None = None  # null: where it pays
    validate_every: int | None = None  # steps; null: ten times per run
    validation_tokens: Any = 65_536  # scored at each of these and after the last step, for curve and loss table alike
    checkpoint_every: int | None = None  # steps; null: ten times per run
    keep_checkpoints: int = 2
    log_every: int = 10  # steps between lines of metrics.jsonl
    max_skipped_steps: int = 10  # steps that may be skipped for NaN or infinity; with more the run has died

    def __post_init__(self) -> None:
        self.context_length = length("train.context_length", self.context_length)
        self.validation_tokens = count("train.validation_tokens", self.validation_tokens)
        self.branch_tokens = _each(count, "train.branch_tokens", self.branch_tokens)
        if self.tokens is not None:
            self.tokens = count("train.tokens", self.tokens)
        if self.trunk_tokens is not None:
            self.trunk_tokens = count("train.trunk_tokens", self.trunk_tokens)
        _require(
            self.steps is not None or self.tokens is not None,
            "give train.steps=... or train.tokens=...: neither is set",
        )
        _between("train.context_length", self.context_length, 2, 1 << 22)
        _between("train.batch_size", self.batch_size, 1, 1 << 20)
        _between("train.accumulation", self.accumulation, 1, self.batch_size)
        _require(
            self.batch_size % self.accumulation == 0,
            f"train.batch_size={self.batch_size} does not divide into train.accumulation={self.accumulation} "
            "equal micro-batches",
        )
        if self.steps is not None:
            _between("train.steps", self.steps, 1, 1 << 40)
        elif self.tokens is not None:
            _between("train.tokens", self.tokens, 1, _MOST_TOKENS)
            _require(
                self.tokens >= self.tokens_per_step,
                f"train.tokens={self.tokens} is less than one step of batch_size x context_length = "
                f"{self.tokens_per_step} tokens: raise it, or lower train.batch_size",
            )
        _require(
            self.num_steps * self.tokens_per_step <= _MOST_TOKENS,
            f"train.steps={self.steps} of {self.tokens_per_step} tokens are more than {_MOST_TOKENS:.0e} tokens: "
            "lower train.steps, train.batch_size or train.context_length",
        )
        _check_rate("train.lr", self.lr)
        _require(
            self.lr_of is None or isinstance(self.lr_of, dict),
            f"train.lr_of={self.lr_of!r} is not a mapping: give {{scheme: rate}}",
        )
        for scheme, rate in (self.lr_of or {}).items():
            _check_rate(f"train.lr_of.{scheme}", rate)
        _between("train.lr_end_ratio", self.lr_end_ratio, 0, 1)
        _between("train.warmup_ratio", self.warmup_ratio, 0, 1)
        _one_of("train.schedule", self.schedule, SCHEDULES)
        _between("train.decay_ratio", self.decay_ratio, 0, 1)
        self._check_family()
        _between("train.weight_decay", self.weight_decay, 0, 10)
        _between("train.beta1", self.beta1, 0, 0.9999999)
        _between("train.beta2", self.beta2, 0, 0.9999999)
        _between("train.eps", self.eps, 1e-30, 1)
        _between("train.grad_clip", self.grad_clip, 0, 1e9)
        _one_of("train.dtype", self.dtype, DTYPES)
        _require(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device))),
            f"train.device={self.device!r} is not known: give auto, cpu, cuda or cuda:<number>",
        )
        for name in ("validate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                _between(f"train.{name}", getattr(self, name), 1, 1 << 40)
        _between("train.validation_tokens", self.validation_tokens, 1, 1 << 40)
        _between("train.keep_checkpoints", self.keep_checkpoints, 2, 1000)
        _between("train.log_every", self.log_every, 1, 1 << 40)
        _between("train.max_skipped_steps", self.max_skipped_steps, 0, 1 << 40)

    def _check_family(self) -> None:
        """Hold a trunk and its branches to runs that are the same until the shorter one's decay begins."""
        family = {f"train.branch_tokens[{n}]": tokens for n, tokens in enumerate(self.branch_tokens)}
        if self.trunk_tokens is not None:
            family["train.trunk_tokens"] = self.trunk_tokens
        if not family:
            return
        for what, tokens in family.items():
            _between(what, tokens, 1, _MOST_TOKENS)
            self._check_whole(what, tokens)
        _require(
            self.schedule == "wsd",
            f"train.schedule={self.schedule} has no branches: set train.schedule=wsd, or leave out "
            "train.branch_tokens and train.trunk_tokens",
        )
        _require(
            self.steps is None and self.tokens is not None,
            "train.branch_tokens and train.trunk_tokens are counted in tokens: set train.steps=null and train.tokens",
        )
        self._check_whole("train.tokens", self.tokens)
        _require(self.decay_ratio > 0, "train.decay_ratio=0 leaves branches without a decay: raise it")
        _require(
            not (self.branch_tokens and self.is_branch),
            f"train.trunk_tokens={self.trunk_tokens} makes this run a branch, which has no branches itself: set "
            "train.branch_tokens=[]",
        )
        _require(
            not self.is_branch or self.tokens < (self.trunk_tokens or 0),
            f"train.tokens={self.tokens} must be less than train.trunk_tokens={self.trunk_tokens}: change one",
        )
        _require(
            sorted({*self.branch_tokens}) == self.branch_tokens and max(self.branch_tokens, default=0) < self.tokens,
            f"train.branch_tokens={self.branch_tokens} must be in ascending order, below the trunk's "
            f"train.tokens={self.tokens}",
        )
        shortest = min([*self.branch_tokens, self.tokens])
        _require(
            decay_begins(self.decay_ratio, shortest // self.tokens_per_step) >= self.warmup_steps,
            f"the decay of a run of {shortest} tokens would begin before the {self.warmup_steps} steps of warm-up end "
            f"(train.warmup_ratio={self.warmup_ratio} of the trunk's {self.trunk_steps} steps): lower "
            "train.warmup_ratio or train.decay_ratio, or make the shortest branch longer",
        )

    def _check_whole(self, what: str, tokens: int) -> None:
        """Runs of a family are counted in whole steps."""
        whole = max(1, round(tokens / self.tokens_per_step)) * self.tokens_per_step
        _require(
            tokens == whole,
            f"{what}={tokens} is not a whole number of steps of {self.tokens_per_step} tokens, which runs with "
            f"branches need: the nearest is {whole}",
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step learns from."""
        return self.batch_size * self.context_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        return int(self.tokens // self.tokens_per_step)

    @property
    def is_branch(self) -> bool:
        """Whether the run branches off a longer one."""
        return self.trunk_tokens is not None

    @property
    def trunk_steps(self) -> int:
        """Steps of the family's longest run; of a run without a family its own."""
        return self.num_steps if self.trunk_tokens is None else self.trunk_tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return warmup_steps(self.warmup_ratio, self.trunk_steps)

    @property
    def decay_begins(self) -> int:
        """The steps done when the decay of this run begins (wsd)."""
        return decay_begins(self.decay_ratio, self.num_steps)

    @property
    def branching_steps(self) -> frozenset[int]:
        """The steps done when the decays of this trunk's branches begin."""
        return frozenset(decay_begins(self.decay_ratio, n // self.tokens_per_step) for n in self.branch_tokens)

    @property
    def steps_between_validations(self) -> int:
        """`validate_every`, or a tenth of the trunk: the same in all runs of a family."""
        return self.validate_every or max(1, math.ceil(self.trunk_steps / 10))


@dataclass
class EvaluationConfig:
    """What `posbench eval` scores. Lengths in tokens."""

    lengths: Any = field(default_factory=list)  # [] : half the training length to 32 times it, and +1 +10 +50 +100
    protocols: list[str] = field(default_factory=list)  # names of posbench/evaluation/protocols
    targets: int = 64  # fixed and sliding: the targets scored at the end of each window
    windows: int = 64  # fixed and retrieval: windows, spread over all documents
    order_windows: int = 64  # order: windows, spread over all documents
    max_tokens: Any = 1_000_000  # the others: read at most this many tokens per length
    passage: int = 32  # retrieval: tokens of the passage that comes twice
    ngram_tokens: Any = 20_000_000  # n-gram models for runs of at most this many tokens; 0: for none
    batch_tokens: Any = 16_384  # tokens in a forward pass
    piece: Any = 1 << 18  # longer sequences are split into pieces of this many tokens: less memory, the same losses

    def __post_init__(self) -> None:
        self.lengths = _each(length, "evaluation.lengths", self.lengths)
        self.piece = length("evaluation.piece", self.piece)
        for name in ("max_tokens", "ngram_tokens", "batch_tokens"):
            setattr(self, name, count(f"evaluation.{name}", getattr(self, name)))
        for tokens in self.lengths:
            _between("evaluation.lengths", tokens, 2, 1 << 24)
        _between("evaluation.targets", self.targets, 1, 1 << 20)
        _between("evaluation.windows", self.windows, 1, 1 << 24)
        _between("evaluation.order_windows", self.order_windows, 1, 1 << 20)
        _between("evaluation.max_tokens", self.max_tokens, 1, 1 << 40)
        _between("evaluation.passage", self.passage, 2, 1 << 16)
        _between("evaluation.ngram_tokens", self.ngram_tokens, 0, 1 << 30)
        _between("evaluation.batch_tokens", self.batch_tokens, 1, 1 << 30)
        _between("evaluation.piece", self.piece, 1, 1 << 30)


@dataclass
class LaunchConfig:
    """How the processes that torchrun starts share one run (docs/scaling.md)."""

    strategy: str = "ddp"  # ddp (a copy of the model on each) | fsdp (parameters, gradients, moments sharded)

    def __post_init__(self) -> None:
        _one_of("launch.strategy", self.strategy, STRATEGIES)


@dataclass
class TrackingConfig:
    """Where metrics go besides `metrics.jsonl`."""

    backend: str = "none"  # none | wandb
    project: str = "posbench"
    entity: str | None = None
    name: str | None = None  # of the wandb run; null: such as vo_rope/seed=00
    tags: list[str] = field(default_factory=list)  # added to scheme, model and data
    notes: str | None = None
    init_timeout: float = 20.0  # seconds to wait for the wandb server before recording offline

    def __post_init__(self) -> None:
        _one_of("tracking.backend", self.backend, TRACKERS)
        _between("tracking.init_timeout", self.init_timeout, 1, 600)


@dataclass
class ExperimentConfig:
    """A question and the sweep that answers it: what is fixed, what is varied, where it comes from."""

    name: str = MISSING
    description: str = ""
    source: str = ""  # the publication it follows, if any
    baseline: str = "qk_rope"  # the scheme that gaps are measured against
    published: str | None = None  # the published results set beside ours, a name of `posbench report --against`

    def __post_init__(self) -> None:
        check_name("experiment.name", self.name)


@dataclass
class Config:
    """Everything that defines a run. `posbench.compose` makes one from the words of the command line."""

    scheme: Any = MISSING  # SchemeConfig, or its flat mapping
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    tokenizer: TokenizerConfig = MISSING
    train: TrainConfig = MISSING
    evaluation: EvaluationConfig = MISSING
    tracking: TrackingConfig = MISSING
    experiment: ExperimentConfig = MISSING
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    experiment_name: str = MISSING  # the folder under runs_dir; default the experiment's own name
    runs_dir: str = "runs"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, SchemeConfig):
            _require(
                isinstance(self.scheme, dict), f"scheme={self.scheme!r} is not a scheme: give a name from conf/scheme"
            )
            self.scheme = SchemeConfig.from_mapping(self.scheme)
        if self.scheme.lr is None:
            self.scheme.lr = (self.train.lr_of or {}).get(self.scheme.name)
        entries = {"bytes": 257, "bpe": self.tokenizer.vocab_size}.get(self.tokenizer.kind, 0)
        _require(
            self.model.vocab_size is None or self.model.vocab_size >= entries,
            f"the tokenizer has {entries} tokens but model.vocab_size={self.model.vocab_size}: raise it, leave it "
            "null, or train a smaller tokenizer (tokenizer=bpe tokenizer.vocab_size=...)",
        )
        check_name("experiment_name", self.experiment_name)
        _require(bool(str(self.runs_dir).strip()), "runs_dir is empty: name a folder, such as runs")
        self.runs_dir = _path("runs_dir", self.runs_dir)
        _between("seed", self.seed, 0, (1 << 63) - 1)
        _require(isinstance(self.seed, int), f"seed={self.seed} is not a whole number: give one, such as 0")

    @property
    def row_train(self) -> TrainConfig:
        """`train` with the learning rate of this row."""
        return self.train if self.scheme.lr is None else replace(self.train, lr=self.scheme.lr)

    @property
    def trunk_name(self) -> str | None:
        """The experiment's name of this branch's trunk; None for another run, or where the name is not a branch's."""
        trunk = self.experiment_name.rpartition("-")[0]
        tokens = self.train.tokens
        is_named = self.train.is_branch and tokens is not None and branch_name(trunk, tokens) == self.experiment_name
        return trunk if trunk and is_named else None

    def branch_words(self) -> list[list[str]]:
        """For each branch of this run the words that make a branch of the words that made this run."""
        return [
            [
                f"train.tokens={tokens}",
                f"train.trunk_tokens={self.train.tokens}",
                "train.branch_tokens=[]",
                f"experiment_name='{branch_name(self.experiment_name, tokens)}'",
            ]
            for tokens in self.train.branch_tokens
        ]

    def to_mapping(self) -> dict[str, Any]:
        """Plain nested dicts, as written to `config.yaml` of the run folder."""
        mapping = asdict(self)
        mapping["scheme"] = self.scheme.to_mapping()
        return mapping
