"""One training step of posbench beside other people's, in one alternating run.

    python -m benchmarks.peers --shape A --rounds 5 --output peers.json

A step is forward, backward, clipping at norm 1 and AdamW with decay, on the same random tokens. All contenders run in
one process, with the same threads and the same allocator settings, one after the other in each round; figures are
medians over rounds. Hugging Face's Llama starts from the weights of `qk_rope`, and its first loss must be the same to
rounding; the others have the same widths, layers and vocabulary, and their own initial weights (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench import build_model, compose
from posbench.machine.device import Device, choose_device
from posbench.machine.memory import keep_freed_memory
from posbench.machine.speed import matmul_rate
from posbench.size import training_flops_per_token
from posbench.training.step import TrainingStep

VOCAB = 4096
SHAPES = {
    "A": {"layers": 6, "width": 256, "heads": 4, "context": 256, "batch": 16},
    "B": {"layers": 8, "width": 512, "heads": 8, "context": 512, "batch": 8},
}
SCHEMES = ("nope", "qk_rope", "vo_rope", "qkvo_rope", "alibi", "sinusoidal")
Shape = dict[str, int]


def config_of(shape: Shape, scheme: str, dtype: str, compiled: bool) -> Any:
    """posbench's configuration of a shape."""
    words = [f"scheme={scheme}", f"model.num_layers={shape['layers']}", f"model.d_model={shape['width']}"]
    words += [f"model.num_heads={shape['heads']}", f"train.context_length={shape['context']}"]
    words += [f"train.batch_size={shape['batch']}", f"train.dtype={dtype}", f"train.compile={compiled}"]
    return compose(words)


def ffn(shape: Shape) -> int:
    """The feed-forward width of all LLaMA-like contenders."""
    width = config_of(shape, "nope", "float32", False).model.ffn_dim
    assert width is not None
    return int(width)


class Ours:
    """posbench's own step: the function that `posbench train` calls."""

    def __init__(self, shape: Shape, scheme: str, dtype: str, compiled: bool) -> None:
        config = config_of(shape, scheme, dtype, compiled)
        self.training_step = TrainingStep(config, build_model(config, VOCAB), choose_device(config.train))

    def step(self, tokens: Tensor) -> Tensor:
        return self.training_step(0, tokens)[0]


