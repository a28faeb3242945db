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
from router.responses import DecisionRecord
from router.top import tables
from router.top.tables import Branch, Row, clock, natural, reason_for, tokens_or_none

LABEL = 26
LAST_DECISIONS = 8  # shown for a replica


def replica_lines(row: Row, decisions: Sequence[DecisionRecord]) -> list[Text]:
    replica = row.replica
    state, reason = tables.state_of(replica), tables.reason_of(replica)
    first = Text.assemble((printable(replica.name), "bold"), "  ", (state, tables.STYLES[state]))
    first.append(f": {printable(reason)}" if reason else "")
    recently = {} if row.rates is None else {**row.rates._asdict(), "hit": row.rates.hit}
    last = {}
    for one in [one for one in decisions if one.chosen == replica.name][:LAST_DECISIONS]:
        predicted, reported = map(tokens_or_none, (one.predicted_cached_tokens, one.reported_cached_tokens))
        outcome = f"{predicted} predicted, {reported} reported, {reason_for(one)}"
        last[f"{clock(one.ts)} {one.prompt_tokens:,}"] = outcome
    return [first, *_fields({**msgspec.to_builtins(replica), "recently": recently, "last decisions": last})]


def prefix_lines(branch: Branch, width: int) -> list[Text]:
    prefix, end = branch.prefix, branch.prefix.begin + branch.prefix.tokens
    fields = msgspec.to_builtins(prefix) | {"saved_tokens": tables.saved_tokens(prefix), "below": len(prefix.below)}
    del fields["text"]
    title = f"Tokens {prefix.begin:,} to {end:,} of {count(prefix.prompts, 'prompt')}"
    lines = [Text(title, "bold"), *_fields(fields), Text()]
    if prefix.text is None:
        return [*lines, Text("Texts are not kept; start the router with --show-prompts to see them.", "dim")]
    lines.append(Text("text", "bold"))
    for run in (*branch.above, prefix):  # from the prompt's start, each at its token number
        style, place = "" if run is prefix else "dim", f"{run.begin:,}"
        for part in textwrap.wrap(tables.text_of(run), max(20, width - 12)) or [""]:
            lines.append(Text(f"{place:>9}  {part}", style))
            place = ""
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
    ranked = [(math.inf if one.cost_s is None else one.cost_s, natural(one.name), one) for one in decision.candidates]
    for cost_s, _, one in sorted(ranked, key=lambda each: each[:2]):  # cheapest first, as at the decision's time
        is_chosen, is_able = one.name == decision.chosen, one.cost_s is not None
        name = f"  {'>' if is_chosen else ' '} {printable(one.name)[:longest]:<{longest}}"
        cost = duration(cost_s) if is_able else "ineligible"
        style = "bold green" if is_chosen else "" if is_able else "dim"
        lines.append(Text(f"{name}{one.matched_tokens:>10,}{cost:>12}", style))
    return lines


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
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return duration(value) if name.endswith("_s") and not name.endswith("_per_s") else f"{value:,.4g}"
        case list():
            return ", ".join(map(str, value))
    return str(value)
