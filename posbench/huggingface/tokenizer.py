"""A run's tokenizer in transformers' form: the same tokens, and BOS before each text, as in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posbench.data.tokenizer import find_bos

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """BOS in three roles: it begins a document, which ends the one before it, and it is the padding."""
    bos = find_bos(tokenizer)
    assert bos is not None, "a run's tokenizer has a BOS"
    return {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos}


def exported(tokenizer: Tokenizer, context_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with `BOS text` as its template. Text cannot spell special tokens, as in training."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    copy: Any = Tokenizer.from_str(tokenizer.to_str())
    number = special_tokens(tokenizer)["bos_token_id"]
    bos = tokenizer.id_to_token(number)
    copy.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, number)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=copy,
        bos_token=bos,
        eos_token=bos,
        pad_token=bos,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )
