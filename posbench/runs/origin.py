"""What a run begins with in place of initial weights (`train.from_run`): another run's, or a Hugging Face folder's.

Weights of the decoder are taken over. Those of the scheme, and of its kind of attention, are too where both have them
by the same name and shape; others start from the seed. AdamW's moments start at zero, and the schedule anew. Batches go
on behind those that the other run has read, so that a run which continues another for its last tenth reads what one
that was trained through has read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import Config, ConfigError
from posbench.machine.files import sum_of

if TYPE_CHECKING:
    from torch import Tensor

    from posbench.model import Decoder

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "posbench")  # of Hugging Face, by model_type
_PARTS = {  # of one layer: Hugging Face's names, which are packed in this order, and ours
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
_NAMES = {
    "self_attn.qkv_proj": "attention.qkv",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_up_proj": "ffn.gate_up",
    "mlp.down_proj": "ffn.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Origin:
    """A model that a run begins with."""

    name: str  # experiment/scheme/seed=n, with the step where it is not the last; or the folder's name
    scheme: str  # the name of its row; of a Hugging Face folder, its own name
    model: dict[str, Any]  # its sizes, the fields of ModelConfig
    load: Callable[[], dict[str, Tensor]]  # its weights by our names
    digest: str  # of the weights' files
    tokens: int = 0  # it was trained on before; 0: not known
    training_flops: float | None = None
    batches: str = ""  # the chain over those it read (`posbench.data.batches.chained`)
    identity: dict[str, Any] | None = None  # of the run's manifest
    initial_weights: dict[str, str] | None = None  # digests of what that run began with
    tokenizer: str | None = None  # fingerprint of the run's tokenizer
    tokenizer_file: Path | None = None  # a Hugging Face folder's

    def check_tokenizer(self, config: Config, fingerprint: str) -> None:
        """Raises: ConfigError where the run's tokenizer is not the one of the text that is to be read."""
        if self.tokenizer not in (None, fingerprint):
            raise ConfigError(
                f"the text is read with another tokenizer than that of train.from_run={config.train.from_run}: give "
                "the same data and tokenizer, or tokenizer=file and tokenizer.path=... with the tokenizer.json of its "
                "folder"
            )


def origin_of(from_run: str | None, seed: int, runs_dir: str | Path) -> Origin | None:
    """What `train.from_run` names; None where it names nothing.

    Arguments: from_run, a finished run as every command names one, a checkpoint's folder in it
    (`.../checkpoints/step=00000200`), the folder of a row, of whose runs that of the same seed is taken (where there is
    but one, that), or a folder with `config.json` and safetensors files in Hugging Face's form.
    Raises: ConfigError where there is no such model, and for a model of another architecture.
    """
    if from_run is None:
        return None
    place = Path(from_run).expanduser()
    if (place / "config.json").is_file():
        return _of_hugging_face(place)
    return _of_run(place, seed, Path(runs_dir))


def _of_run(place: Path, seed: int, runs_dir: Path) -> Origin:
    from posbench.runs.checkpoint import read_state
    from posbench.runs.finding import run_named, runs_named
    from posbench.runs.manifest import FINISHED

    at_step = re.fullmatch(r"step=(\d+)", place.name)
    if at_step:
        run = run_named(str(place.parents[1]), runs_dir)
    else:
        of_row = runs_named([str(place)], runs_dir)
        of_seed = [each for each in of_row if len(of_row) == 1 or each.path.name == f"seed={seed}"]
        if len(of_seed) != 1:
            there = ", ".join(each.name for each in (of_seed or of_row)[:5])
            raise ConfigError(
                f"train.from_run={place}: it has {len(of_seed)} runs of seed {seed}, and one is needed: name a run "
                f"(there are {there}{' and others' if len(of_seed or of_row) > 5 else ''})"
            )
        [run] = of_seed
    manifest = run.manifest
    step = int(at_step[1]) if at_step else manifest.num_steps
    if not at_step and manifest.status != FINISHED:
        raise ConfigError(
            f"train.from_run={place}: {run.name} is {manifest.status}: finish it first (run its train command again)"
        )
    folder = run.path / "checkpoints" / f"step={step:08d}"
    if not (folder / "model.safetensors").is_file() if at_step else run.weights_digest is None:
        kept = ", ".join(sorted(path.name for path in folder.parent.glob("step=*"))) or "no weights"
        raise ConfigError(f"train.from_run={place}: there are no such weights ({run.name} has {kept})")
    before = manifest.continued["tokens"] if manifest.continued else 0
    tokens = before + round(step / manifest.num_steps * (manifest.tokens - before))
    return Origin(
        name=run.name + (f" at step {step}" if at_step else ""),
        scheme=manifest.scheme,
        model=asdict(run.config.model),
        load=lambda: run.load_weights(step if at_step else None),
        digest=sum_of(folder / "model.safetensors") if at_step else str(run.weights_digest),
        tokens=tokens,
        training_flops=manifest.training_flops and manifest.training_flops * tokens / manifest.tokens,
        batches=read_state(folder)["batches"] if at_step else manifest.fingerprints.batches or "",
        identity=manifest.identity,
        initial_weights=manifest.fingerprints.initial_weights,
        tokenizer=manifest.fingerprints.tokenizer,
    )


