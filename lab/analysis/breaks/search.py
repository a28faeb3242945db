"""Finds all faults of a log's prompts, with their costs.

A fault of the beginning costs what repairing everything but it leaves to compute, more than repairing all does: so one
does not hide another, and what a fault of another kind explains is not counted twice. What remains when these are
repaired is searched for conversations that changed and for constant text that comes late.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from lab.analysis.breaks.losses import changed_history, late_constants
from lab.analysis.breaks.prompts import Fault, Finding, Loss, Prompt, computed_letters, example_of, shared_letters
from lab.analysis.breaks.repairs import (
    CHANGE,
    REPAIRS,
    SALT,
    VOLATILE,
    Values,
    salts_example,
    with_all_tools,
    without_volatile,
)

WORTH = 0.005  # a smaller share of all tokens is not said
FEWEST_REQUESTS = 3
UNKNOWN_TOKENS_PER_LETTER = 0.25


def search(prompts: Sequence[Prompt]) -> list[Finding]:
    """The most expensive first."""
    values = Values()
    repaired = _repaired(prompts, values)
    found: list[Loss | None] = []
    if list(prompts) != repaired:
        best = computed_letters(repaired)
        for fault in (*REPAIRS, *VOLATILE):
            faulty = _repaired(prompts, values, fault)
            if faulty != repaired and (more := computed_letters(faulty) - best) > 0:
                found.append(_loss(fault, faulty, repaired, more))
    same = with_all_tools(repaired)
    if same != repaired and (more := computed_letters(repaired) - computed_letters(same)) > 0:
        found.append(_loss(CHANGE, repaired, same, more))
    losses = [loss for loss in (*found, changed_history(repaired), *late_constants(repaired)) if loss is not None]
    letters = sum(len(piece.text) for prompt in prompts for piece in prompt.pieces)
    tokens = sum(prompt.tokens for prompt in prompts)
    per_letter = tokens / letters if tokens and letters else UNKNOWN_TOKENS_PER_LETTER
    by_fault: defaultdict[Fault, list[Loss]] = defaultdict(list)
    for loss in losses:
        by_fault[loss.fault].append(loss)
    worth = []
    for fault, some in by_fault.items():
        worst = max(some, key=lambda loss: loss.letters)  # its example is shown
        requests, lost = sum(loss.requests for loss in some), sum(loss.letters for loss in some)
        if requests >= FEWEST_REQUESTS and lost >= WORTH * letters:
            lost_tokens = round(lost * per_letter)
            worth.append(Finding(fault.name, requests, lost_tokens, worst.example, worst.request_ids, fault.advice))
    return sorted(worth, key=lambda finding: -finding.lost_tokens)


def _repaired(prompts: Sequence[Prompt], values: Values, left: Fault | None = None) -> list[Prompt]:
    """Repair the beginnings of all prompts, except for one fault."""
    found = list(prompts)
    for fault, repair in REPAIRS.items():
        if fault != left:
            found = repair(found)
    return without_volatile(found, [fault for fault in VOLATILE if fault != left], values)


def _loss(fault: Fault, faulty: Sequence[Prompt], repaired: Sequence[Prompt], letters: int) -> Loss | None:
    """Repaired, prompts stand next to each other that have more in common than they have now."""
    order = sorted(range(len(repaired)), key=lambda at: (repaired[at].model, repaired[at].pieces))
    gains = [
        (gain, one, other)
        for one, other in pairwise(order)
        if (gain := _shared(repaired[one], repaired[other]) - _shared(faulty[one], faulty[other])) > 0
    ]
    if not gains:
        return None
    requests = {faulty[at].request_id for _, one, other in gains for at in (one, other)}
    _, first, second = max(gains)
    one, other = faulty[first], faulty[second]
    example = salts_example(one, other) if fault == SALT else example_of(_text(one), _text(other))
    return Loss(fault, len(requests), letters, example, (one.request_id, other.request_id))


def _shared(one: Prompt, other: Prompt) -> int:
    is_one_cache = (one.model, one.salt) == (other.model, other.salt)
    return shared_letters(one.pieces, other.pieces) if is_one_cache else 0


def _text(prompt: Prompt) -> str:
    return "\n".join(piece.text for piece in prompt.pieces)
