"""Define the groups of a configuration: one dataclass per group, which checks its own values.

A `Config` that exists is valid. Only the own options of a scheme or a task are checked later, when it is built.
"""

# ruff: noqa: RUF009 (the functions called as defaults return `dataclasses.field`s)
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from posbench.config.rules import (
    LEARNING_RATE,
    MISSING,
    at_least,
    between,
    check_name,
    learning_rates,
    list_of,
    one_of,
    parse_length,
    require,
    ruled,
    schemes_of_a_group,
    scored_length,
    stack_size,
    step_count,
    token_count,
    trained_lengths,
    user_path,
)


@dataclass
class Group:
    """Base class of the groups of a configuration (model, data, train, ...), which checks each field when made."""

    group: ClassVar[str | None] = None  # folder of conf/; None means the class name, such as `model` for ModelConfig

    def __post_init__(self) -> None:
        group = self.group
        if group is None:
            group = type(self).__name__.removesuffix("Config").lower()
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "rule" in entry.metadata and not (value is None and entry.default is None):
                setattr(self, entry.name, entry.metadata["rule"](f"{group}.{entry.name}".lstrip("."), value))


@dataclass
class SchemeConfig(Group):
    """A position scheme: its class, options (checked by that class), kind of attention and learning rate."""

    name: str = ruled(check_name)  # the scheme's name in tables and the run folder, such as `vo_rope`
    kind: str = MISSING  # the registered class, such as `rotary`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the scheme's class
    attention: dict[str, Any] = field(default_factory=dict)  # the kind of attention and its options; {} means softmax
    lr: float | None = ruled(LEARNING_RATE, None)  # its own peak learning rate; None means train.lr_of or train.lr
    lr_factor: float = ruled(between(0.01, 100), 1)  # factor on the learning rate of the scheme's own parameters
    trained_length: int | None = ruled(at_least(1), None)  # L of formulas, tokens; None means train.context_length

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> SchemeConfig:
        """Return a `SchemeConfig` made from a flat mapping, as in `conf/scheme/*.yaml`.

        Raises: ConfigError if the name or the kind is missing.
        """
        for key in ("name", "kind"):
            require(
                key in mapping,
                f"the scheme has no {key!r}: give scheme={{name: ..., kind: ...}} or a name from conf/scheme",
            )
        settings = ("lr", "lr_factor", "trained_length")
        attention = mapping.get("attention") or {}
        require(
            isinstance(attention, dict),
            f"scheme.attention={attention} is not a mapping: write scheme.attention={{kind: {attention}}}",
        )
        options = {key: value for key, value in mapping.items() if key not in ("name", "kind", "attention", *settings)}
        set_values = {key: mapping[key] for key in settings if key in mapping}
        return cls(mapping["name"], mapping["kind"], options, attention, **set_values)

    def to_mapping(self) -> dict[str, Any]:
        """Return a flat dict, as in `conf/scheme/*.yaml`, without default values."""
        mapping: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.lr is not None:
            mapping["lr"] = self.lr
        if self.lr_factor != 1:
            mapping["lr_factor"] = self.lr_factor
        if self.attention:
            mapping["attention"] = self.attention
        if self.trained_length is not None:
            mapping["trained_length"] = self.trained_length
        return {**mapping, **self.options}


