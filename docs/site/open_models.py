"""Write docs/lists/open-models.md: what the open decoders of transformers do with position.

A family is in if AutoModelForCausalLM loads it as a decoder of text alone: its model reads no later token. Layers and
code paths come from its class. Numbers come from the published configurations in open_models.yaml, never from defaults.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posbench.config import ConfigError
from posbench.config.units import short_length
from posbench.model.positions import CHUNK, CONVOLUTION, NOTHING, STATE, WINDOW, LayerPositions
from posbench.tools.positions import Answer, of_family

SOURCES = Path(__file__).with_name("open_models.yaml")
LATER = "on token 11"  # in what contradicts a table of a model that reads later tokens
# What a row shows of a published configuration -> the keys of which one states it.
STATED = {
    "base": ("rope_theta", "rope_parameters", "rotary_emb_base", "rope_local_base_freq"),
    "width": ("sliding_window", "attention_chunk_size", "conv_L_cache"),
    "share": ("partial_rotary_factor", "rotary_pct", "rotary_dim", "qk_rope_head_dim", "rope_parameters"),
    "rescaling": ("rope_scaling", "rope_parameters"),
    "length": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


@cache
def census(
    families: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
) -> tuple[dict[str, tuple[Answer, dict[str, Any]]], dict[str, str]]:
    """Return {family: its answer, and its published settings}, and {family: why it is not read}."""
    sources = yaml.safe_load(SOURCES.read_text(encoding="utf-8"))
    read, failed = {}, {}
    for family in sorted(families):
        source = sources.get(family, {})
        settings = dict(source.get("keys", {}))
        if kinds := settings.get("layer_types"):
            count = settings["num_hidden_layers"]
            settings["layer_types"] = (kinds["repeat"] * count)[:count]
        # Encoders with decoders, and models of images or sound, have a family of their own for their text.
        if not source and is_other(family):
            continue
        try:
            answer = of_family(family, settings, 4096)
        except ConfigError as error:
            failed[family] = str(error).removeprefix(f"{family} cannot be read: ")
            continue
        if not answer.contradictions:
            read[family] = (answer, source)
        elif not any(LATER in line for line in answer.contradictions):
            failed[family] = answer.contradictions[0]
    return read, failed


def is_other(family: str) -> bool:
    """Return whether a family is an encoder with a decoder, or reads more than text."""
    try:
        config = AutoConfig.for_model(family)
        return bool(config.is_encoder_decoder or config.get_text_config() is not config)
    # Some classes cannot be made from their defaults, which the census then says.
    except Exception:
        return False


def shares(answer: Answer) -> list[tuple[str, LayerPositions]]:
    """Return what layers do, each with its share of the layers, such as `3/4`."""
    layers = answer.positions.layers
    sentences = [layer.sentence for layer in layers]
    period = next(n for n in range(1, len(layers) + 1) if sentences[n:] == sentences[: len(layers) - n])
    # A pattern that repeats, or else the share of all layers.
    if 2 * period > len(layers):
        period = len(layers)
    found = []
    for numbers, layer in answer.positions.groups():
        share = Fraction(sum(number < period for number in numbers), period)
        found.append(("" if share == 1 else f"{share} ", layer))
    return found


def row(family: str, answer: Answer, source: dict[str, Any]) -> list[str]:
    """Return the cells of one family."""
    keys = source.get("keys", {})
    has = {name: any(key in keys for key in stated) for name, stated in STATED.items()}
    name = source.get("checkpoint", "")
    for number, link in enumerate(source.get("sources", ()), 1):
        name += f" [{number}]({link})"
    sees, turns, bases, rescalings, others = [], [], [], [], []
    for share, layer in shares(answer):
        width = f" {layer.width:,}" if layer.width and (has["width"] or layer.sees == CONVOLUTION) else ""
        sees.append(f"{share}{layer.sees}{width}" + " and state" * layer.has_state)
        turn = layer.rotation
        if turn is None:
            turns.append("" if layer.sees in (STATE, CONVOLUTION, NOTHING) else layer.other or "none")
            continue
        part = turn.channels / layer.channels
        turns.append("whole" if part == 1 else f"{part:.2g}" if has["share"] else "part")
        bases.append(f"{turn.base:,.0f}" * has["base"])
        temperature = f", temperature {turn.temperature:.3g}" if turn.temperature != 1 else ""
        factor = f" {turn.factor:g}" if turn.factor != 1 else ""
        is_shown = has["rescaling"] and turn.method != "none"
        rescalings.append(f"{turn.method}{factor}{temperature}" * is_shown)
    for _, layer in shares(answer):
        others += ["sink"] * layer.has_sink + ["cap"] * (layer.cap is not None)
        others += ["queries grow"] * (layer.query_scale is not None)
    length = next((keys[key] for key in STATED["length"] if key in keys), None)
    added = [answer.positions.embedding] * bool(answer.positions.embedding)
    return [
        f"`{family}`",
        name,
        "; ".join(sees),
        "; ".join([*added, *dict.fromkeys(turn for turn in turns if turn and not (added and turn == "none"))]),
        "; ".join(dict.fromkeys(filter(None, bases))),
        "; ".join(dict.fromkeys(filter(None, rescalings))),
        short_length(length) if length else "",
        ", ".join(dict.fromkeys(others)),
    ]


def counts(read: dict[str, tuple[Answer, dict[str, Any]]], failed: dict[str, str]) -> str:
    """Return a paragraph with how many families do what."""
    found: Counter[str] = Counter()
    for answer, _ in read.values():
        layers = answer.positions.layers
        attending = [layer for layer in layers if layer.sees not in (STATE, CONVOLUTION, NOTHING)]
        rotated = [layer for layer in attending if layer.rotation]
        turns = [layer.rotation for layer in rotated if layer.rotation]
        found["rotate in every layer with attention"] += bool(attending) and len(rotated) == len(attending)
        found["rotate in some"] += 0 < len(rotated) < len(attending)
        found["rotate part of each head"] += any(
            turn.channels < layer.channels for turn, layer in zip(turns, rotated, strict=True)
        )
        found["have layers with windows or chunks"] += any(layer.sees in (WINDOW, CHUNK) for layer in layers)
        found["have layers with a state or a convolution"] += any(
            layer.sees in (STATE, CONVOLUTION) for layer in layers
        )
        found["have different bases by layer"] += len({turn.base for turn in turns}) > 1
        found["have sinks"] += any(layer.has_sink for layer in layers)
        found["use ALiBi"] += any(layer.other == "ALiBi" for layer in layers)
        found["add positions to the embeddings"] += bool(answer.positions.embedding)
    total = len(read) + len(failed)
    sentence = f"Of {total} families, `posbench positions` reads {len(read)} ({len(read) / total:.0%})"
    return (
        f"{sentence}: {', '.join(f'{count} {what}' for what, count in found.most_common())}. A family may count twice."
    )


def page_of_models() -> str:
    """Return the page."""
    from generated import filled, page, table

    read, failed = census()
    sourced = sum(bool(source) for _, source in read.values())
    heading = ["family", "checkpoint", "layers see", "rotated", "base", "rescaling", "length", "also"]
    rows = [row(family, *found) for family, found in read.items()]
    # Without a source there are no numbers.
    bare = [[*cells[:1], *cells[2:4], cells[-1]] for cells in rows if not cells[1]]
    reasons = [[f"`{family}`", " ".join(reason.split())[:160]] for family, reason in failed.items()]
    return page(
        "What open models do with position",
        f"the classes of transformers {transformers.__version__} and docs/site/open_models.yaml",
        filled(
            "The families of `AutoModelForCausalLM` that are decoders of text. Kinds of layer and code paths come from "
            "the class, and a tiny model with random weights has checked each statement: `posbench positions FAMILY`. "
            "**A class is not a checkpoint**: numbers are those of a published one with a source "
            f"({sourced} families), or blank. *Rotated* is the share of each head's channels, in the layers' order"
            ". 3/4 is three of four layers. *Chosen*: the layer chooses tokens by their content."
        ),
        filled(counts(read, failed)),
        table(heading, [cells for cells in rows if cells[1]]),
        "## Families without a source of a published configuration",
        table([*heading[:1], *heading[2:4], heading[-1]], bare),
        "## Families that are not read",
        table(["family", "why"], reasons),
    )
