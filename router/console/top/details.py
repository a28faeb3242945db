"""Details of one replica, prefix or decision, as lines: every field as the router's API names it."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.text import Text

from events.tool.words import printable
from router.console.explain import told_portions
from router.console.formatting import count, duration
from router.console.top import tables
from router.console.top.tables import Branch, Row, clock, reason_for
from router.responses import DecisionRecord

LABEL = 26


def replica_lines(row: Row) -> list[Text]:
    replica = row.replica
    state, reason = tables.state_of(replica), tables.reason_of(replica)
    first = Text.assemble((printable(replica.name), "bold"), "  ", (state, tables.STYLES[state]))
    first.append(f": {printable(reason)}" if reason else "")
    recently = {} if row.rates is None else {**row.rates._asdict(), "hit": row.rates.hit}
    return [first, *_fields({**msgspec.to_builtins(replica), "recently": recently})]


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


def decision_lines(decision: DecisionRecord) -> list[Text]:
    candidates = {}
    for one in sorted(decision.candidates, key=lambda one: (math.inf if one.cost_s is None else one.cost_s, one.name)):
        cost = "ineligible" if one.cost_s is None else duration(one.cost_s)
        mark = ">" if one.name == decision.chosen else " "
        candidates[f"{mark} {one.name}"] = f"{one.matched_tokens:,} cached, {cost}"
    told = {"ts": clock(decision.ts), "portions": told_portions(decision.portions), "candidates": candidates}
    first = Text.assemble((printable(decision.chosen or "nobody"), "bold"), f": {printable(reason_for(decision))}")
    return [first, *_fields(msgspec.to_builtins(decision) | told)]


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