@dataclass
class ModelConfig(Group):
    """Sizes of the LLaMA-style decoder: pre-norm RMSNorm, SwiGLU, no biases by default."""

    name: str = MISSING
    num_layers: int = ruled(at_least(1))
    d_model: int = ruled(at_least(2))  # C
    num_heads: int = ruled(at_least(1))  # H
    num_kv_heads: int | None = ruled(at_least(1), None)  # null means num_heads (no grouping)
    head_dim: int | None = ruled(at_least(2), None)  # D; null means d_model / num_heads
    ffn_dim: int | None = ruled(at_least(1), None)  # null means 8/3 d_model, rounded up to a multiple of 16
    tied_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm of q and k before the hooks, in layers of softmax attention
    qkv_bias: bool = False  # biases of q, k and v, as in Qwen 2
    vocab_size: int | None = ruled(at_least(2), None)  # V; null means the size of the tokenizer
    norm_eps: float = ruled(between(1e-12, 1e-2), 1e-5)
    init_std: float = ruled(between(1e-6, 10), 0.02)  # of weights and token embeddings; scales sinusoidal positions

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"model.d_model={self.d_model} does not divide into model.num_heads={self.num_heads} heads: "
            "change one, or set model.head_dim",
        )
        require(
            self.head_width % 2 == 0,
            f"model.head_dim={self.head_width} is odd: rotations turn pairs of channels, so choose an even number",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}: "
            "change one, because every key/value head serves the same number of query heads",
        )

    @property
    def kv_heads(self) -> int:
        """Return Hkv, the number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Return D, the channels of one head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Return SwiGLU's number of hidden channels."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return math.ceil(8 * self.d_model / 3 / 16) * 16


@dataclass
class DataConfig(Group):
    """The source of the text and its splits, which consist of whole documents.

    `TaskConfig` has the same class variables and methods.
    """

    shortest: ClassVar[int] = 2  # shortest length that can be scored, in tokens
    window: ClassVar[int | None] = None  # for tasks, tokens of the longest problem; None for text
    options: ClassVar[dict[str, Any]] = {}  # task options that an evaluation may change; text has none

    name: str = MISSING
    source: str = ruled(one_of("sotu", "stdlib", "files", "hub"))
    path: Any = ruled(user_path, None)  # files: one path or glob, or a list of them, split by a hash of each document
    train_path: Any = ruled(user_path, None)  # files: train text instead of `path`; needs validation_path
    validation_path: Any = ruled(user_path, None)
    test_path: Any = ruled(user_path, None)  # null with train_path means no test text, so `posbench eval` refuses
    text_column: str = "text"
    cut_bytes: int | None = ruled(at_least(1000), None)  # files: cut texts at blank lines to about this size
    articles: bool = False  # rows are lines of WikiText: join them into articles, which begin with ` = Title = `
    repository: str | None = None  # hub: owner/name
    subset: str | None = None  # hub: name of one of the data set's configurations
    revision: str | None = None  # hub: a commit, so that the text stays the same
    train_split: str = "train"  # hub: names of the repository's splits; null means cut from train by hash
    validation_split: str | None = None
    test_split: str | None = None
    token_budget: Any = ruled(token_count, None)  # about how many tokens of train text to use; null means all
    validation_fraction: float = ruled(between(0, 0.5), 0.05)  # share of the documents, if splits are cut by hash
    test_fraction: float = ruled(between(0, 0.5), 0.10)
    document_mask: bool = False  # attention and positions start again at each document of a window
    cache_dir: str | None = ruled(user_path, None)  # null means $POSBENCH_CACHE, else the user's cache folder

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "files":
            require(
                (self.path is not None) != (self.train_path is not None),
                "data=files needs either data.path='...', which posbench splits by document, or data.train_path='...' "
                "with data.validation_path='...'",
            )
            require(
                self.train_path is None or self.validation_path is not None,
                "data.train_path is given without data.validation_path: name the held-out files too, or give "
                "only data.path, to have them split by document",
            )
        else:
            require(
                [self.path, self.train_path, self.validation_path, self.test_path] == 4 * [None],
                f"data.path and data.train_path are for your own files, but the source is {self.source!r}: give "
                "data=files too (in the YAML of an experiment: '- override /data: files' under 'defaults:')",
            )
        require(
            self.source != "hub" or bool(self.repository),
            "data=hub needs data.repository=owner/name, such as HuggingFaceFW/fineweb-edu",
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings besides the text that decide a run's results."""
        # The text has a fingerprint of its own.
        return {"document_mask": True} if self.document_mask else {}

    def trained_length(self, context_length: int) -> int:
        """Return the longest length that a run trains on, in tokens."""
        return context_length

    def to_mapping(self) -> dict[str, Any]:
        """Return all fields as a dict, as in `conf/data/*.yaml`."""
        return asdict(self)


