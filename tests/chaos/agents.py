"""A coding agent's conversation in each API: many tools, a call or a text each turn, and what its prompts found cached.

The model's tokens follow from the prompt and the seed, so the conversation is the same in every API.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from tests.replica.serving import MODEL, Replica

TOOLS = 20
TURNS = 30
TEXT_EVERY = 5  # turns; all others are calls
ANSWER_TOKENS = 400
Fields: TypeAlias = dict[str, Any]


class Turn(NamedTuple):
    """One request of the agent, and what the engine said about its prompt."""

    prompt_tokens: int
    cached_tokens: int
    said: str  # the text, or the name and the arguments of the call


class Heard(NamedTuple):
    turn: Turn
    history: list[Any]  # what the answer adds to the conversation
    call_id: str | None


class Agent(NamedTuple):
    """An API as its agents use it."""

    path: str
    fields: Callable[[bool], Fields]  # of every request: with a call, or with a text
    user: Callable[[str], Any]
    result: Callable[[str, str], Any]  # of a call
    history: str  # the field of the conversation
    hear: Callable[[Any], Heard]
    stored: bool = False  # by the server, which is told the newest items only


def tool(number: int) -> Fields:
    properties = {
        "path": {"type": "string", "minLength": 8, "maxLength": 24, "pattern": "^[a-z/]+$"},
        "line": {"type": "integer", "minimum": 1, "maximum": 999},
        "mode": {"enum": ["read", "write", "list"]},
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    description = f"Does what tool {number} does to a file, from a line on. " * 3
    return {"name": f"tool_{number}", "description": description, "parameters": parameters}


def converse(served: Replica, agent: Agent, salt: str) -> list[Turn]:
    """The whole conversation, in a cache of its own."""
    history: list[Any] = []
    previous: Fields = {}
    turns: list[Turn] = []
    for number in range(TURNS):
        calls = number % TEXT_EVERY != TEXT_EVERY - 1
        if not turns or number % TEXT_EVERY == 0:
            history.append(agent.user(f"Task {number}: " + "find out why the test fails, and repair it. " * 4))
        common = {"model": MODEL, "seed": number, "cache_salt": salt, agent.history: history}
        answer = served.post(agent.path, common | agent.fields(calls) | previous)
        assert answer.status == 200, answer.body
        heard = agent.hear(answer.json)
        turns.append(heard.turn)
        if agent.stored:
            previous, history = {"previous_response_id": answer.json["id"]}, []
        else:
            history += heard.history
        if heard.call_id is not None:
            history.append(agent.result(heard.call_id, f"{number} | def test(): ...\n" * 10))
    return turns


def hits(turns: list[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)


# ---- chat


def _chat_fields(calls: bool) -> Fields:
    tools = [{"type": "function", "function": tool(number)} for number in range(TOOLS)]
    choice = "required" if calls else "auto"
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": ANSWER_TOKENS}


def _hear_chat(answer: Any) -> Heard:
    usage, message = answer["usage"], answer["choices"][0]["message"]
    kept = {"role": "assistant", "content": message["content"]}
    call_id, said = None, message["content"]
    if message.get("tool_calls"):
        [call] = kept["tool_calls"] = message["tool_calls"]
        call_id, said = call["id"], _call(call["function"]["name"], call["function"]["arguments"])
    turn = Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], said)
    return Heard(turn, [kept], call_id)


def _call(name: str, arguments: str) -> str:
    return f"{name} {json.dumps(json.loads(arguments))}"


# ---- messages


def _messages_fields(calls: bool) -> Fields:
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in map(tool, range(TOOLS))
    ]
    choice = {"type": "any" if calls else "auto", "disable_parallel_tool_use": True}
    return {"tools": tools, "tool_choice": choice, "max_tokens": ANSWER_TOKENS}


def _hear_message(answer: Any) -> Heard:
    usage, [block] = answer["usage"], answer["content"]
    cached = usage["cache_read_input_tokens"]
    is_call = block["type"] == "tool_use"
    said = _call(block["name"], json.dumps(block["input"])) if is_call else block["text"]
    kept = {"role": "assistant", "content": [block]}
    return Heard(Turn(usage["input_tokens"] + cached, cached, said), [kept], block["id"] if is_call else None)


# ---- responses


def _responses_fields(calls: bool) -> Fields:
    tools = [{"type": "function", **tool(number)} for number in range(TOOLS)]
    fields = {"tools": tools, "tool_choice": "required" if calls else "auto", "parallel_tool_calls": False}
    return fields | {"max_output_tokens": ANSWER_TOKENS}


def _hear_response(answer: Any) -> Heard:
    usage, [item] = answer["usage"], answer["output"]
    is_call = item["type"] == "function_call"
    said = _call(item["name"], item["arguments"]) if is_call else item["content"][0]["text"]
    turn = Turn(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], said)
    return Heard(turn, [item], item["call_id"] if is_call else None)


_RESPONSES = Agent(
    "/v1/responses",
    _responses_fields,
    lambda text: {"role": "user", "content": text},
    lambda call, text: {"type": "function_call_output", "call_id": call, "output": text},
    "input",
    _hear_response,
)
AGENTS = {
    "chat": Agent(
        "/v1/chat/completions",
        _chat_fields,
        lambda text: {"role": "user", "content": text},
        lambda call, text: {"role": "tool", "tool_call_id": call, "content": text},
        "messages",
        _hear_chat,
    ),
    "messages": Agent(
        "/v1/messages",
        _messages_fields,
        lambda text: {"role": "user", "content": text},
        lambda call, text: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call, "content": text}],
        },
        "messages",
        _hear_message,
    ),
    "responses": _RESPONSES,
    "responses, stored": _RESPONSES._replace(stored=True),
}
