"""Which beginnings of a prompt a client asks to keep in the cache, for how long, and how many tokens they are.

`cache_control` on a text, a message or a tool, as Anthropic's clients send it (and others in chats): everything up to
its end. `prompt_cache_retention` "24h", as OpenAI's send it: the whole prompt. The tokens are never more than that:
where a template hides the end, or a token reaches beyond it, they are fewer.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from api.requests import ChatRequest, Message

TTL_S = {"5m": 300.0, "1h": 3600.0}
DAY_S = MAX_TTL_S = 86400.0
MAX_RETAINED = 3  # beginnings of one prompt: one for each time
MAX_TOKENS = 2**31 - 1

# Stands where the text to keep ends. It is no word's continuation, and no filter of a template changes its letters.
_SHOWN = "END_OF_THE_RETAINED_TEXT"
END = f"‡{_SHOWN}"

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]


class CacheControl(Struct, frozen=True, omit_defaults=True):
    """Keep the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl or "5m"]


class Retain(Struct, frozen=True):
    """Keep the first `tokens` of the prompt until nobody has used them for `ttl_s`."""

    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    ttl_s: Seconds


Retained: TypeAlias = Annotated[list[Retain], Meta(max_length=MAX_RETAINED)]


class Breakpoint(NamedTuple):
    """The end of a beginning to keep: a tool, a message, or a part of one."""

    ttl_s: float
    tool: int | None = None
    message: int = -1
    part: int | None = None  # None: the whole message


class Ended(NamedTuple):
    """A conversation in which something else follows after the beginning to keep."""

    messages: "list[Message]"
    tools: list[dict[str, Any]]


def breakpoints(request: "ChatRequest") -> list[Breakpoint]:
    """The last one for each time, in order, without those that a longer time covers."""
    found: dict[float, Breakpoint] = {}
    for point in _all_breakpoints(request):
        found.pop(point.ttl_s, None)
        found[point.ttl_s] = point
    points = list(found.values())
    return [point for i, point in enumerate(points) if all(after.ttl_s < point.ttl_s for after in points[i + 1 :])]


def _all_breakpoints(request: "ChatRequest") -> Iterable[Breakpoint]:
    for i, tool in enumerate(request.tools):
        if (control := _control_of(tool)) is not None:
            yield Breakpoint(control.ttl_s, tool=i)
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.cache_control is not None:
                yield Breakpoint(part.cache_control.ttl_s, message=i, part=j)
        if message.cache_control is not None:
            yield Breakpoint(message.cache_control.ttl_s, message=i)


def _control_of(tool: dict[str, Any]) -> CacheControl | None:
    given = tool.get("cache_control")
    return None if given is None else msgspec.convert(given, CacheControl)


def without_control(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as templates see it."""
    return {name: value for name, value in tool.items() if name != "cache_control"} if "cache_control" in tool else tool


def ended_at(point: Breakpoint, request: "ChatRequest") -> Ended:
    """The conversation with another end after the breakpoint, so that its text is the prompt's exactly up to there."""
    if point.tool is not None:
        other = {"type": "function", "function": {"name": _SHOWN, "description": END, "parameters": {}}}
        return Ended(request.messages, [*request.tools[: point.tool + 1], other])
    message = request.messages[point.message]
    replace = msgspec.structs.replace
    if point.part is not None:
        assert isinstance(message.content, list), "it has this part"
        *before, last = message.content[: point.part + 1]
        message = replace(message, content=[*before, replace(last, text=last.text + END)], tool_calls=None)
    elif message.tool_calls:
        call = message.tool_calls[-1]
        arguments = call.function.arguments.rstrip().removesuffix("}")
        more = f'{arguments}{"" if arguments.strip() in ("", "{") else ","}"{_SHOWN}":1}}'
        function = replace(call.function, arguments=more if arguments.strip() else f'{{"{_SHOWN}":1}}')
        message = replace(message, tool_calls=[*message.tool_calls[:-1], replace(call, function=function)])
    else:
        message = replace(message, content=message.text + END)
    return Ended([*request.messages[: point.message], message, *request.messages[point.message + 1 :]], request.tools)


def shows_end(text: str) -> bool:
    """Tell whether a template has shown the end: where it has not, nobody knows where the beginning ends."""
    return _SHOWN in text


def common_tokens(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the tokens that two prompts have in common."""
    return sum(1 for _ in takewhile(bool, map(eq, token_ids, others)))


def common_packed(packed: bytes, other: bytes) -> int:
    """The same of token ids that are packed, without a look at each."""
    same, differ = 0, min(len(packed), len(other)) // 4 + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        if packed[4 * same : 4 * middle] == other[4 * same : 4 * middle]:
            same = middle
        else:
            differ = middle
    return same


def tokens_within(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """Count the tokens, from the first, that spell the beginning of a text."""
    encoded = text.encode(errors="replace")
    if not tokenizer.joins_bytes:
        return common_tokens(token_ids, tokenizer.encode(text, add_special_tokens=False))
    token_bytes, count, end = tokenizer.token_bytes, 0, 0
    for token_id in token_ids:
        piece = token_bytes(token_id)
        if not count and piece[:1] == b" " and not encoded.startswith(b" "):
            piece = piece[1:]  # SentencePiece begins a text with a space
        if not piece or not encoded.startswith(piece, end):
            break
        count, end = count + 1, end + len(piece)
    return count


def asks_for_retention(request: "ChatRequest") -> bool:
    return request.prompt_cache_retention == "24h" or bool(breakpoints(request))


def retained(request: "ChatRequest", prompt_tokens: int, tokens_before: Callable[[Breakpoint], int]) -> list[Retain]:
    """What a request asks to keep; the beginnings in order, each longer than the one before."""
    kept: list[Retain] = []
    for point in breakpoints(request):
        tokens = tokens_before(point)
        if tokens and (not kept or tokens > kept[-1].tokens):
            kept.append(Retain(tokens, point.ttl_s))
    return [Retain(prompt_tokens, DAY_S)] if request.prompt_cache_retention == "24h" else kept