@dataclass
class TaskConfig(Group):
    """A task: problems with exact answers instead of text (`posbench.data.tasks`). Lengths are in items."""

    group: ClassVar[str | None] = "data"
    shortest: ClassVar[int] = 1
    document_mask: ClassVar[bool] = False

    name: str = ruled(check_name)
    task: str = MISSING  # name of the class in snake case, or my_task.py:Sums
    source: str = ruled(one_of("task"), "task")
    lengths: Any = ruled(
        trained_lengths, [2, 16]
    )  # shortest and longest trained problem; all lengths are drawn equally often
    longest: int | None = ruled(
        at_least(1), None
    )  # longest problem that may be tested; null means four times the longest trained
    positions: str = ruled(one_of("window", "shifted", "subset"), "window")  # see `posbench.data.tasks.problems`
    window: int | None = ruled(at_least(1), None)  # tokens of the longest problem; computed, not set
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the task's class

    def __post_init__(self) -> None:
        super().__post_init__()
        self.longest = self.longest or 4 * self.lengths[1]
        require(
            self.longest >= self.lengths[1],
            f"data.longest={self.longest} is shorter than the longest that is trained, {self.lengths[1]} items "
            f"(data.lengths={self.lengths}): raise it, or leave it out",
        )

    def trained_length(self, context_length: int) -> int:
        """Return the longest length that a run trains on, in items."""
        return int(self.lengths[1])

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> TaskConfig:
        """Return a `TaskConfig` made from a flat mapping, as in `conf/data/*.yaml`."""
        names = {member.name for member in fields(cls)} - {"options"}
        ours = {key: value for key, value in mapping.items() if key in names}
        options = {key: value for key, value in mapping.items() if key not in names}
        return cls(**ours, options=options)

    def to_mapping(self) -> dict[str, Any]:
        """Return a flat dict, as in `conf/data/*.yaml`."""
        mapping = asdict(self)
        return mapping | mapping.pop("options")

    identity = property(to_mapping)  # every field decides what a run computes


@dataclass
class TokenizerConfig(Group):
    """The tokenizer: trained on the train split, plain bytes, a file, or a repository of the Hugging Face hub."""

    kind: str = ruled(one_of("bpe", "bytes", "file", "hub"))  # bpe: byte-level, trained on the train split
    vocab_size: int = ruled(at_least(258), 4096)  # bpe: entries, including the 256 bytes and the BOS token
    path: str | None = ruled(user_path, None)  # file: a tokenizer.json
    name: str | None = None  # hub: a repository with a tokenizer.json, such as gpt2 or owner/name
    revision: str | None = None  # hub: a commit, so that the tokenizer stays the same
    training_bytes: int = ruled(
        at_least(1000), 20_000_000
    )  # bpe: train the tokenizer on about this many bytes of the train split

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kind != "file" or bool(self.path), "tokenizer=file needs tokenizer.path=.../tokenizer.json")
        require(self.kind != "hub" or bool(self.name), "tokenizer=hub needs tokenizer.name=..., such as gpt2")

    @property
    def num_entries(self) -> int:
        """Return the number of vocabulary entries, or 0 for a tokenizer that is not read yet."""
        return {"bytes": 257, "bpe": self.vocab_size}.get(self.kind, 0)


