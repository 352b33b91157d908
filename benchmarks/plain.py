"""Train a run of nope, vo_rope, qk_rope, qkvo_rope or alibi in plain PyTorch and NumPy, without importing posbench.

    python -m benchmarks.plain runs/demo/qk_rope/seed=0 CORPUS --steps 100
    python -m benchmarks.plain runs/reference/headline/qk_rope/seed=0 CORPUS --steps 100    # from a pack

CORPUS is the folder of token shards that the run was trained on (`posbench prepare` prints it). The model, its initial
weights, the batches, the loss, AdamW and the learning rate are written here from posbench's docstrings only. The losses
are printed next to the ones that the run recorded in metrics.jsonl. It is the first file for a sceptic to read.
"""

import argparse
import hashlib
import io
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F


def drawn(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """Draw initial weights: normal, in float64, from a generator whose seed is a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape, dtype=torch.float64).normal_(0, std, generator=generator).float()


def initial_weights(s: dict, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return name -> initial weights. Matrices that write to the stream are divided by sqrt(2 layers); norms are 1."""
    C, layers, width, std = s["model.d_model"], s["model.num_layers"], s["model.ffn_dim"], s["model.init_std"]
    weights = {"embedding.weight": drawn(s["seed"], "embedding.weight", (vocabulary, C), std)}
    for n in range(layers):
        at = f"blocks.{n}."
        shapes = {"attention.qkv": (3 * C, C), "attention.out": (C, C), "ffn.gate_up": (2 * width, C)}
        shapes |= {"ffn.down": (C, width)}
        for name, shape in shapes.items():
            small = 1 / math.sqrt(2 * layers) if name in ("attention.out", "ffn.down") else 1
            weights[f"{at}{name}.weight"] = drawn(s["seed"], f"{at}{name}.weight", shape, std * small)
        for norm in ("attention_norm", "ffn_norm"):
            weights[f"{at}{norm}.weight"] = torch.ones(C)
    weights["norm.weight"] = torch.ones(C)
    weights["unembedding.weight"] = drawn(s["seed"], "unembedding.weight", (vocabulary, C), std)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def turn(x: torch.Tensor, base: float, back: bool = False) -> torch.Tensor:
    """Apply RoPE to x [B, H, T, D]: rotate the pair (t, t + D/2) at position p by p * base ** (-2 t / D) radians."""
    T, D = x.shape[-2:]
    angles = torch.arange(T).double()[:, None] * base ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = angles.cos().float(), (-angles if back else angles).sin().float()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, s: dict) -> torch.Tensor:
    """Compute the logits [B, T, V] of tokens [B, T] by LLaMA's decoder with the run's scheme."""
    B, T = tokens.shape
    C, H, sites, base = s["model.d_model"], s["model.num_heads"], s.get("scheme.sites", []), s.get("scheme.base")
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    bias = torch.zeros(H, 1, 1)
    if s["scheme.kind"] == "alibi":
        P = 2 ** (H.bit_length() - 1)  # if H is no power of two, the other heads take every second slope of the next
        powers = [8 * h / P for h in range(1, P + 1)] + [4 * (2 * h + 1) / P for h in range(H - P)]
        bias = -torch.tensor([2.0**-power for power in powers])[:, None, None] * (i - j)
    bias = bias + torch.full((T, T), -math.inf).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + s["model.norm_eps"]).sqrt() * w[f"{name}.weight"]

    x = w["embedding.weight"][tokens]
    for n in range(s["model.num_layers"]):
        at = f"blocks.{n}."
        packed = norm(x, f"{at}attention_norm") @ w[f"{at}attention.qkv.weight"].T
        q, k, v = (part.view(B, T, H, C // H).transpose(1, 2) for part in packed.split(C, -1))
        q, k, v = (turn(part, base) if site in sites else part for site, part in zip("qkv", (q, k, v), strict=True))
        o = (q @ k.transpose(-1, -2) / math.sqrt(C // H) + bias).softmax(-1) @ v
        o = turn(o, base, back=True) if "o" in sites else o
        x = x + o.transpose(1, 2).reshape(B, T, C) @ w[f"{at}attention.out.weight"].T
        gate, up = (norm(x, f"{at}ffn_norm") @ w[f"{at}ffn.gate_up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w[f"{at}ffn.down.weight"].T
    return norm(x, "norm") @ w["unembedding.weight"].T


def batch(n: int, tokens: np.ndarray, s: dict) -> torch.Tensor:
    """Return batch n, windows [B, T + 1]: each once per epoch; order and phase are drawn from (seed, epoch)."""
    T, B = s["train.context_length"], s["train.batch_size"]
    windows = (len(tokens) - T) // T
    rows = []
    for number in range(n * B, n * B + B):
        epoch, index = divmod(number, windows)
        draws = np.random.Philox(np.random.SeedSequence([s["seed"], epoch])).random_raw(windows + 1)
        phase = int(draws[-1] % min(T, len(tokens) - windows * T))
        start = phase + int(np.argsort(draws[:-1], kind="stable")[index]) * T
        rows.append(tokens[start : start + T + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def rate(n: int, s: dict) -> float:
    """Return the learning rate of step n, from 0: linear warm-up, then cosine, or constant and linear decay (wsd)."""
    peak, total = s.get("scheme.lr", s["train.lr"]), s["train.num_steps"]
    end, trunk = peak * s["train.lr_end_ratio"], s["train.trunk_tokens"] // (s["train.tokens"] // total)
    warm = math.ceil(s["train.warmup_ratio"] * trunk)  # a branch warms up like its trunk
    if n < warm:
        return peak * (n + 1) / warm
    if s["train.schedule"] == "cosine":
        return end + (peak - end) * (1 + math.cos(math.pi * (n - warm) / max(1, total - 1 - warm))) / 2
    begins = total - math.ceil(s["train.decay_ratio"] * total) if s["train.schedule"] == "wsd" else total
    return peak if n < begins else peak + (end - peak) * (n - begins + 1) / (total - begins)


def train(s: dict, tokens: np.ndarray, vocabulary: int, steps: int) -> list[float]:
    """Train and return the losses of the first steps, nats per token."""
    w = initial_weights(s, vocabulary)
    groups = [([p for p in w.values() if (p.ndim > 1) == is_matrix], is_matrix) for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": s["train.weight_decay"] * decays} for params, decays in groups],
        betas=(s["train.beta1"], s["train.beta2"]),
        eps=s["train.eps"],
    )
    losses = []
    for n in range(steps):
        window = batch(n, tokens, s)
        loss = F.cross_entropy(logits(w, window[:, :-1], s).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), s["train.grad_clip"])
        for group in optimizer.param_groups:
            group["lr"] = rate(n, s)
        optimizer.step()
        losses.append(loss.item())
    return losses


def stored(run: Path) -> tuple[dict, list[dict]]:
    """Return a run's manifest and logged rows, from its folder or from a pack next to its experiment's folder."""
    if (run / "run.json").is_file():
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return json.loads((run / "run.json").read_text()), [json.loads(line) for line in lines]
    experiment, name = run.parents[1], f"{run.parent.name}/{run.name}"
    for file in sorted(experiment.parent.glob(f"{experiment.name}*.zip")):
        with zipfile.ZipFile(file) as pack:
            index = json.loads(pack.read("pack.json"))
            if name in index["runs"]:
                rows = pq.read_table(io.BytesIO(pack.read("metrics.parquet"))).to_pylist()
                return json.loads(index["texts"][index["runs"][name]["run.json"]]), [
                    r for r in rows if r["run"] == name
                ]
    raise SystemExit(
        f"{run}: there is no run.json, and no pack {experiment.name}*.zip next to {experiment} contains {name}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    manifest, recorded = stored(args.run)
    settings, shards = manifest["identity"], np.memmap(args.corpus / "train.tokens", dtype="<u2", mode="r")
    ours = train(settings, shards, manifest["vocab_size"], args.steps or settings["train.num_steps"])
    previous = 0  # the step of the previous row
    for row in (row for row in recorded if row["kind"] == "train" and row["step"] <= len(ours)):
        mean, previous = (
            float(np.mean(ours[previous : row["step"]])),
            row["step"],
        )  # a row averages the steps since then
        print(f"step {row['step']:6d}   here {mean:.7f}   recorded {row['loss']:.7f}   {mean - row['loss']:+.1e}")
