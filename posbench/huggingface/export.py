"""Write a run's model and tokenizer as a folder that transformers reads (`posbench export`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from posbench.config import Config, ConfigError
from posbench.data.text.tokenizer import find_bos
from posbench.huggingface.modeling import PosbenchConfig, PosbenchForCausalLM
from posbench.huggingface.stock import TransformersModel, transformers_model
from posbench.model.decoder import Decoder
from posbench.schemes.rescaling import LENGTH
from posbench.schemes.rotary import Rotary
from posbench.system.files import DISK_FULL, folder_beside, publish_folder, write_text

if TYPE_CHECKING:
    from posbench.runs import Run

TOLERANCE = 1e-4  # share of the largest logit: float32 rounding in a dozen layers or more, with angles in float32
_COMPARED_TOKENS = 256


@dataclass(frozen=True)
class Export:
    """An exported model, and how its logits compare with posbench's."""

    folder: Path
    class_name: str  # such as LlamaForCausalLM
    is_stock: bool  # True if the class is part of transformers
    difference: float  # largest difference between its logits and ours
    largest: float  # our largest absolute logit


def export_run(run: Run, folder: Path, options: Sequence[str] = (), at_step: int | None = None) -> Export:
    """Write a run's model to `folder` for transformers, and return how the exported logits compare with posbench's.

    Arguments: options, changed options of the scheme such as `rescale=yarn`; at_step, of an older checkpoint.
    Raises: ConfigError if the weights are missing or damaged, if the options cannot be changed, and as `export_model`.
    """
    model = run.load_model(options, at_step)
    config = run.config_under(options) if options else run.config
    name = " ".join([run.name, *options])
    if at_step is not None:
        name += f" step {at_step}"
    return export_model(model, config, run.tokenizer, folder, name, config.scheme == run.config.scheme)


def export_model(
    model: Decoder, config: Config, tokenizer: Tokenizer, folder: Path, name: str, as_trained: bool = False
) -> Export:
    """Write `model` and its tokenizer to `folder`, which must be empty or missing, and return how the logits compare.

    Arguments: name, in the folder's README; as_trained, whether the model was trained with this scheme, so it is
    meant for its training length.
    Raises: ConfigError if the folder cannot be written, if the model masks documents, or if the exported model gives
    other logits.
    """
    # Nothing of the user's is overwritten.
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: give one that is empty or does not exist yet")
    if model.bos_id is not None:
        raise ConfigError(
            f"{name} reads each document separately (data.document_mask=true), which no class of transformers does: it "
            "cannot be exported"
        )
    stock = transformers_model(model.eval())
    longest = longest_read(model, as_trained)
    logging.disable_progress_bar()  # saving and loading take about a second
    with _full_disk_explained(folder), folder_beside(folder) as temporary:
        theirs = _in_transformers(model, config, tokenizer, stock, longest)
        theirs.generation_config = GenerationConfig(**special_tokens(tokenizer), use_cache=stock is not None)
        # Written beside the target first, so that an error leaves no half export.
        theirs.save_pretrained(temporary)
        # Our own class refuses padding before a sequence; generation needs it there.
        padding_side = "right" if stock is None else "left"
        exported_tokenizer(tokenizer, longest, padding_side).save_pretrained(temporary)
        # Load the model as a user would, and compare its logits, before the folder gets its name.
        loaded = AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32, local_files_only=True).eval()
        difference, largest = _compare(model, loaded, config.train.context_length)
        result = Export(folder, type(loaded).__name__, stock is not None, difference, largest)
        write_text(temporary / "README.md", _readme(result, config, name, tokenizer))
        publish_folder(temporary, folder)
    return result


@contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # its own error, also if the disk is full
        raise ConfigError(f"{folder} cannot be written ({error}): make room and give the same command again") from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(error.errno, error.strerror, str(folder / "model.safetensors")) from error