@dataclass
class TrainConfig(Group):
    """Settings of the pre-training loop.

    A long run (the trunk) can have branches: runs of fewer tokens that start from its checkpoints. Warm-up is a
    fraction of the trunk's steps, and decay a fraction of a run's own steps, so both are the same run until the
    branch's decay begins.
    """

    steps: Any = ruled(step_count, None)  # optimizer steps; null means `tokens` divided by the tokens of a step
    tokens: Any = ruled(token_count, None)  # token budget; ignored if `steps` is set
    context_length: Any = ruled(parse_length)  # T, tokens
    batch_size: int = ruled(at_least(1))  # B, sequences per step, all micro-batches together
    accumulation: int = ruled(at_least(1), 1)  # micro-batches per step
    lr: float = ruled(LEARNING_RATE)  # peak learning rate
    lr_of: Any = ruled(
        learning_rates, None
    )  # {scheme: rate}, replaces lr for these schemes (`posbench tune` finds them)
    lr_end_ratio: float = ruled(between(0, 1), 0.1)  # final learning rate as a fraction of the peak
    warmup_ratio: float = ruled(between(0, 1), 0.05)  # fraction of the trunk's steps in which the rate rises
    schedule: str = ruled(one_of("cosine", "wsd", "constant"), "cosine")  # wsd: warm-up, stable, decay
    decay_ratio: float = ruled(between(0, 1), 0.2)  # wsd: fraction of the steps in which the rate decays
    branch_tokens: Any = ruled(
        list_of(token_count), []
    )  # wsd: lengths of shorter runs that branch off this one, ascending
    trunk_tokens: Any = ruled(token_count, None)  # wsd: tokens of the run that this one branches off; null means none
    # wsd: {scheme: {arm: [overrides]}}, runs that go on, changed, from where the decay of this one begins; overrides
    # in `every` hold for all of them; null means none
    arms: Any = None
    optimizer: str = "adamw"  # or muon, or a class in a file, my_optimizer.py:Lion
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # of an optimizer of one's own, by name
    matrix_lr_factor: float = ruled(between(0.01, 100), 1)  # factor on the rate of attention's and SwiGLU's matrices
    momentum: float = ruled(between(0, 0.9999999), 0.95)  # muon: share of the last momentum in the next
    ns_steps: int = ruled(between(0, 20), 5)  # muon: steps of orthogonalisation; 0 means none, a control
    weight_decay: float = ruled(between(0, 10), 0.1)  # matrices only
    beta1: float = ruled(between(0, 0.9999999), 0.9)
    beta2: float = ruled(between(0, 0.9999999), 0.95)
    eps: float = ruled(between(1e-30, 1), 1e-8)
    grad_clip: float = ruled(at_least(0), 1.0)  # limit of the global norm; 0 switches clipping off
    from_run: str | None = None  # weights to start from: a finished run, a checkpoint or a Hugging Face folder
    # With from_run, a checkpoint: go on at its step of the schedule, with its moments; false: start both from 0.
    keep_schedule: bool = False
    # Draw windows of this many tokens, and cut each into windows of context_length: the same text in the same order as
    # with that context length. null means windows of context_length.
    drawn_length: Any = ruled(parse_length, None)
    device: str = "auto"  # auto (cuda if there is a GPU) | cpu | cuda | cuda:1 ...
    dtype: str = ruled(one_of("auto", "float32", "bfloat16"), "auto")  # auto means bfloat16 if the device is fast in it
    compile: bool | None = None  # null means only if it saves time
    validate_every: Any = ruled(step_count, None)  # steps between validations; null means ten per run
    order_every: Any = ruled(
        token_count, None
    )  # tokens between scores of long-range order during training; null means none
    validation_tokens: Any = ruled(token_count, 65_536)  # tokens that a validation scores
    checkpoint_every: Any = ruled(step_count, None)  # steps between checkpoints; null means ten per run
    keep_checkpoints: int = ruled(at_least(2), 2)
    log_every: Any = ruled(step_count, 10)  # steps between lines of metrics.jsonl
    max_skipped_steps: int = ruled(at_least(0), 10)  # steps skipped for NaN or infinity before the run stops

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps is not None or self.tokens is not None,
            "give train.steps=... or train.tokens=...: neither is set",
        )
        require(
            self.batch_size % self.accumulation == 0,
            f"train.batch_size={self.batch_size} does not divide into train.accumulation={self.accumulation} "
            "equal micro-batches: change one",
        )
        require(
            self.num_steps > 0,
            f"train.tokens={self.tokens} is not enough for one step, which reads {self.tokens_per_step} tokens "
            f"(train.batch_size={self.batch_size} x train.context_length={self.context_length}): raise train.tokens, "
            "or lower one of these",
        )
        require(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device))),
            f"train.device={self.device!r} is not known: give auto, cpu, cuda or cuda:<number>",
        )
        require(
            self.order_every is None or self.context_length >= 128,
            f"train.order_every={self.order_every} scores order more than 32 tokens back, and train.context_length="
            f"{self.context_length} is too short for it: give 128 or more, or leave it out",
        )
        require(
            not self.keep_schedule or (self.from_run is not None and not self.is_branch),
            "train.keep_schedule=true goes on from a checkpoint: name it (train.from_run=RUN/checkpoints/step=N), and "
            "leave out train.trunk_tokens",
        )
        drawn = self.drawn_length or self.context_length
        require(
            drawn % self.context_length == 0 and self.batch_size % (drawn // self.context_length) == 0,
            f"train.drawn_length={drawn} must be a multiple of train.context_length={self.context_length}, and "
            f"train.batch_size={self.batch_size} a multiple of the windows that one is cut into",
        )
        require(
            not self.arms or self.schedule == "wsd",
            f"train.schedule={self.schedule} has no step from which arms could go on: set train.schedule=wsd, or leave "
            "out train.arms",
        )
        self._check_family()

    def _check_family(self) -> None:
        # A run and its branches must be equal until a branch decays.
        family = {f"train.branch_tokens[{n}]": tokens for n, tokens in enumerate(self.branch_tokens)}
        if self.trunk_tokens is not None:
            family["train.trunk_tokens"] = self.trunk_tokens
        if not family:
            return
        for key, tokens in family.items():
            self._check_whole(key, tokens)
        require(
            self.schedule == "wsd",
            f"train.schedule={self.schedule} has no branches: set train.schedule=wsd, or leave out "
            "train.branch_tokens and train.trunk_tokens",
        )
        require(
            self.steps is None and self.tokens is not None,
            "train.branch_tokens and train.trunk_tokens are counted in tokens: set train.steps=null and train.tokens",
        )
        self._check_whole("train.tokens", self.tokens)
        require(
            sorted({*self.branch_tokens}) == self.branch_tokens and max(self.branch_tokens, default=0) < self.tokens,
            f"train.branch_tokens={self.branch_tokens} must be in ascending order, below the trunk's "
            f"train.tokens={self.tokens}",
        )
        shortest = min([*self.branch_tokens, self.tokens])
        require(
            self._decay_begins(shortest // self.tokens_per_step) >= self.warmup_steps,
            f"the decay of a run of {shortest} tokens would begin before the {self.warmup_steps} steps of warm-up end "
            f"(train.warmup_ratio={self.warmup_ratio} of the trunk's {self.trunk_steps} steps): lower "
            "train.warmup_ratio or train.decay_ratio, or make the shortest branch longer",
        )

    def _check_whole(self, key: str, tokens: int) -> None:
        whole = max(1, round(tokens / self.tokens_per_step)) * self.tokens_per_step
        require(
            tokens == whole,
            f"{key}={tokens} is not a whole number of steps of {self.tokens_per_step} tokens, which runs with "
            f"branches need: the nearest is {whole}",
        )

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer step."""
        return self.batch_size * self.context_length

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the run."""
        if self.steps is not None:
            return self.steps
        return int(self.tokens // self.tokens_per_step)

    @property
    def is_branch(self) -> bool:
        """Return whether the run is a branch: a shorter version of a longer run."""
        return self.trunk_tokens is not None

    @property
    def trunk_steps(self) -> int:
        """Return the number of steps of the longer run of which this one is a shorter version, or else of this run."""
        if self.trunk_tokens is None:
            return self.num_steps
        return self.trunk_tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """Return the number of steps over which the learning rate rises."""
        return math.ceil(self.warmup_ratio * self.trunk_steps)

    @property
    def decay_begins(self) -> int:
        """Return the number of steps before this run's learning rate begins to decay (schedule `wsd`)."""
        return self._decay_begins(self.num_steps)

    def _decay_begins(self, num_steps: int) -> int:
        return num_steps - math.ceil(self.decay_ratio * num_steps)

    @property
    def branching_steps(self) -> frozenset[int]:
        """Return the steps from whose checkpoints branches and arms start."""
        steps = {self._decay_begins(n // self.tokens_per_step) for n in self.branch_tokens}
        if self.arms:
            steps.add(self.decay_begins)
        return frozenset(steps)

    def is_ordered(self, step: int) -> bool:
        """Return whether the order of tokens more than 32 back is scored after `step`."""
        if not self.order_every:
            return False
        previous_count, count = ((n * self.tokens_per_step) // self.order_every for n in (step - 1, step))
        return count > previous_count or step == self.num_steps

    @property
    def steps_between_validations(self) -> int:
        """Return `validate_every`, or by default a tenth of the run's steps."""
        # A branch counts its trunk's steps, so both validate at the same steps.
        return self.validate_every or max(1, math.ceil(self.trunk_steps / 10))


@dataclass
class EvaluationConfig(Group):
    """Settings of `posbench eval`. Lengths are in tokens of text or items of a task."""

    # [] means half to 32 times the training length T, T+1, T+10, T+50, T+100; for tasks T times 1, 1.25, 2 and 4
    lengths: Any = ruled(list_of(scored_length), [])
    protocols: list[str] = field(default_factory=list)  # names of posbench/evaluation/protocols
    targets: int = ruled(at_least(1), 64)  # fixed: targets scored at the end of each window
    windows: int = ruled(at_least(1), 64)  # fixed: number of windows, spread over all documents
    order_windows: int = ruled(at_least(1), 64)  # order: number of windows, spread over all documents
    max_tokens: Any = ruled(token_count, 1_000_000)  # other protocols: read at most this many tokens per length
    problems: int = ruled(at_least(1), 512)  # accuracy: problems for each length
    bos: bool = False  # protocols of windows: put BOS in the place of each window's first token
    batch_tokens: Any = ruled(token_count, 16_384)  # tokens of one forward pass
    piece: Any = ruled(parse_length, 1 << 18)  # split longer sequences into pieces of this many tokens, to save memory


@dataclass
class LaunchConfig(Group):
    """The way in which runs share one step (docs/scaling.md)."""

    # How many runs of a sweep train as one: a number, off, or auto, which is off on a CPU and what fits on a GPU.
    stack: Any = ruled(stack_size, "auto")


@dataclass
class TrackingConfig(Group):
    """The tracking service, such as wandb, that metrics go to besides `metrics.jsonl`."""

    backend: str = ruled(one_of("none", "wandb"), "none")
    project: str = "posbench"
    entity: str | None = None
    name: str | None = None  # name of the wandb run; null means SCHEME/seed=NN
    tags: list[str] = field(default_factory=list)  # tags besides scheme, model and data
    notes: str | None = None
    init_timeout: float = ruled(at_least(1), 20.0)  # seconds to wait for the wandb server before recording offline


PLANNED_SEEDS = 5  # seeds at each learning rate that a search keeps


@dataclass
class ExperimentConfig(Group):
    """An experiment, a question that a sweep answers: its name, source, baseline and published results."""

    name: str = ruled(check_name)
    description: str = ""
    source: str = ""  # the publication it follows, if any
    baseline: str = "qk_rope"  # the scheme that gaps are measured against
    published: str | None = None  # published results for comparison, a name of `posbench report --against`
    primary: Any = ruled(list_of(schemes_of_a_group), [])  # groups of schemes whose pairs were planned before training
    # {factor: its two levels, lists of overrides}: run k of a scheme has the k-th combination (`composition.setups`)
    setups: dict[str, Any] = field(default_factory=dict)
    planned_seeds: int = ruled(
        at_least(3), PLANNED_SEEDS
    )  # seeds at a kept rate, fixed before the first result is read


def chosen_experiment(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the `experiment` group of a run's configuration if the runs' folder is named after it, otherwise {}.

    Arguments: name, the folder of the runs.
    """
    experiment = config.get("experiment", {})
    chosen = str(experiment.get("name"))
    # A run that named no experiment has the settings of the default one, the demo, in this group. A name may continue
    # the experiment's with `-` or `_`.
    if name == chosen or name.startswith((f"{chosen}-", f"{chosen}_")):
        return experiment
    return {}
