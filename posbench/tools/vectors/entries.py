"""List the entries of the test vectors, one convention of position each, and the mistakes that ports make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from math import ceil
from typing import Any, NamedTuple

from posbench.tools.vectors.conventions import Alibi, AlibiSlopes, Entry, Rotation, T5Buckets, Xpos

ROPE_UTILS = "transformers: modeling_rope_utils.py"


class Mistake(NamedTuple):
    """A way to get an entry wrong."""

    name: str
    summary: str  # what a port that makes it does
    changes: dict[str, Any]  # fields of an entry, and their wrong values


MISTAKES = (
    Mistake("adjacent_pairs", "pairs of channels are (2t, 2t + 1) instead of (t, t + r/2)", {"pairing": "adjacent"}),
    Mistake("half_split_pairs", "pairs of channels are (t, t + r/2) instead of (2t, 2t + 1)", {"pairing": "half"}),
    Mistake("first_channels", "the first channels are rotated instead of the last", {"side": "first"}),
    Mistake("last_channels", "the last channels are rotated instead of the first", {"side": "last"}),
    Mistake("all_channels", "all channels are rotated", {"fraction": 1.0, "is_proportional": False}),
    Mistake("other_width", "frequencies count D channels instead of r, or r instead of D", {"other_width": True}),
    Mistake(
        "halved_exponent",
        "frequencies are base ** (-t / r) instead of base ** (-2t / r): a factor 2 is forgotten",
        {"exponent_is_halved": True},
    ),
    Mistake("not_rescaled", "the rope_type is ignored: frequencies are those of default", {"rescale": None}),
    Mistake(
        "other_ramp", "YaRN's ramp is linear in turns (the paper) instead of the pair's index", {"ramp_in_turns": True}
    ),
    Mistake("truncate_ignored", "the key truncate is ignored", {"ignored_keys": ("truncate",)}),
    Mistake("betas_ignored", "beta_fast and beta_slow are ignored", {"ignored_keys": ("beta_fast", "beta_slow")}),
    Mistake("mscale_ignored", "mscale and mscale_all_dim are ignored", {"ignored_keys": ("mscale", "mscale_all_dim")}),
    Mistake("attention_factor_ignored", "the key attention_factor is ignored", {"ignored_keys": ("attention_factor",)}),
    Mistake("no_attention_factor", "q and k are not multiplied by the attention factor", {"attention_power": (0, 0)}),
    Mistake(
        "attention_factor_twice", "q and k are multiplied twice by the attention factor", {"attention_power": (2, 2)}
    ),
    Mistake(
        "attention_factor_on_q",
        "the attention factor is all on q, squared: right after q . k, but not what transformers caches as k",
        {"attention_power": (2, 0)},
    ),
    Mistake("short_input", "the frequencies are those of short inputs", {"is_short_input": True}),
    Mistake("backwards", "the sign of the sines is wrong: rotations go the other way", {"direction": -1}),
    Mistake("positions_from_one", "positions are counted from 1", {"first_position": 1}),
    Mistake("bfloat16_frequencies", "frequencies are rounded to bfloat16", {"frequency_format": "bfloat16"}),
    Mistake("bfloat16_positions", "positions are rounded to bfloat16", {"position_format": "bfloat16"}),
    Mistake("bfloat16_angles", "angles are rounded to bfloat16", {"angle_format": "bfloat16"}),
    Mistake("sines_of_one", "sines of unrotated pairs are padded with 1 instead of 0", {"sine_of_unrotated": 1.0}),
    Mistake("values_not_rotated", "values are not rotated", {"value_rotations": 0}),
    Mistake("values_rotated_twice", "values are rotated twice", {"value_rotations": 2}),
    Mistake("missing_inverse", "outputs are not rotated back", {"inverse": "none"}),
    Mistake("forward_on_outputs", "outputs are rotated forward instead of back", {"inverse": "forward"}),
    Mistake("negated_table", "outputs are rotated by negated cosines and sines", {"inverse": "negated"}),
    Mistake("no_sink", "the sink is left out of the softmax", {"sink_is_left_out": True}),
    Mistake("heads_tiled", "query head h reads key head h % G instead of h // (H / G)", {"heads_are_tiled": True}),
    Mistake("unscaled_scores", "q . k is not divided by sqrt(D)", {"is_scaled": False}),
    Mistake("no_decay", "the powers of zeta are missing", {"decay": 0}),
    Mistake("growth", "the powers of zeta are inverted: scores grow with distance", {"decay": -1}),
    Mistake("positive_bias", "the bias is added instead of subtracted", {"bias_sign": 1}),
    Mistake("scaled_bias", "the bias is divided by sqrt(D) too", {"bias_is_scaled": True}),
    Mistake(
        "bias_of_key",
        "the bias is slope * key position (BLOOM): the same after a softmax, but wrong by whole logits in bfloat16",
        {"bias_of_key": True},
    ),
    Mistake("geometric_slopes", "slopes are 2 ** (-8 h / H) though H is no power of two", {"rule": "geometric"}),
    Mistake("slopes_of_larger_power", "slopes are the first H of the next power of two", {"rule": "larger_power"}),
    Mistake("slopes_of_8_heads", "slopes are 2 ** -h, whatever the number of heads", {"rule": "of_8_heads"}),
    Mistake(
        "bidirectional", "buckets are those of an encoder, half of them for later keys", {"is_bidirectional": True}
    ),
    Mistake("sign_lost", "distances are key minus query, so that all are in bucket 0", {"sign_is_lost": True}),
    Mistake("rounded_up", "logarithms are rounded up instead of down", {"rounds": ceil}),
)


def with_mistakes(entry: Entry) -> Iterator[tuple[Mistake, Entry]]:
    """Yield each mistake that can be made in an entry, and the entry with it."""
    names = {field.name for field in fields(entry)}
    for mistake in MISTAKES:
        if mistake.changes.keys() <= names:
            wrong = replace(entry, **mistake.changes)
            if wrong != entry:
                yield mistake, wrong


def in_float32(entry: Entry) -> Entry:
    """Return an entry whose angles are computed in float32, as most code does; other entries do not change."""
    if not isinstance(entry, Rotation):
        return entry
    return replace(entry, frequency_format="float32", position_format="float32", angle_format="float32")


def entries(head_dim: int) -> list[Entry]:
    """Return all entries. Arguments: head_dim, D, for the lists of longrope."""
    pairs = range(head_dim // 2)
    original = {"original_max_position_embeddings": 4096}
    longrope = {"short_factor": [1 + t / 64 for t in pairs], "long_factor": [1.0 + t for t in pairs]}
    return [
        Rotation(
            name="default",
            summary="RoPE on q and k, pairs (t, t + D/2).",
            source="arXiv 2104.09864; transformers: models/llama",
        ),
        Rotation(
            name="adjacent",
            summary="RoPE on q and k, pairs (2t, 2t + 1).",
            source="arXiv 2104.09864; transformers: models/cohere",
            pairing="adjacent",
        ),
        Rotation(
            name="linear",
            summary="RoPE with all frequencies divided by a factor (position interpolation).",
            source=f"arXiv 2306.15595; {ROPE_UTILS}",
            rescale={"rope_type": "linear", "factor": 4.0},
        ),
        Rotation(
            name="dynamic",
            summary="RoPE with a base that grows with the length of the input, the last position + 1; the original "
            "length is max_position_embeddings in transformers.",
            source=ROPE_UTILS,
            rescale={"rope_type": "dynamic", "factor": 2.0, **original},
        ),
        Rotation(
            name="yarn",
            summary="YaRN as in its authors' code, with default keys.",
            source=f"arXiv 2309.00071; {ROPE_UTILS}",
            rescale={"rope_type": "yarn", "factor": 32.0, **original},
        ),
        Rotation(
            name="yarn_mscale",
            summary="YaRN with beta_fast, beta_slow, mscale and mscale_all_dim (DeepSeek-V2's keys).",
            source=ROPE_UTILS,
            rescale={"rope_type": "yarn", "factor": 40.0, **original, "beta_fast": 64.0, "beta_slow": 2.0}
            | {"mscale": 1.0, "mscale_all_dim": 0.5},
        ),
        Rotation(
            name="yarn_untruncated",
            summary="YaRN with truncate: false (gpt-oss), and its attention_factor given.",
            source=f"{ROPE_UTILS}; models/gpt_oss",
            base=150000.0,
            rescale={"rope_type": "yarn", "factor": 32.0, **original, "truncate": False, "attention_factor": 1.25},
        ),
        Rotation(
            name="llama3",
            summary="Llama 3.1's rescaling of slow frequencies.",
            source=f"arXiv 2407.21783; {ROPE_UTILS}",
            base=500000.0,
            rescale={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        Rotation(
            name="longrope",
            summary="LongRoPE: each frequency divided by its own factor, here of long_factor, as the input is longer "
            "than original_max_position_embeddings.",
            source=f"arXiv 2402.13753; {ROPE_UTILS}",
            rescale={"rope_type": "longrope", "factor": 32.0, **original, **longrope},
        ),
        Rotation(
            name="proportional",
            summary="p-RoPE: frequencies of all D channels, 0 for all but the fastest quarter of the pairs (Gemma 4).",
            source=f"arXiv 2410.06205; {ROPE_UTILS}",
            base=1000000.0,
            fraction=0.25,
            is_proportional=True,
        ),
        Rotation(
            name="first_quarter",
            summary="RoPE on the first r = D/4 channels, with frequencies of r channels.",
            source="arXiv 2204.06745; transformers: models/gpt_neox",
            fraction=0.25,
        ),
        Rotation(
            name="last_quarter",
            summary="RoPE on the last r = D/4 channels, with frequencies of r channels, pairs (2t, 2t + 1).",
            source="transformers: models/deepseek_v4",
            fraction=0.25,
            side="last",
            pairing="adjacent",
        ),
        Rotation(
            name="vo",
            summary="Rotated values, and outputs rotated back at the query's position; q and k have no position.",
            source="kexue.fm/archives/10862",
            sites=("v", "o"),
        ),
        Rotation(
            name="deepseek_v4",
            summary="The input k serves as key and value, the last eighth of q and k is rotated, outputs are rotated "
            "back, and each head has a sink.",
            source="transformers: models/deepseek_v4",
            sites=("q", "k", "v", "o"),
            fraction=0.125,
            side="last",
            pairing="adjacent",
            shares_kv=True,
            has_sink=True,
        ),
        Rotation(
            name="sinks",
            summary="Attention without position; each head's sink is one more logit of its softmax, with value 0.",
            source="arXiv 2508.10925; transformers: models/gpt_oss",
            sites=(),
            has_sink=True,
        ),
        Xpos(
            name="xpos",
            summary="Scores of xPos, with zeta_t ** (distance / 512) on pair t, zeta_t = (2t / D + 0.4) / 1.4.",
            source="arXiv 2212.10554",
        ),
        Alibi(
            name="alibi",
            summary="Scores q . k / sqrt(D) - slope * distance.",
            source="arXiv 2108.12409",
        ),
        *(
            AlibiSlopes(
                name=f"alibi_{heads}",
                summary=f"ALiBi's slopes of {heads} heads.",
                source="arXiv 2108.12409; transformers: models/bloom",
                num_heads=heads,
            )
            for heads in (8, 12, 129)
        ),
        T5Buckets(
            name="t5",
            summary="T5's causal bucket of each distance in the input `distances`.",
            source="arXiv 1910.10683; transformers: models/t5",
        ),
    ]
