"""Requests of Anthropic's Messages API and OpenAI's Responses API as the chats that vLLM makes of them (0.33.0).

Each function returns the fields of a chat request. What vLLM would refuse or fetch raises ApiError with the field's
name.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from api.errors import ApiError, invalid
from api.prompts.billing import BILLING_HEADER
from api.reading import read

DISABLED = "disabled"  # stands for the effort without thinking, which the template decides


class _Shared(Struct, kw_only=True):
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    mm_processor_kwargs: Any = None


def _refuse(what: str, param: str) -> ApiError:
    return invalid(f"{what}, whose tokens are not known here", param)


# ---- Messages


class Messages(_Shared, kw_only=True):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def of_messages(body: bytes) -> dict[str, Any]:
    asked = read(body, Messages)
    made: list[dict[str, Any]] = []
    system = [asked.system] if isinstance(asked.system, str) else _system_texts(asked.system or ())
    if any(system):
        made.append({"role": "system", "content": "".join(system)})
    for message in asked.messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":  # the engine moves it, as the template allows
            raise _refuse("a message of the system is among the others", "messages")
        seen: dict[str, Any] = {"role": role}
        if isinstance(content, str):
            seen["content"] = content
        elif isinstance(content, list):
            _add_blocks(content, str(role), seen, made)
        else:
            raise _refuse("a message has no content", "messages")
        if role != "user" or "content" in seen:
            made.append(seen)
    fields: dict[str, Any] = {"messages": made, **_passed_on(asked)}
    if asked.tools is not None:
        fields["tools"] = [_tool(tool) for tool in asked.tools]
        fields["tool_choice"] = "none" if (asked.tool_choice or {}).get("type") == "none" else "auto"
    output = asked.output_config or {}
    if output.get("format"):
        fields["response_format"] = {"type": "json_schema"}
    effort = DISABLED if (asked.thinking or {}).get("type") == "disabled" else output.get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def _passed_on(asked: _Shared) -> dict[str, Any]:
    names = ("chat_template_kwargs", "kv_transfer_params", "mm_processor_kwargs")
    return {name: value for name in names if (value := getattr(asked, name)) is not None}


def _system_texts(blocks: Sequence[dict[str, Any]]) -> list[str]:
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(BILLING_HEADER)]


def _add_blocks(blocks: list[Any], role: str, seen: dict[str, Any], made: list[dict[str, Any]]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                if text:
                    parts.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking" | "tool_reference"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name)}:
                arguments = json.dumps(block.get("input") or {})
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result"} if role == "user":
                made.append(_tool_result(block))
            case _:
                kind = block.get("type") if isinstance(block, dict) else None
                raise _refuse(f"a message has a block of type {str(kind)[:40]!r}", "messages")
    if thoughts:
        seen["reasoning"] = "".join(thoughts)
    if calls:
        seen["tool_calls"] = calls
    if len(parts) == 1:
        seen["content"] = parts[0]["text"]
    elif parts:
        seen["content"] = parts


def _tool_result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        texts = [
            item.get("text", "") if isinstance(item, dict) and item.get("type") == "text" else None for item in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise _refuse("a tool's result is more than text", "messages")
        content = "\n".join(map(str, texts))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise _refuse("a tool has no input_schema", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function["parameters"] = schema if "type" in schema else schema | {"type": "object"}
    more = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function | more}


# ---- Responses


class Responses(_Shared, kw_only=True):
    input: str | list[Any]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = "disabled"
    text: dict[str, Any] | None = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    prompt: Any = None


def of_responses(body: bytes) -> dict[str, Any]:
    asked = read(body, Responses)
    for name in ("previous_response_id", "previous_input_messages", "prompt"):
        if getattr(asked, name) is not None:
            raise _refuse(f"{name} is set", name)
    if asked.truncation != "disabled":
        raise _refuse("truncation is not disabled", "truncation")
    made = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    continued = False
    if isinstance(asked.input, str):
        made.append({"role": "user", "content": asked.input})
    else:
        begun = len(made)
        for item in asked.input:
            _add_item(item, made, begun)
        last = asked.input[-1] if asked.input else None
        continued = (
            isinstance(last, dict)
            and last.get("type", "message") in ("message", "reasoning")
            and last.get("status") in ("in_progress", "incomplete")
        )
    # vLLM adds special tokens to the text of its template here, and in no other chat.
    fields: dict[str, Any] = {"messages": made, "add_special_tokens": True, **_passed_on(asked)}
    if asked.tools:
        if others := [tool.get("type") for tool in asked.tools if tool.get("type") != "function"]:
            raise _refuse(f"a tool is of type {str(others[0])[:40]!r}", "tools")
        functions = ({name: value for name, value in tool.items() if name != "type"} for tool in asked.tools)
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
        fields["tool_choice"] = asked.tool_choice
    if continued:
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if (effort := (asked.reasoning or {}).get("effort")) is not None:
        fields["reasoning_effort"] = effort
    if (asked.text or {}).get("format") is not None:
        fields["response_format"] = {"type": "text"}
    return fields


def _add_item(item: Any, made: list[dict[str, Any]], begun: int) -> None:
    """Add an item of the input; one that continues an assistant's message becomes a part of it."""
    before = made[-1] if len(made) > begun and made[-1].get("role") == "assistant" else None
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            if item.get("namespace"):
                raise _refuse("a call has a namespace", "input")
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            if before is None:
                made.append({"role": "assistant", "tool_calls": [call]})
            else:
                before.setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(id), "output": str() | list() as output}:
            made.append({"role": "tool", "content": output, "tool_call_id": id})
        case {"type": "reasoning"}:
            _continue(before, "reasoning", _reasoning(item), made)
        case {"role": "assistant", "content": str(text)}:
            _continue(before, "content", text, made)
        case {"role": "assistant", "content": [{"text": str(text)}, *_]}:
            _continue(before, "content", text, made)
        case {"role": str()} if item.get("type", "message") == "message":
            made.append(item)
        case _:
            kind = item.get("type") if isinstance(item, dict) else None
            raise _refuse(f"the input has an item of type {str(kind)[:40]!r}", "input")


def _continue(before: dict[str, Any] | None, name: str, value: str, made: list[dict[str, Any]]) -> None:
    if before is not None and before.get(name) is None:
        before[name] = value
    else:
        made.append({"role": "assistant", name: value})


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise _refuse("the input has encrypted reasoning", "input")
    for texts in (item.get("content"), item.get("summary")):
        if isinstance(texts, list) and texts:
            text = texts[0].get("text") if isinstance(texts[0], dict) else None
            if isinstance(text, str):
                return text
    return ""


CHATS: dict[str, Callable[[bytes], dict[str, Any]]] = {"messages": of_messages, "responses": of_responses}
