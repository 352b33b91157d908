"""Time a training step of posbench and of other libraries' models in alternating rounds.

    python -m benchmarks.peers --shape A --rounds 5 --output peers.json

A step is forward, backward, clipping at norm 1 and an update with decay by one optimizer for all contenders, AdamW or
(`--optimizer muon`) torch's Muon and ours, on the same random tokens. All contenders run in
one process, with the same threads and the same allocator settings, one after the other in each round; figures are
medians over rounds. Hugging Face's Llama starts from the weights of `qk_rope`, and its first loss must be the same to
rounding; the others have the same widths, layers and vocabulary, and their own initial weights (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import SHAPES, Shape, config_of, ffn
from posbench import build_model
from posbench.catalogue.choices import choices
from posbench.config import Config
from posbench.data import Batch
from posbench.model.architecture import build_architecture
from posbench.model.decoder import Decoder
from posbench.model.size import training_flops_per_token
from posbench.system.device import Device, choose_device, datasheet_rate, keep_freed_memory, matmul_rate
from posbench.system.torch_internals import allow_recompiles
from posbench.training.step import TrainingStep

SCHEMES = ("nope", "qk_rope", "vo_rope", "qkvo_rope", "alibi", "sinusoidal")


class Ours:
    """A contender: posbench's training step, the function that `posbench train` calls."""

    def __init__(
        self,
        shape: Shape,
        scheme: str,
        dtype: str,
        compiled: bool,
        model: Future[Decoder] | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        config = config_of(shape, scheme, dtype, compiled, overrides)
        built = build_model(config, shape.vocab) if model is None else model.result()
        self.training_step = TrainingStep(config, built, choose_device(config.train))

    def step(self, tokens: Tensor) -> Tensor:
        return self.training_step(0, Batch(tokens))[0]


class Theirs:
    """A contender from another library: a module from tokens to logits, under autocast for bfloat16.

    With Muon, Muon trains the matrices in the layers, as in posbench, and AdamW trains the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[Any], Tensor],
        dtype: str,
        compiled: bool,
        fused: bool | None,
        device: Device,
        optimizer: str = "adamw",
    ) -> None:
        self.model, self.logits, self.device = model.to(device.torch), logits, device
        self.autocast = dtype == "bfloat16"
        self.called = torch.compile(self.model) if compiled else self.model
        of_muon = layer_matrices(model) if optimizer == "muon" else []
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in of_muon)]
        matrices, vectors = ([p for p in rest if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=fused)
        ]
        if of_muon:
            self.optimizers.append(
                torch.optim.Muon(of_muon, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, tokens: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        context = torch.autocast(self.device.torch.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            logits = self.logits(self.called(tokens[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a model's layers: those of its linear modules without embeddings and the output table."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # The output table has a row for each token, as has the largest embedding table.
    vocab = max(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return [module.weight for module in linear if id(module.weight) not in tables and module.out_features != vocab]


def huggingface(shape: Shape) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Build the Llama of transformers with the weights of our qk_rope."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner = shape.width, ffn(shape)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=shape.context,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    ours = build_model(config_of(shape, "qk_rope", "float32", False), shape.vocab)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(ours.embedding.weight)
        model.lm_head.weight.copy_(ours.unembedding.weight)
        model.model.norm.weight.copy_(ours.norm.weight)
        for theirs, block in zip(model.model.layers, ours.blocks, strict=True):
            for name, part in zip("qkv", block.attention.qkv.weight.chunk(3), strict=True):  # type: ignore[union-attr,operator]
                getattr(theirs.self_attn, f"{name}_proj").weight.copy_(part)
            theirs.self_attn.o_proj.weight.copy_(block.attention.out.weight)  # type: ignore[union-attr]
            gate, up = block.ffn.gate_up.weight.chunk(2)  # type: ignore[union-attr,operator]
            theirs.mlp.gate_proj.weight.copy_(gate)
            theirs.mlp.up_proj.weight.copy_(up)
            theirs.mlp.down_proj.weight.copy_(block.ffn.down.weight)  # type: ignore[union-attr]
    return model, lambda out: out.logits


def litgpt(shape: Shape) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Build the GPT of litgpt with a Llama configuration."""
    from litgpt import GPT, Config

    config = Config(
        block_size=shape.context,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=ffn(shape),
    )
    return GPT(config), lambda out: out


def x_transformers(**options: Any) -> Callable[[Shape], tuple[nn.Module, Callable[[Any], Tensor]]]:
    """Return a function that builds the decoder of x-transformers with RMSNorm and SwiGLU."""

    def make(shape: Shape) -> tuple[nn.Module, Callable[[Any], Tensor]]:
        from x_transformers import Decoder, TransformerWrapper

        model = TransformerWrapper(
            num_tokens=shape.vocab,
            max_seq_len=shape.context,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=shape.width,
                depth=shape.layers,
                heads=shape.heads,
                attn_dim_head=shape.width // shape.heads,
                use_rmsnorm=True,
                ff_glu=True,
                ff_swish=True,
                ff_no_bias=True,
                ff_mult=ffn(shape) / shape.width,
                **options,
            ),
        )
        return model, lambda out: out

    return make


class PlainBlock(nn.Module):
    """A GPT-2 block: LayerNorm, fused attention, GELU of four widths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).split(C, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Plain(nn.Module):
    """A GPT-2 like nanoGPT's: learned positions, tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


PEERS: dict[str, tuple[str, Callable[[Shape], tuple[nn.Module, Callable[[Any], Tensor]]]]] = {
    "transformers Llama": ("transformers", huggingface),
    "plain GPT-2": ("torch", lambda shape: (Plain(shape), lambda out: out)),
    "litgpt": ("litgpt", litgpt),
    "x-transformers rotary": ("x_transformers", x_transformers(rotary_pos_emb=True, attn_flash=True)),
    "x-transformers ALiBi": ("x_transformers", x_transformers(alibi_pos_bias=True, attn_flash=True)),
    "x-transformers ALiBi, no flash": ("x_transformers", x_transformers(alibi_pos_bias=True, attn_flash=False)),
}
NEVER_COMPILED = ("x-transformers rotary", "x-transformers ALiBi", "x-transformers ALiBi, no flash")
BASE, OURS = "transformers Llama", "posbench qk_rope"  # two contenders with the same weights
WARMUP_STEPS = 2


def contenders(
    shape: Shape,
    dtype: str,
    compiled: list[bool],
    fused: bool | None,
    only: str,
    device: Device,
    builders: Executor,
    overrides: Sequence[str] = (),
    optimizer: str = "adamw",
) -> dict[str, Callable[[], Any]]:
    """Return the functions that build the contenders, by name, posbench's first. Skip peers that are not installed.

    Arguments: only, parts of names, separated by commas; a whole name such as `posbench t5` adds any scheme of
    `conf/scheme`. builders, which draw the weights of all our models in parallel, because a billion of them take half a
    minute of one core. overrides, of our configuration.
    """
    makers: dict[str, Callable[[], Any]] = {}
    chosen: list[tuple[str, Config]] = []
    parts = only.split(",")
    requested = [part.removeprefix("posbench ") for part in parts if part.startswith("posbench ")]
    for scheme in dict.fromkeys((*SCHEMES, *(name for name in requested if name in choices("scheme")))):
        if any(part in f"posbench {scheme}" for part in parts):
            chosen.append((scheme, config_of(shape, scheme, dtype, compiled[-1])))
    # All schemes are built before the first weights are drawn: building one changes torch's default dtype for a moment,
    # and so for every thread.
    architectures = [build_architecture(config) for _, config in chosen]
    for (scheme, config), architecture in zip(chosen, architectures, strict=True):
        model = builders.submit(build_model, config, shape.vocab, architecture)
        makers[f"posbench {scheme}" + _suffix(compiled[-1])] = partial(
            Ours, shape, scheme, dtype, compiled[-1], model, [*overrides, f"train.optimizer={optimizer}"]
        )
    for name, (package, make) in PEERS.items():
        if not any(part in name for part in parts):
            continue
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{name}: not installed ({error}), skipped", file=sys.stderr)
            continue
        for is_compiled in compiled:
            if not (is_compiled and name in NEVER_COMPILED):
                peer = partial(_peer, make, shape, dtype, is_compiled, fused, device, optimizer)
                makers[name + _suffix(is_compiled)] = peer
    return makers


def _suffix(compiled: bool) -> str:
    return ", compiled" if compiled else ""


def _peer(
    make: Any, shape: Shape, dtype: str, compiled: bool, fused: bool | None, device: Device, optimizer: str
) -> Theirs:
    torch.manual_seed(0)
    model, logits = make(shape)
    return Theirs(model, logits, dtype, compiled, fused, device, optimizer)


@dataclass(frozen=True)
class Warm:
    """A contender that is ready to be measured."""

    run: Any
    first_loss: float
    first_seconds: float  # of building and warming up, including compilation
    peak_bytes: int | None  # on the device, without the memory of earlier contenders; None on a CPU


def warmed(make: Callable[[], Any], tokens: Tensor, device: Device) -> Warm:
    """Build a contender and warm it up."""
    held = torch.cuda.memory_allocated(device.torch) if device.is_cuda else 0
    device.reset_peak_memory()
    began = time.perf_counter()
    run = make()
    first = float(run.step(tokens))
    for _ in range(WARMUP_STEPS - 1):
        run.step(tokens)
    device.wait()
    seconds = time.perf_counter() - began
    return Warm(run, first, seconds, device.peak_memory_bytes() - held if device.is_cuda else None)


def compare(
    shape_name: str,
    dtype: str,
    compiled: list[bool],
    rounds: int,
    steps: int,
    only: str,
    keep: bool,
    fused: bool | None = True,
    alone: bool = False,
    overrides: Sequence[str] = (),
    optimizer: str = "adamw",
    report: Callable[[dict[str, list[float]]], object] = lambda rates: None,
) -> dict[str, Any]:
    """Measure tokens per second of every contender, medians over rounds, which alternate between contenders.

    Arguments: alone, whether to hold and measure one contender at a time, because large models do not fit into memory
    together; overrides, of our configuration; optimizer, of all contenders; report, called with the rates so far after
    each round, in case it is the last.
    Returns: the results. `failed` has the reason for each contender that failed; the others are measured all the same.
    """
    torch.set_flush_denormal(True)
    if keep:
        keep_freed_memory()
    allow_recompiles(64)
    shape = SHAPES[shape_name]
    device = choose_device(config_of(shape, "nope", dtype, False).train)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.context + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device.torch)
    builders = ThreadPoolExecutor(4)
    makers = contenders(shape, dtype, compiled, fused, only, device, builders, overrides, optimizer)
    # Threads that have called OpenMP keep workers of their own. With more workers than cores, OpenMP lets all of them
    # sleep between two parallel regions, and a small step takes twice its time.
    builders.shutdown()
    results = Measured()
    for names in [[name] for name in makers] if alone else [list(makers)]:
        measure({name: makers[name] for name in names}, rounds, steps, tokens, device, results, report)
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
    first, rates = results.first_losses, results.rates
    ours = next((loss for name, loss in first.items() if name.startswith("posbench qk_rope,") or name == OURS), None)
    if ours is not None and BASE in first and not abs(ours - first[BASE]) < (2e-5 if dtype == "float32" else 2e-3):
        results.failed[BASE] = f"its first loss is {first[BASE]}, but {OURS} with the same weights has {ours}"
    product_rate = statistics.median(results.machine)
    return {
        "shape": shape_name,
        **asdict(shape),
        "dtype": dtype,
        "freed_memory_kept": keep,
        "alone": alone,
        "optimizer": optimizer,
        "peers_adamw": "fused" if fused else "torch's default",
        "device": device.describe(),
        "rounds": rounds,
        "steps_a_round": steps,
        "matmul_flops_per_second": product_rate,
        "first_losses": first,
        "failed": results.failed,
        "contenders": {
            name: _figures(own_rates, rates.get(BASE), _flops(name, shape), product_rate, device) | results.starts[name]
            for name, own_rates in rates.items()
        },
    }


@dataclass
class Measured:
    """The measurements of all contenders, by name."""

    first_losses: dict[str, float] = field(default_factory=dict)
    starts: dict[str, dict[str, Any]] = field(default_factory=dict)  # seconds and peak memory of warming up
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens per second, one per round
    machine: list[float] = field(default_factory=list)  # rates of matrix products between rounds, FLOP/s
    failed: dict[str, str] = field(default_factory=dict)


