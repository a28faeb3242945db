"""Lists of tools that change from request to request, or only their order."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.prompts import Piece, Prompt

ORDER = Fault(
    "tools in another order",
    "List the tools in one order every time, for example sorted by name.",
)
CHANGE = Fault(
    "tools that change",
    "Give every request of an application all of its tools, and say in the last message which to use.",
)

Tools: TypeAlias = tuple[str, ...]


def with_one_tool_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """List each set of tools in its most frequent order."""
    orders: defaultdict[Tools, Counter[Tools]] = defaultdict(Counter)
    for prompt in prompts:
        orders[tuple(sorted(prompt.tools))][prompt.tools] += 1
    return [
        prompt._replace(tools=orders[tuple(sorted(prompt.tools))].most_common(1)[0][0]) if prompt.tools else prompt
        for prompt in prompts
    ]


def with_all_tools(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every request with tools has those of all that begin like it."""
    together: defaultdict[tuple[str, tuple[Piece, ...]], dict[str, None]] = defaultdict(dict)
    for prompt in prompts:
        together[prompt.model, prompt.leading].update(dict.fromkeys(prompt.tools))
    return [
        prompt._replace(tools=tuple(together[prompt.model, prompt.leading])) if prompt.tools else prompt
        for prompt in prompts
    ]
