"""Details of one replica, prefix or decision, as lines: every field as the router's API names it."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from events.tool.words import printable
from router.console.explain import told_portions
from router.console.formatting import count, duration
from router.responses import Considered, DecisionRecord
from router.top.rows import (
    STYLES,
    Branch,
    Row,
    clock,
    natural,
    reason_for,
    reason_of,
    saved_tokens,
    state_of,
    text_of,
    tokens_or_none,
)

LABEL = 26
LAST_DECISIONS = 8  # shown for a replica


def replica_lines(row: Row, decisions: Sequence[DecisionRecord]) -> list[Text]:
    replica = row.replica
    state, reason = state_of(replica), reason_of(replica)
    first = Text.assemble((printable(replica.name), "bold"), "  ", (state, STYLES[state]))
    first.append(f": {printable(reason)}" if reason else "")
    recently = {} if row.rates is None else {**row.rates._asdict(), "hit": row.rates.hit}
    chosen = [one for one in decisions if one.chosen == replica.name][:LAST_DECISIONS]
    last = {f"{clock(one.ts)} {one.prompt_tokens:,}": _outcome(one) for one in chosen}
    return [
        first,
        *_fields({**msgspec.to_builtins(replica), "recently": recently, "last decisions": last}),
    ]


def _outcome(decision: DecisionRecord) -> str:
    predicted = tokens_or_none(decision.predicted_cached_tokens)
    reported = tokens_or_none(decision.reported_cached_tokens)
    return f"{predicted} predicted, {reported} reported, {reason_for(decision)}"


def prefix_lines(branch: Branch, width: int) -> list[Text]:
    prefix, end = branch.prefix, branch.prefix.begin + branch.prefix.tokens
    fields = msgspec.to_builtins(prefix) | {"saved_tokens": saved_tokens(prefix), "below": len(prefix.below)}
    del fields["text"]
    lines = [
        Text(f"Tokens {prefix.begin:,} to {end:,} of {count(prefix.prompts, 'prompt')}", "bold"),
        *_fields(fields),
        Text(),
    ]
    if prefix.text is None:
        return [*lines, Text("Texts are not kept; start the router with --show-prompts to see them.", "dim")]
    lines.append(Text("text", "bold"))
    for run in (*branch.above, prefix):  # from the prompt's start, each at its token number
        style = "" if run is prefix else "dim"
        wrapped = textwrap.wrap(text_of(run), max(20, width - 12)) or [""]
        lines += [
            Text(f"{f'{run.begin:,}' if not number else '':>9}  {part}", style) for number, part in enumerate(wrapped)
        ]
    return lines


def decision_lines(decision: DecisionRecord, width: int) -> list[Text]:
    fields = msgspec.to_builtins(decision) | {"ts": clock(decision.ts), "portions": told_portions(decision.portions)}
    del fields["candidates"]
    first = Text.assemble((printable(decision.chosen or "nobody"), "bold"), f": {printable(reason_for(decision))}")
    lines = [first, *_fields(fields)]
    if not decision.candidates:
        return lines
    longest = min(max(len(one.name) for one in decision.candidates), max(8, width - 30))
    lines += [Text(), Text(f"{'candidate':<{longest + 4}}{'cached':>10}{'cost':>12}", "bold")]
    for one in sorted(decision.candidates, key=_by_cost):
        chosen = one.name == decision.chosen
        cost = "ineligible" if one.cost_s is None else duration(one.cost_s)
        named = f"  {'>' if chosen else ' '} {printable(one.name)[:longest]:<{longest}}"
        style = "bold green" if chosen else "dim" if one.cost_s is None else ""
        lines.append(Text(f"{named}{one.matched_tokens:>10,}{cost:>12}", style))
    return lines


def _by_cost(one: Considered) -> tuple[float, list[tuple[int, str]]]:
    """Cheapest first, as at the time of the decision."""
    return math.inf if one.cost_s is None else one.cost_s, natural(one.name)


def _fields(fields: Mapping[str, Any]) -> list[Text]:
    """A line for each field that is not empty; those of nested objects come last, below their name."""
    lines = [
        Text.assemble((f"  {printable(name):<{LABEL}}", "dim"), printable(_shown(name, value)))
        for name, value in fields.items()
        if not isinstance(value, dict) and value not in (None, "", [])
    ]
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            lines += [Text(), Text(name, "bold"), *_fields(value)]
    return lines


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return duration(value) if name.endswith("_s") and not name.endswith("_per_s") else f"{value:,.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
