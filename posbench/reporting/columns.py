"""What the columns of a report's CSV files mean: written beside them as columns.csv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_INTERVAL = "95 % interval over seeds"
_DOCUMENTS = "half the 95 % interval that the choice of documents leaves"
MEANINGS: dict[str, str] = {
    "experiment": "name of the experiment",
    "scheme": "row of conf/scheme, with the --under words if it was evaluated with any",
    "seed": "of initial weights and batches",
    "seeds": "number of seeds behind the figures",
    "status": "finished, running, interrupted, stopped, died or unreadable",
    "reason": "why the run stopped or died",
    "protocol": "how it was scored (docs/protocols-and-statistics.md)",
    "split": "of the text: validation or test",
    "length": "tokens of a window",
    "loss": "nats/token, mean over seeds",
    "loss_low": f"its {_INTERVAL}, lower end",
    "loss_high": "... upper end",
    "gap": "loss minus the baseline's, paired by seed, nats/token",
    "gap_low": f"its {_INTERVAL}, lower end",
    "gap_high": "... upper end",
    "gap_p": "p-value of the gap by the ranking's test",
    "gap_p_plain": "p-value of the paired t-test",
    "gap_p_holm": "gap_p corrected over the family of pairs (Holm)",
    "loss_documents": f"{_DOCUMENTS} around the loss",
    "gap_documents": f"{_DOCUMENTS} around the gap",
    "gap_joint": "half the 95 % interval of the gap over seeds and documents together",
    "change": "loss minus the loss at the training length, paired by seed and document, nats/token",
    "change_low": f"its {_INTERVAL}, lower end",
    "change_high": "... upper end",
    "change_documents": f"{_DOCUMENTS} around the change",
    "bits_per_byte": "loss in bits per byte of text",
    "perplexity": "exp of the loss",
    "targets": "tokens scored per seed",
    "windows": "windows scored per seed",
    "documents": "documents scored",
    "text": "name of a text that no run was trained on (posbench eval --data)",
    "overlap": "share of the split's 13-grams of words that also occur in the training text",
    "is_relative": "whether the scheme promises to depend only on distances",
    "diverged": "why the run counts as diverged; empty: it does not",
    "initial_loss": "validation loss before the first step, nats/token",
    "num_steps": "optimizer steps of the run",
    "tokens": "tokens trained on",
    "skipped_steps": "steps skipped for NaN or infinity",
    "epochs": "how often the run read its text",
    "training_flops": "model FLOPs of all steps",
    "tokens_per_second": "of training, without the first step",
    "train_seconds": "of training",
    "peak_memory_bytes": "of training",
    "first_step_seconds": "of the first step of each process, which compiles",
    "device": "the device that trained it",
    "dtype": "number format of the activations",
    "parameters": "of the model",
    "started": "when training began (ISO 8601)",
    "ended": "when training ended (ISO 8601)",
    "damaged": "files that are not results of the run",
    "path": "folder of the run",
    "left": "a scheme",
    "right": "the scheme that it is compared with",
    "sd": "standard deviation of the paired differences over seeds, nats/token",
    "p": "p-value",
    "p_plain": "p-value of the paired t-test",
    "p_holm": "p corrected over the family of pairs (Holm); empty: not in the family",
    "level": "p must be at most this for a significant difference",
    "margin": "losses closer than this count as equal, nats/token",
    "p_equal": "p-value of two one-sided tests that the difference is within the margin",
    "p_equal_holm": "p_equal corrected over the family (Holm)",
    "level_equal": "p_equal must be at most this for equality within the margin",
    "test_sd": "standard deviation that the ranking's test uses, nats/token",
    "test_freedom": "its degrees of freedom",
    "difference": "loss of the second minus the loss of the first, nats/token",
    "low": f"{_INTERVAL} of the figure before it, lower end",
    "high": "... upper end",
    "decided": "whether the two differ significantly by the corrected test",
    "equal": "whether the corrected test finds them within the margin",
    "smallest_visible": "the smallest difference that this many seeds would detect, nats/token",
    "seeds_to_decide": "seeds that would make a difference of this size significant",
    "seeds_to_equate": "seeds that would show the pair to be equal within the margin",
    "tokens_per_parameter": "tokens trained on / parameters",
    "equal_compute_flops": "training FLOPs at which the gaps are taken",
    "cache_bytes_per_token": "cached per token while decoding, all layers",
    "state_bytes": "cached for all tokens together while decoding, all layers",
    "is_estimate": "whether a run used more FLOPs than equal_compute_flops",
    "published": "name of the published results (--against list)",
    "measurement": "which of their measurements is compared",
    "ours": "which of our results it is compared with",
    "schemes": "schemes that both have",
    "tau": "Kendall's tau of the two orders",
    "tau_lowest": "the lowest tau of a single seed",
    "tau_highest": "the highest tau of a single seed",
    "reversed": "pairs in the other order here",
    "reversed_and_decided": "... that differ significantly here",
    "model": "the n-gram model",
    "n": "its order",
    "better": "schemes whose models are better than it; in links.csv the better scheme of a link",
    "worse": "schemes whose models are worse than it; in links.csv the worse scheme of a link",
    "open": "schemes that do not differ significantly from it",
    "lr": "peak learning rate",
    "is_shared": "whether it is the learning rate of all schemes",
    "is_own": "whether it is the scheme's own learning rate",
    "pilot_loss": "loss of a pilot at this rate, nats/token",
    "bucket_start": "first distance or position of the bucket, tokens",
    "bucket_end": "last distance or position of the bucket, tokens",
    "loss_texts": f"{_DOCUMENTS} around the loss",
    "gap_texts": f"{_DOCUMENTS} around the gap",
    "lost_order": "how much the loss rises when everything farther back is shuffled, nats/token",
    "lost_order_texts": f"{_DOCUMENTS} around it",
    "lost_identity": "how much the loss rises when everything farther back is replaced, nats/token",
    "lost_identity_low": f"its {_INTERVAL}, lower end",
    "lost_identity_high": "... upper end",
    "lost_identity_texts": f"{_DOCUMENTS} around it",
    "drop": "how much the loss falls when a passage comes a second time, nats/token",
    "drop_texts": f"{_DOCUMENTS} around it",
    "by_order": "the part of drop that its order gives, nats/token",
    "by_order_low": f"its {_INTERVAL}, lower end",
    "by_order_high": "... upper end",
    "by_order_texts": f"{_DOCUMENTS} around it",
    "trials": "passages scored per seed",
    "sign": "what the publication says of the link: > or ~",
    "verdict": "what our runs say of it",
}
_OF_FILES: dict[str, dict[str, str]] = {
    "retrieval.csv": {"gap": "tokens between the two passages"},
    "runs.csv": {"loss": "validation loss at the end, nats/token"},
    "costs.csv": {"gap": "gap to the baseline at equal_compute_flops, nats/token"},
    "against.csv": {"p": "p-value of tau against no relation", "seeds": "how many seeds have a tau"},
    "pairs.csv": {"p": "p-value of the pair by the ranking's test"},
}
_FAMILIES = {
    "perplexity@": "perplexity at this length (tokens) by this protocol",
    "loss[": "validation loss with older weights, other options (--under) or other text, nats/token",
    "bits_per_byte[": "... in bits per byte of text",
    "fingerprint.": "digest of what must agree between compared runs",
    "version.": "version of the package in training",
    "scheme.": "setting of the run's scheme (posbench/config.py)",
    "model.": "setting of its model",
    "train.": "setting of its training",
    "device.": "what it was trained on",
}


def meaning(file: str, column: str) -> str:
    """A line on a column; empty for one that is not known."""
    family = next((text for prefix, text in _FAMILIES.items() if column.startswith(prefix)), "")
    return _OF_FILES.get(file, {}).get(column) or MEANINGS.get(column) or family


def described(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """columns.csv: one row a file and column, with what it means."""
    import pandas as pd

    rows = [(file, str(column), meaning(file, str(column))) for file, frame in tables.items() for column in frame]
    return pd.DataFrame(rows, columns=["file", "column", "meaning"])