class Theirs:
    """A peer: a module from tokens to logits, under autocast for bfloat16, with PyTorch's own AdamW."""

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[Any], Tensor],
        dtype: str,
        compiled: bool,
        fused: bool | None,
        device: Device,
    ) -> None:
        self.model, self.logits, self.device = model.to(device.torch), logits, device
        self.autocast = dtype == "bfloat16"
        self.called = torch.compile(self.model) if compiled else self.model
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=fused)

    def step(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        context = torch.autocast(self.device.torch.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            logits = self.logits(self.called(tokens[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def huggingface(shape: Shape) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """transformers' Llama with the weights of our qk_rope."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner = shape["width"], ffn(shape)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            max_position_embeddings=shape["context"],
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    ours = build_model(config_of(shape, "qk_rope", "float32", False), VOCAB)
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
    """litgpt's GPT with a Llama configuration."""
    from litgpt import GPT, Config

    config = Config(
        block_size=shape["context"],
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_embd=shape["width"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=ffn(shape),
    )
    return GPT(config), lambda out: out


def x_transformers(**options: Any) -> Callable[[Shape], tuple[nn.Module, Callable[[Any], Tensor]]]:
    """x-transformers' decoder with RMSNorm and SwiGLU."""

    def make(shape: Shape) -> tuple[nn.Module, Callable[[Any], Tensor]]:
        from x_transformers import Decoder, TransformerWrapper

        model = TransformerWrapper(
            num_tokens=VOCAB,
            max_seq_len=shape["context"],
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=shape["width"],
                depth=shape["layers"],
                heads=shape["heads"],
                attn_dim_head=shape["width"] // shape["heads"],
                use_rmsnorm=True,
                ff_glu=True,
                ff_swish=True,
                ff_no_bias=True,
                ff_mult=ffn(shape) / shape["width"],
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
    """A GPT-2 of the manner of nanoGPT: learned positions, tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, shape["width"])
        self.positions = nn.Embedding(shape["context"], shape["width"])
        self.blocks = nn.ModuleList(PlainBlock(shape["width"], shape["heads"]) for _ in range(shape["layers"]))
        self.norm = nn.LayerNorm(shape["width"], bias=False)
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
BASE = "transformers Llama"


def contenders(
    shape: Shape, dtype: str, compiled: list[bool], fused: bool | None, only: str, device: Device
) -> dict[str, Any]:
    """Name -> contender, posbench's schemes first; peers that are not installed are named and left out."""
    by_name: dict[str, Any] = {}
    for scheme in SCHEMES:
        if only in f"posbench {scheme}":
            for how in compiled[-1:]:
                by_name[f"posbench {scheme}" + (", compiled" if how else "")] = Ours(shape, scheme, dtype, how)
    for name, (package, make) in PEERS.items():
        if only not in name:
            continue
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{name}: not installed ({error}), left out", file=sys.stderr)
            continue
        for how in compiled:
            if not (how and name in NEVER_COMPILED):
                torch.manual_seed(0)
                model, logits = make(shape)
                by_name[name + (", compiled" if how else "")] = Theirs(model, logits, dtype, how, fused, device)
    return by_name


def first_losses(runs: dict[str, Any], tokens: Tensor, dtype: str) -> dict[str, float]:
    """Every contender's loss of its first step, of two to warm up. Raises: AssertionError where Llama's is not ours."""
    first: dict[str, float] = {}
    for name, run in runs.items():
        first[name] = float(run.step(tokens))
        run.step(tokens)
        print(f"{name}: first loss {first[name]:.6f}", file=sys.stderr, flush=True)
    ours = next((loss for name, loss in first.items() if name.startswith("posbench qk_rope")), None)
    if ours is not None and BASE in first:
        assert abs(ours - first[BASE]) < (2e-5 if dtype == "float32" else 2e-3), (ours, first[BASE])
    return first


def compare(
    shape_name: str,
    dtype: str,
    compiled: list[bool],
    rounds: int,
    steps: int,
    only: str,
    keep: bool,
    fused: bool | None = True,
) -> dict[str, Any]:
    """Tokens per second of every contender, medians of alternating rounds.

    Raises: AssertionError where Llama's first loss is not ours.
    """
    if keep:
        keep_freed_memory()
    torch._dynamo.config.recompile_limit = 64
    shape = SHAPES[shape_name]
    device = choose_device(config_of(shape, "nope", dtype, False).train)
    tokens = torch.randint(VOCAB, (shape["batch"], shape["context"] + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device.torch)
    runs = contenders(shape, dtype, compiled, fused, only, device)
    first = first_losses(runs, tokens, dtype)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    machine = []
    for _ in range(rounds):
        machine.append(matmul_rate(device))
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(steps):
                run.step(tokens)
            device.wait()
            rates[name].append(steps * shape["batch"] * shape["context"] / (time.perf_counter() - began))
    rate = statistics.median(machine)
    config = config_of(shape, "nope", dtype, False)
    flops = training_flops_per_token(config, VOCAB)
    return {
        "shape": shape_name,
        **shape,
        "dtype": dtype,
        "freed_memory_kept": keep,
        "peers_adamw": "fused" if fused else "torch's default",
        "device": device.describe(),
        "rounds": rounds,
        "steps_a_round": steps,
        "matmul_flops_per_second": rate,
        "first_losses": first,
        "contenders": {
            name: {
                "tokens_per_second": statistics.median(of),
                "least": min(of),
                "most": max(of),
                "to_base": statistics.median(of) / statistics.median(rates[BASE]) if BASE in rates else None,
                "mfu": statistics.median(of) * flops / rate if name.startswith("posbench") else None,
            }
            for name, of in rates.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print a table of at most 80 columns, in Markdown."""
    rate = result["matmul_flops_per_second"] / 1e9
    print(
        f"\nShape {result['shape']}: {result['layers']} layers of {result['width']}, vocabulary {VOCAB}, context "
        f"{result['context']}, batch {result['batch']};\n{result['dtype']}, {result['device']['threads']} threads, "
        f"matrix products {rate:,.0f} GFLOP/s, {result['rounds']} rounds of {result['steps_a_round']} steps\n"
    )
    print("| contender | tokens/s | least to most | to Llama | MFU |\n|---|---:|---:|---:|---:|")
    for name, of in result["contenders"].items():
        ratio = f"{of['to_base']:.2f}" if of["to_base"] else "-"
        mfu = f"{of['mfu']:.1%}" if of["mfu"] else ""
        print(
            f"| {name} | {of['tokens_per_second']:,.0f} | {of['least']:,.0f} to {of['most']:,.0f} | {ratio} | {mfu} |"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="A")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--only", default="", help="contenders whose name holds this")
    parser.add_argument("--free", action="store_true", help="glibc's own settings: freed memory goes back")
    parser.add_argument("--default-adamw", action="store_true", help="the peers' AdamW as torch chooses it, not fused")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    compiled = [False] if given.eager else [False, True]
    fused = None if given.default_adamw else True
    result = compare(given.shape, given.dtype, compiled, given.rounds, given.steps, given.only, not given.free, fused)
    show(result)
    if given.output:
        given.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
