"""Tools that change from request to request, or only their order; `cache_salt`s that only one request has."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.prompts import Piece, Prompt
from lab.analysis.breaks.texts import Example

ORDER = Fault(
    "tools in another order",
    "List the tools in one order every time, for example sorted by name.",
)
CHANGE = Fault(
    "tools that change",
    "Give every request of an application all of its tools, and say in the last message which to use.",
)
SALT = Fault(
    "a cache_salt for each request",
    "Give one cache_salt to all requests that may share, for example one for each tenant, or none.",
)
SHOWN = 8  # letters: a salt is a secret of a kind

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


def without_lone_salts(prompts: Sequence[Prompt]) -> list[Prompt]:
    lone = _lone(prompts)
    return [prompt._replace(salt=None) if prompt.salt in lone else prompt for prompt in prompts]


def salts_example(one: Prompt, other: Prompt) -> Example:
    return Example("cache_salt ", _shown(one), _shown(other))


def _lone(prompts: Sequence[Prompt]) -> set[str | None]:
    """Salts of one request; a single such salt parts nothing."""
    users = {(prompt.salt, prompt.request_id) for prompt in prompts if prompt.salt is not None}
    lone: set[str | None] = {salt for salt, count in Counter(salt for salt, _ in users).items() if count == 1}
    return lone if len(lone) > 1 else set()


def _shown(prompt: Prompt) -> str:
    salt = prompt.salt or ""
    return salt[:SHOWN] + "..." * (len(salt) > SHOWN)