def _of_hugging_face(folder: Path) -> Origin:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    family, activation = content.get("model_type"), content.get("hidden_act", "silu")
    if family not in FAMILIES or activation != "silu" or not files:
        found = f"model_type={family}, hidden_act={activation}, {len(files)} safetensors files"
        raise ConfigError(
            f"train.from_run={folder} holds no decoder that posbench can be ({found}): it reads {', '.join(FAMILIES)} "
            "with SiLU, from safetensors"
        )
    name = re.sub(r"[^\w.+-]", "_", folder.resolve().name).lstrip("_.+-")
    sizes = content.get("sizes") or _sizes(content, name)
    sums = "".join(sum_of(file) for file in files)
    tokenizer = folder / "tokenizer.json"
    return Origin(
        name=name,
        scheme=name,
        model=sizes | {"vocab_size": content["vocab_size"]},
        load=lambda: _weights(files, sizes["tied_embeddings"]),
        digest=hashlib.sha256(sums.encode()).hexdigest(),
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
    )


def _sizes(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of ModelConfig in Hugging Face's `config.json`."""
    return {
        "name": name,
        "num_layers": content["num_hidden_layers"],
        "d_model": content["hidden_size"],
        "num_heads": content["num_attention_heads"],
        "num_kv_heads": content.get("num_key_value_heads"),
        "head_dim": content.get("head_dim"),
        "ffn_dim": content["intermediate_size"],
        "tied_embeddings": content.get("tie_word_embeddings", content["model_type"] == "smollm3"),  # their defaults
        "qk_norm": content["model_type"] == "qwen3",
        "qkv_bias": content["model_type"] == "qwen2" or content.get("attention_bias", False),
        "norm_eps": content["rms_norm_eps"],
        "init_std": content.get("initializer_range", 0.02),
    }


def _weights(files: Iterable[Path], is_tied: bool) -> dict[str, Tensor]:
    """Weights of Hugging Face's files by our names, float32. A name that is not known stays, and is refused later."""
    import torch
    from safetensors.torch import load_file

    theirs: dict[str, Tensor] = {}
    for file in files:
        theirs |= load_file(file)
    theirs = {name.removeprefix("model."): tensor.float() for name, tensor in theirs.items() if "inv_freq" not in name}
    if any(name.startswith("decoder.") for name in theirs):  # our own class
        theirs = {name.removeprefix("decoder."): tensor for name, tensor in theirs.items()}
    whole = {"embed_tokens.weight": "embedding.weight", "lm_head.weight": "unembedding.weight"}
    ours: dict[str, Tensor] = {}
    for name in sorted(theirs):
        found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if found is None:
            ours[whole.get(name, name)] = theirs[name]
            continue
        layer, inside, suffix = found.groups()
        packed = next((own for own, parts in _PARTS.items() if inside in parts), None)
        if packed is None:
            ours[f"blocks.{layer}.{_NAMES.get(inside, inside)}.{suffix}"] = theirs[name]
        elif inside == _PARTS[packed][0]:
            parts = [theirs[f"layers.{layer}.{part}.{suffix}"] for part in _PARTS[packed]]
            ours[f"blocks.{layer}.{packed}.{suffix}"] = torch.cat(parts)
    if is_tied:
        ours.pop("unembedding.weight", None)
    return ours


def begin_with(model: Decoder, weights: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Set the model's parameters from `weights`, but for those of a scheme's own that differ.

    Returns: the scheme's parameters that stay as they started, and those of `weights` that the model has no place for.
    Raises: ConfigError where the decoders differ.
    """
    from posbench.runs.checkpoint import put_weights

    here = {name: p.shape for name, p in model.named_parameters()}
    of_scheme = {name for name in {*here, *weights} if name.startswith("scheme.") or ".kind." in name}
    taken = {n for n in weights if n not in of_scheme or (n in here and here[n] == weights[n].shape)}
    fresh = of_scheme & here.keys() - taken
    put_weights(model, {name: weights[name] for name in taken}, fresh)
    return sorted(fresh), sorted(weights.keys() - taken)