def measure(
    makers: dict[str, Callable[[], Any]],
    rounds: int,
    steps: int,
    tokens: Tensor,
    device: Device,
    into: Measured,
    report: Callable[[dict[str, list[float]]], object] = lambda rates: None,
) -> None:
    """Build and warm up contenders, then measure them in turn in each round. A contender that fails is dropped."""
    runs: dict[str, Any] = {}
    for name, make in makers.items():
        with _failures_named(name, into):
            warm = warmed(make, tokens, device)
            runs[name], into.first_losses[name], into.rates[name] = warm.run, warm.first_loss, []
            into.starts[name] = {"first_seconds": warm.first_seconds, "peak_bytes": warm.peak_bytes}
            print(f"{name}: first loss {warm.first_loss:.6f}", file=sys.stderr, flush=True)
    for _ in range(rounds):
        into.machine.append(matmul_rate(device))
        for name, run in runs.items():
            if name not in into.failed:
                with _failures_named(name, into):
                    into.rates[name].append(_rate(run, steps, tokens, device))
        report(into.rates)
    for name in into.failed:
        into.rates.pop(name, None)


@contextlib.contextmanager
def _failures_named(name: str, into: Measured) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        into.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        print(f"{name} failed: {into.failed[name]}", file=sys.stderr, flush=True)


def _rate(run: Any, steps: int, tokens: Tensor, device: Device) -> float:
    """Return the tokens per second of `steps` steps, after one that fetches what the contender before displaced."""
    run.step(tokens)
    device.wait()
    began = time.perf_counter()
    for _ in range(steps):
        run.step(tokens)
    device.wait()
    return steps * tokens.shape[0] * (tokens.shape[1] - 1) / (time.perf_counter() - began)


def _flops(name: str, shape: Shape) -> float | None:
    """Return the model FLOPs of training per token if the contender is ours, otherwise None."""
    if not name.startswith("posbench "):
        return None
    scheme = name.removeprefix("posbench ").partition(",")[0]
    return training_flops_per_token(build_architecture(config_of(shape, scheme, "float32", False)), shape.vocab)


def _figures(
    rates: list[float], base: list[float] | None, flops: float | None, products: float, device: Device
) -> dict[str, Any]:
    """Return the figures of one contender. Arguments: flops, per token; products, rate of matrix products, FLOP/s."""
    rate, datasheet = statistics.median(rates), datasheet_rate(device.describe()["name"])
    return {
        "tokens_per_second": rate,
        "least": min(rates),
        "most": max(rates),
        "to_base": rate / statistics.median(base) if base else None,
        "mfu": rate * flops / products if flops else None,
        "mfu_datasheet": rate * flops / datasheet if flops and datasheet else None,
    }


def show(result: dict[str, Any]) -> None:
    """Print a table in Markdown."""
    rate = result["matmul_flops_per_second"] / 1e9
    print(
        f"\nShape {result['shape']}: {result['layers']} layers of {result['width']}, vocabulary {result['vocab']}, "
        f"context {result['context']}, batch {result['batch']};\n"
        f"{result['dtype']}, {result['device']['threads']} threads, matmul {rate:,.0f} GFLOP/s, "
        f"{result['rounds']} rounds of {result['steps_a_round']} steps; all contenders are trained by "
        f"{result['optimizer']}\n"
    )
    print("| contender | tokens/s | least to most | to Llama | MFU | of datasheet |\n|---|---:|---:|---:|---:|---:|")
    for name, row in result["contenders"].items():
        ratio = f"{row['to_base']:.2f}" if row["to_base"] else "-"
        shares = " | ".join(f"{row[key]:.1%}" if row[key] else "" for key in ("mfu", "mfu_datasheet"))
        rates = f"{row['tokens_per_second']:,.0f} | {row['least']:,.0f} to {row['most']:,.0f}"
        print(f"| {name} | {rates} | {ratio} | {shares} |")
    for name, reason in result["failed"].items():
        print(f"\n{name} failed: {reason}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="A")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument(
        "--only",
        default="",
        help="contenders whose names contain one of these, by commas; `posbench SCHEME` adds a scheme",
    )
    parser.add_argument("--alone", action="store_true", help="hold one contender in memory at a time, for large models")
    parser.add_argument("--free", action="store_true", help="use glibc's own settings, which return freed memory")
    parser.add_argument(
        "--default-adamw", action="store_true", help="use torch's default AdamW for peers, not the fused one"
    )
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of all contenders")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    compiled = [False] if args.eager else [False, True]
    fused = None if args.default_adamw else True
    result = compare(
        args.shape,
        args.dtype,
        compiled,
        args.rounds,
        args.steps,
        args.only,
        not args.free,
        fused,
        args.alone,
        optimizer=args.optimizer,
    )
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