def _in_transformers(
    model: Decoder, config: Config, tokenizer: Tokenizer, stock: TransformersModel | None, longest: int
) -> PreTrainedModel:
    """Return the model as a class of transformers: `stock`, or ours if that is None. Arguments: longest, in tokens."""
    special: dict[str, Any] = special_tokens(tokenizer)
    # With a pad_token_id, BOS's row of the embedding would get no gradient.
    special |= {"pad_token_id": None, "max_position_embeddings": longest}
    if stock is None:
        theirs: Any = PosbenchForCausalLM(PosbenchConfig.for_run(config, model.embedding.num_embeddings, **special))
        theirs.decoder.load_state_dict(model.state_dict())
        return theirs.eval()
    cls: Any = getattr(transformers, stock.name)
    theirs = cls(cls.config_class(**stock.config, **special))
    # Not strict: a tied head is not stored.
    missing, unexpected = theirs.load_state_dict(stock.weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    return theirs.eval()


@torch.no_grad()
def _compare(model: Decoder, theirs: PreTrainedModel, context_length: int) -> tuple[float, float]:
    """Return the largest difference of the two models' logits on random tokens, and our largest absolute logit.

    Raises: ConfigError if rounding does not explain the difference.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(context_length, _COMPARED_TOKENS)
    tokens = torch.randint(model.embedding.num_embeddings, (2, length), generator=generator)
    expected: Tensor = model(tokens)
    difference = float((theirs(tokens).logits - expected).abs().max())
    largest = float(expected.abs().max())
    # `not <=` also refuses NaN.
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ConfigError(
            f"the logits of {type(theirs).__name__} differ from posbench's by up to {difference:.2g}: nothing was "
            "written. This is a bug in posbench or in this version of transformers: please report it with the scheme's "
            "options"
        )
    return difference, largest


def _readme(result: Export, config: Config, name: str, tokenizer: Tokenizer) -> str:
    prompt, note = ("Once upon a time", "  # begins with BOS, as in training")
    # Only tokenizers of tasks have no BOS. The prompt must then consist of the task's tokens.
    if find_bos(tokenizer) is None:
        prompt, note = " ".join(sorted(tokenizer.get_vocab())[:2]), ""
    scheme = json.dumps(config.scheme.to_mapping())
    registers = "" if result.is_stock else "import posbench.huggingface  # registers the class\n"
    return f"""# `{name}`

Exported by posbench. Class: `{result.class_name}`. Scheme: `{scheme}`. Trained on {config.train.context_length} tokens
of context. On random tokens its logits differ from posbench's by at most {result.difference:.1g} (the largest logit is
{result.largest:.3g}).

```python
{registers}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
inputs = tokenizer({json.dumps(prompt)}, return_tensors="pt"){note}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```
"""


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return transformers' bos, eos and pad token ids, all of them BOS (which separates documents); {} for a task."""
    bos = find_bos(tokenizer)
    if bos is None:
        return {}
    return {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos}


def longest_read(model: Decoder, as_trained: bool) -> int:
    """Return how many tokens the model is meant to read.

    Arguments: as_trained, whether it was trained with the scheme it has.
    """
    shape = model.scheme.shape
    # Tasks may be read up to their longest problem.
    if shape.longest or as_trained:
        return shape.longest or shape.context_length
    # RoPE rescaled after training extends the trained positions.
    rotations = [scheme for scheme in model.scheme.modules() if isinstance(scheme, Rotary)]
    return max([shape.context_length, *(_extended_length(rotary) for rotary in rotations)])


def _extended_length(rotary: Rotary) -> int:
    """Return the length that a rotation's fixed factor extends the trained positions to, tokens; 0 without a factor."""
    rescaling = rotary.rescaling
    if rescaling is None or rescaling.factor is None:
        return 0
    length = rescaling.parameters.get(LENGTH, rotary.shape.positions_length)
    return int(length * rescaling.factor)


def exported_tokenizer(tokenizer: Tokenizer, longest: int, padding_side: str) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer that puts BOS first and reads special tokens in text as text, as in training.

    Arguments: longest, how many tokens the model reads; padding_side, `left` for generation, `right` for models that
    refuse padding before a sequence.
    """
    # A copy, because the post-processor would change the run's tokenizer.
    exported: Any = Tokenizer.from_str(tokenizer.to_str())
    bos_id, special = find_bos(tokenizer), {}
    if bos_id is not None:
        bos = tokenizer.id_to_token(bos_id)
        exported.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
        special = {"bos_token": bos, "eos_token": bos, "pad_token": bos}
    return PreTrainedTokenizerFast(
        tokenizer_object=exported,
        **special,
        padding_side=padding_side,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )
