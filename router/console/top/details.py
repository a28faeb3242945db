"""Details of one row, as lines: every field as the router's API names it."""

import textwrap
from collections.abc import Mapping
from typing import Any

import msgspec

from events.tool.words import printable
from router.console.explain import told_portions
from router.console.formatting import count, duration
from router.console.table import Line
from router.console.top.tables import DIM, STYLES, Row, clock, reason_for, reason_of, saved_tokens, state_of, text_of
from router.prompts.prefixes.tree import Prefix
from router.responses import DecisionRecord, ReplicaStatus

LABEL = 26


def details_of(row: Row[Any], width: int) -> list[Line]:
    fields: dict[str, Any] = msgspec.to_builtins(row.of)
    match row.of:
        case ReplicaStatus() as replica:
            reason, state = printable(reason_of(replica)), state_of(replica)
            first = [(printable(replica.name), "bold"), ("  ", ""), (state, STYLES.get(state, ""))]
            first.append((f": {reason}" if reason else "", ""))
            return [first, *_fields(fields)]
        case DecisionRecord() as decision:
            first = [(printable(decision.chosen or "nobody"), "bold"), (f": {printable(reason_for(decision))}", "")]
            candidates = {}  # the cached tokens and the cost of each, the cheapest first
            by_cost = sorted(decision.candidates, key=lambda one: (one.cost_s is None, one.cost_s, one.name))
            for one in by_cost:
                cost = "ineligible" if one.cost_s is None else duration(one.cost_s)
                name = f"{'>' if one.name == decision.chosen else ' '} {one.name}"
                candidates[name] = f"{one.matched_tokens:,} cached, {cost}"
            told = {"ts": clock(decision.ts), "portions": told_portions(decision.portions), "candidates": candidates}
            return [first, *_fields(fields | told)]
    return _prefix_lines(row, fields, width)


def _prefix_lines(row: Row[Prefix], fields: dict[str, Any], width: int) -> list[Line]:
    prefix = row.of
    fields = fields | {"saved_tokens": saved_tokens(prefix), "below": len(prefix.below), "text": None}
    title = f"Tokens {prefix.begin:,} to {prefix.begin + prefix.tokens:,} of {count(prefix.prompts, 'prompt')}"
    lines: list[Line] = [[(title, "bold")], *_fields(fields), []]
    if prefix.text is None:
        return [*lines, [("Texts are not kept; start the router with --show-prompts to see them.", DIM)]]
    lines.append([("text", "bold")])
    for run in (*row.above, prefix):  # runs from the prompt's start, each at its token number
        style, place = "" if run is prefix else DIM, f"{run.begin:,}"
        for part in textwrap.wrap(text_of(run), max(20, width - 12)) or [""]:
            lines.append([(f"{place:>9}  {part}", style)])
            place = ""
    return lines


def _fields(fields: Mapping[str, Any]) -> list[Line]:
    """A line for each field that is not empty; those of nested objects come last, below their name."""
    lines: list[Line] = [
        [(f"  {printable(name):<{LABEL}}", DIM), (printable(_shown(name, value)), "")]
        for name, value in fields.items()
        if not isinstance(value, dict) and value not in (None, "", [])
    ]
    for name, value in fields.items():
        if isinstance(value, dict) and (nested := _fields(value)):
            lines += [[], [(name, "bold")], *nested]
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
