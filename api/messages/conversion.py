"""Requests of the Messages API as chat requests."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
from msgspec import to_builtins

from api.errors import invalid, quoted
from api.messages import requests
from api.openai.requests import ChatRequest, TextPart
from api.prompts.billing import BILLING_HEADER
from api.reading import converted
from api.retention import CacheControl

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "min_tokens", "cache_salt", "prompt_cache_key")

Fields: TypeAlias = dict[str, Any]
encode_json = msgspec.json.Encoder().encode


def chat_of(request: requests.MessagesRequest) -> ChatRequest:
    fields = chat_fields(request)
    fields |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    return converted(fields | {"max_tokens": request.max_tokens, "stream": request.stream}, ChatRequest)


def counted_chat_of(request: requests.Conversation) -> ChatRequest:
    return converted(chat_fields(request), ChatRequest)


def chat_fields(request: requests.Conversation) -> Fields:
    """The fields of the chat request that decide on its prompt."""
    made: list[Fields] = []
    system = [TextPart("text", request.system)] if isinstance(request.system, str) else request.system or ()
    kept = [block for block in system if block.text and not block.text.startswith(BILLING_HEADER)]
    if len(kept) > 1 and any(block.cache_control is not None for block in kept):
        made.append({"role": "system", "content": [_part(block.text, block.cache_control) for block in kept]})
    elif kept:
        text = "\n".join(block.text for block in kept)
        made.append({"role": "system", "content": text} | _control(kept[-1].cache_control))
    for i, message in enumerate(request.messages):
        made += _messages(message, f"messages[{i}]")
    if made and request.cache_control is not None:
        made[-1] |= _control(request.cache_control)
    fields: Fields = {"model": request.model, "messages": made}
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
        if request.tool_choice is not None:
            choice: Any = {"type": "function", "function": {"name": request.tool_choice.name}}
            kinds = {"any": "required", "tool": choice}
            fields["tool_choice"] = kinds.get(request.tool_choice.type, request.tool_choice.type)
            fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    # The answer goes on with the last message if that is the assistant's and has text.
    is_begun = request.messages[-1].role == "assistant" and made and made[-1].get("content")
    if is_begun and "tool_calls" not in made[-1]:
        fields["continue_final_message"] = True
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        kwargs = {"enable_thinking": thinks, "thinking": thinks} | kwargs  # the names that templates know it by
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    config = request.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _part(text: str, control: CacheControl | None) -> Fields:
    return {"type": "text", "text": text} | _control(control)


def _control(control: CacheControl | None) -> Fields:
    return {} if control is None else {"cache_control": to_builtins(control)}


def _messages(message: requests.Turn, where: str) -> Iterator[Fields]:
    """The chat's messages for one of these: results of tools become messages of their own, and come first."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    for i, block in enumerate(message.content):
        at = f"{where}.content[{i}]"
        is_users = isinstance(block, requests.ToolResultBlock | requests.ImageBlock | requests.DocumentBlock)
        is_anyones = isinstance(block, requests.TextBlock)
        if not is_anyones and (message.role == "system" or is_users != (message.role == "user")):
            role, tag = quoted(message.role), quoted(type(block).__struct_config__.tag)
            raise invalid(f"{at} is of type {tag}; a message of the role {role} cannot have it", at)
        if isinstance(block, requests.ToolResultBlock):
            content = block.content
            if isinstance(content, list):
                content = "\n".join(_text(part, f"{at}.content[{j}]") for j, part in enumerate(content))
            result: Fields = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""}
            yield result | _control(block.cache_control)
    made = _message(message, where)
    if made.keys() != {"role"} or message.role == "assistant":
        yield made


def _message(message: requests.Turn, where: str) -> Fields:
    made: Fields = {"role": message.role}
    parts: list[Fields] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for i, block in enumerate(message.content):
        match block:
            case requests.ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case requests.ToolUseBlock():
                function = {"name": block.name, "arguments": encode_json(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case requests.TextBlock() | requests.ImageBlock() | requests.DocumentBlock():
                if text := _text(block, f"{where}.content[{i}]"):
                    control = block.cache_control if not isinstance(block, requests.ImageBlock) else None
                    # A result further on comes before this part in the chat: the control would count for that, too.
                    later = message.content[i + 1 :]
                    is_before_result = any(isinstance(each, requests.ToolResultBlock) for each in later)
                    parts.append(_part(text, None if is_before_result else control))
            case requests.ToolResultBlock() | requests.RedactedThinkingBlock():
                pass
    if len(parts) == 1 and not (calls and "cache_control" in parts[0]):
        [part] = parts
        made |= {name: value for name, value in part.items() if name == "cache_control"} | {"content": part["text"]}
    elif parts:
        made["content"] = parts
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
        last = message.content[-1]
        if isinstance(last, requests.ToolUseBlock):
            made |= _control(last.cache_control)
    return made


def _text(block: requests.ResultBlock | requests.Block, where: str) -> str:
    match block:
        case requests.TextBlock(text=text):
            return text
        case requests.DocumentBlock(source=requests.Source(type="text", data=str() as data), title=title):
            return f"{title}\n{data}" if title else data
    kind = "an image" if isinstance(block, requests.ImageBlock) else "a document other than plain text"
    raise invalid(f"{where} is {kind}; the models served here read text only", where, "unsupported")


def _tool(tool: requests.ClientTool) -> Fields:
    schema = tool.input_schema or {}
    function: Fields = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = schema if "type" in schema else {"type": "object"} | schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function} | _control(tool.cache_control)
