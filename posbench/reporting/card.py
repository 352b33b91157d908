"""Write a subject's card (`posbench.analysis.card`) as lines of text, and as `card.md` for a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from posbench.analysis.card import ENOUGH_WINDOWS, OPEN, RISES, TOO_FEW, Card, Choice, Difference, card_of
from posbench.config.units import DASH, count_of, plus_minus
from posbench.runs import Run
from posbench.runs.finding import SUBJECTS
from posbench.system.files import write_text
from posbench.version import __version__


def show_cards(runs: Sequence[Run], console: Console) -> None:
    """Print the card of each subject (a model that was not trained here) with results, and write its `card.md`."""
    for run in runs:
        # Only subjects have a card, and `subjects` is their experiment.
        if run.experiment_folder.name != SUBJECTS:
            continue
        card = card_of(run)
        if card is None:
            continue
        console.out("")
        for line in card_lines(card):
            console.out(line)
        file = run.path.parent / "card.md"
        write_text(file, card_page(card, run))
        console.out(f"wrote {file}")


def card_lines(card: Card) -> list[str]:
    """Return the card as lines of text."""
    kind = " (instruction-tuned)" if card.is_instructed else ""
    order = f"order: {DASH}"  # a dash: not scored
    if card.order_back is not None:
        order = f"order is used up to {card.order_back:,} tokens back"
        if card.order_back == card.order_longest:
            order += ", the farthest scored"
    lines = [f"{card.name}{kind}: {_loss(card)}; {order}"]
    # What was not scored is in the lines of commands.
    parts = [part for part in (_rescaling(card), _base(card.base), _heads(card)) if part]
    if parts:
        text = "; ".join(parts)
        lines.append(f"{text[0].upper()}{text[1:]}")
    lines += [f"{DASH} {name}: {command}" for name, command in card.missing.items()]
    return lines


def card_page(card: Card, run: Run) -> str:
    """Return the content of `card.md`."""
    text, *details = card_lines(card)
    subject = run.manifest.subject or {}
    versions = ", ".join(f"{name} {version}" for name, version in subject.get("versions", {}).items())
    source = f"posbench {__version__} ({versions}), data={run.config.data.name}, weights {str(run.weights_digest)[:12]}"
    listed = "\n".join(f"- {line.removeprefix(DASH).strip()}" for line in details)
    # Older subjects have no such entry.
    positions = f"{subject['positions']}\n\n" if "positions" in subject else ""
    return f"## Context length\n\n{positions}{text}.\n\n{listed}\n\nMeasured by {source}.\n"


def _loss(card: Card) -> str:
    trained = f"trained: {card.trained_length:,}" if card.is_length_known else "trained length unknown"
    if card.has_bos:
        trained += "; BOS before each window"
    if card.longest is not None:
        trained += f"; reads at most {card.longest:,}: {DASH} beyond"
    if not card.steps:
        return f"loss by length: {DASH} ({trained})"
    # All lengths share their targets, so if one has too few windows or documents, so have the others.
    if any(step.verdict == TOO_FEW for step in card.steps):
        needed = f"needs {ENOUGH_WINDOWS} windows; {trained}"
        if rises := [step for step in card.steps if step.verdict == RISES]:
            first = f"rises by {_nats(rises[0])} nats at {rises[0].length:,} ({count_of(rises[0].windows, 'window')})"
            return f"loss {first}; too few windows to say up to where it does not ({needed})"
        largest = max(card.steps, key=lambda step: step.nats)
        change = f"the largest change is {_nats(largest, sign=True)} nats, at {largest.length:,}"
        return f"too few windows or documents to say whether the loss rises ({needed}): {change}"
    flat = card.flat_up_to
    clauses = []
    # Lengths up to `flat` need no word; the first certain rise ends the sentence.
    for step in [step for step in card.steps if flat is None or step.length > flat]:
        if step.verdict == RISES:
            clauses.append(f"rises by {_nats(step)} nats at {step.length:,}")
            break
        if step.verdict == OPEN:
            clauses.append(f"may rise at {step.length:,} ({_nats(step, sign=True)} nats)")
    if flat is None:
        return f"loss ({trained}) {' and '.join(clauses)}"
    return " and ".join([f"loss does not rise up to {flat:,} tokens ({trained})", *clauses])


def _rescaling(card: Card) -> str:
    choice = card.rescaling
    if choice is None:
        return ""
    names = ", ".join(_value(option) for option in choice.options)
    change = f"{_nats(choice.difference, sign=True)} nats against {card.reference or 0:,}"
    return f"best of {names} at {choice.length:,}: {_value(choice.best)}, {change}"


def _base(choice: Choice | None) -> str:
    if choice is None:
        return ""
    # "" is the model as it is, with the base of config.json.
    if not choice.best:
        return f"base as in config.json is best of {len(choice.options)} at {choice.length:,}"
    # The change of the loss from the model as it is: below 0 is better.
    change = f"{_nats(choice.difference, sign=True)} nats"
    half = choice.difference.half  # None: too few documents for an interval
    is_certain = half is not None and choice.difference.nats + half < 0
    verdict = "is lowest, but not certainly better"
    if is_certain:
        verdict = "is better than the one in config.json"
    return f"base {_value(choice.best)} {verdict} at {choice.length:,}: {change}"


def _heads(card: Card) -> str:
    if card.heads is None:
        return ""
    names = {"previous_token": "previous-token", "induction": "induction"}
    return ", ".join(f"{names[name]} head {head.head} ({head.share:.2f})" for name, head in card.heads.items())


def _value(option: str) -> str:
    # The value in `base=1e6`.
    return option.partition("=")[2]


def _nats(difference: Difference, sign: bool = False) -> str:
    return plus_minus(difference.nats, difference.half or math.nan, sign)
