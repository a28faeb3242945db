"""The ends of those beginnings of a chat's prompt that its client asks to keep in the cache.

`cache_control` on a text, a message or a tool, as Anthropic's clients send it (and others in chats): everything up to
its end. `prompt_cache_retention` "24h", as OpenAI's send it: the whole prompt.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from api.openai.requests import ChatRequest, Message
from api.retention import DAY_S, END, SHOWN, Breakpoint, CacheControl, Retain


class Ended(NamedTuple):
    """A conversation in which something else follows after the beginning to keep."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def breakpoints(request: ChatRequest) -> list[Breakpoint]:
    """The last one for each time, in order, without those that a longer time covers."""
    found: dict[float, Breakpoint] = {}
    every: list[Breakpoint] = []
    for i, tool in enumerate(request.tools):
        given = tool.get("cache_control")
        if (control := (None if given is None else msgspec.convert(given, CacheControl))) is not None:
            every.append(Breakpoint(control.ttl_s, tool=i))
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.cache_control is not None:
                every.append(Breakpoint(part.cache_control.ttl_s, message=i, part=j))
        if message.cache_control is not None:
            every.append(Breakpoint(message.cache_control.ttl_s, message=i))
    for point in every:
        found.pop(point.ttl_s, None)
        found[point.ttl_s] = point
    points = list(found.values())
    return [point for i, point in enumerate(points) if all(after.ttl_s < point.ttl_s for after in points[i + 1 :])]


def without_control(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as templates see it."""
    return {name: value for name, value in tool.items() if name != "cache_control"} if "cache_control" in tool else tool


def ended_at(point: Breakpoint, request: ChatRequest) -> Ended:
    """The conversation with another end after the breakpoint, so that its text is the prompt's exactly up to there."""
    if point.tool is not None:
        other = {"type": "function", "function": {"name": SHOWN, "description": END, "parameters": {}}}
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
        more = f'{arguments}{"" if arguments.strip() in ("", "{") else ","}"{SHOWN}":1}}'
        function = replace(call.function, arguments=more if arguments.strip() else f'{{"{SHOWN}":1}}')
        message = replace(message, tool_calls=[*message.tool_calls[:-1], replace(call, function=function)])
    else:
        message = replace(message, content=message.text + END)
    return Ended([*request.messages[: point.message], message, *request.messages[point.message + 1 :]], request.tools)


def asks_for_retention(request: ChatRequest) -> bool:
    return request.prompt_cache_retention == "24h" or bool(breakpoints(request))


def retained(request: ChatRequest, prompt_tokens: int, tokens_before: Callable[[Breakpoint], int]) -> list[Retain]:
    """The beginnings that a request asks to keep, in order, each longer than the one before."""
    kept: list[Retain] = []
    for point in breakpoints(request):
        tokens = tokens_before(point)
        if tokens and (not kept or tokens > kept[-1].tokens):
            kept.append(Retain(tokens, point.ttl_s))
    return [Retain(prompt_tokens, DAY_S)] if request.prompt_cache_retention == "24h" else kept
