"""Requests of the Responses API as chat requests."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from api.errors import invalid, quoted
from api.openai.requests import ChatRequest
from api.openai_responses.requests import Item, NamedChoice, Part, ResponsesRequest
from api.openai_responses.tools import ShownTool, arguments_of, shown_name, shown_tools
from api.reading import converted

Fields: TypeAlias = dict[str, Any]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "seed", "ignore_eos", "min_tokens"),
    *("cache_salt", "prompt_cache_key", "prompt_cache_retention", "user", "chat_template_kwargs"),
)
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})


def chat_of(request: ResponsesRequest) -> ChatRequest:
    made: list[Fields] = []
    if request.instructions:
        made.append({"role": "system", "content": request.instructions})
    begun = len(made)
    for i, item in enumerate((*(request.previous_items or ()), *request.items)):
        earlier = len(request.previous_items or ())
        _add_item(item, made, begun, f"input[{i - earlier}]" if i >= earlier else f"previous_items[{i}]")
    fields: Fields = {"model": request.model, "messages": made, "stream": request.stream}
    fields |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    shown = list(shown_tools(request.tools or ()))
    if shown:
        fields["tools"] = [tool.function for tool in shown]
    if shown or request.tool_choice not in (None, "none", "auto"):
        fields["tool_choice"] = _choice(request.tool_choice, shown)
    if request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    form = None if request.text is None else request.text.format
    if form is not None and form.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif form is not None and form.type != "text":
        schema: Fields = {"name": form.name or "output", "schema": form.schema or {}}
        if form.strict is not None:
            schema["strict"] = form.strict
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return converted(fields, ChatRequest)


def _add_item(item: Item, made: list[Fields], begun: int, where: str) -> None:
    """Add an item; one of the assistant's that follows another becomes a part of the same message."""
    last = made[-1] if len(made) > begun and made[-1]["role"] == "assistant" else None
    match item:
        case Item(type="message", role=str() as role):
            text = _text(item.content, f"{where}.content")
            if role == "assistant":
                _continue(last, "content", text, made)
            else:
                made.append({"role": role, "content": text})
        case Item(type="function_call", call_id=str() as id, name=str() as name, arguments=str() as arguments):
            _add_call(last, id, shown_name(name, item.namespace), arguments, made)
        case Item(type="custom_tool_call", call_id=str() as id, name=str() as name, input=str() as text):
            _add_call(last, id, shown_name(name, item.namespace), arguments_of(text), made)
        case Item(type="function_call_output" | "custom_tool_call_output", call_id=str() as id):
            made.append({"role": "tool", "tool_call_id": id, "content": _text(item.output, f"{where}.output")})
        case Item(type="reasoning"):
            thoughts = _text(item.content or item.summary, f"{where}.content")
            if thoughts:  # encrypted ones cannot be read
                _continue(last, "reasoning_content", thoughts, made)
        case _:
            known = "a message with a role, a call of a function or custom tool, its output, or reasoning"
            raise invalid(f"{where} is of type {quoted(item.type)} or lacks a field; send {known}", where)


def _add_call(last: Fields | None, id: str, name: str, arguments: str, made: list[Fields]) -> None:
    if last is None:
        last = {"role": "assistant"}
        made.append(last)
    function = {"name": name, "arguments": arguments}
    last.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})


def _continue(last: Fields | None, name: str, text: str, made: list[Fields]) -> None:
    if last is not None and name not in last and "tool_calls" not in last:
        last[name] = text
    else:
        made.append({"role": "assistant", name: text})


def _text(content: str | Sequence[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in _TEXTS:
            message = f"{where}[{i}] is of type {quoted(part.type)}; the models served here read text only"
            raise invalid(message, f"{where}[{i}]", "unsupported")
    return "\n".join(part.text for part in content if part.text)


def _choice(choice: str | NamedChoice | None, shown: Sequence[ShownTool]) -> Any:
    """The chat's choice; a name is that of a tool, in its namespace or with it."""
    if not isinstance(choice, NamedChoice):
        return choice
    names = {tool.called.name: tool.shown_name for tool in reversed(shown)}
    names |= {tool.shown_name: tool.shown_name for tool in shown}
    if choice.type == "allowed_tools":
        tools = [_function(names.get(tool.name, tool.name)) for tool in choice.tools or ()]
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if choice.name is None:
        raise invalid("tool_choice names no function; give it a name", "tool_choice.name")
    return _function(names.get(choice.name, choice.name))


def _function(name: str) -> Fields:
    return {"type": "function", "function": {"name": name}}
