"""Prompts as SGLang builds them (read in 0.5.23, and held against it; docs/engines.md lists the checks).

Whatever is read and cannot be reproduced raises ApiError with the field's name: the engine is asked for such a prompt.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from api.errors import invalid
from api.prompts.templates import ChatTemplate
from api.reading import read
from engines.prompts.asked import Asked, Question
from engines.prompts.content_format import loops_over_content
from engines.prompts.vllm import ChatFields, Vllm
from engines.prompts.vllm_tools import described_calls, described_tools

CHANGING = frozenset(("reasoning", "thinking", "task", "input_ids", "lora_path", "extra_key"))
UNSEEN = ("add_generation_prompt", "prompt", "add_special_tokens")  # chats ignore these fields, and /tokenize does not
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")  # others are rewritten

_decode = msgspec.json.Decoder(dict[str, Raw]).decode


class _Message(Struct):
    """The fields of a message in the order in which a template sees them."""

    role: Literal["system", "user", "assistant", "tool", "function", "developer", "latest_reminder", "root"]
    content: str | list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    phase: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    tools: Any = None
    prefix: bool | None = None


class _Chat(ChatFields, kw_only=True):
    messages: list[_Message]  # type: ignore[assignment]


class Sglang(Vllm):
    """The engine's reading of requests to one model; it differs from vLLM's in chats."""

    name = "sglang"

    def read(self, api: str, body: bytes, max_model_len: int | None = None) -> Asked:
        if api == "completions":
            return super().read(api, body, max_model_len)
        if api != "chat":
            raise invalid(f"how its engine makes a chat of a request to /v1/{api} is not known here", "messages")
        asked = read(body, _Chat)
        if changing := CHANGING & _decode(body).keys():
            raise invalid(f"{min(changing)} is set, which changes the prompt", min(changing))
        if isinstance(asked.tool_choice, dict):
            raise invalid("tool_choice names one of the tools", "tool_choice")
        if not asked.tools or asked.tool_choice == "none":
            asked.tools = None
        if asked.continue_final_message and asked.messages and asked.messages[-1].role == "assistant":
            raise invalid("the last message is encoded apart from the others", "continue_final_message")
        asked.add_generation_prompt = asked.continue_final_message = asked.add_special_tokens = None
        asked.documents = asked.chat_template = None
        return self.chat(api, asked, max_model_len)

    def tokenized(self, api: str, body: bytes) -> Question | None:
        return tokenized(api, body)

    def wants_parts(self, template: ChatTemplate) -> bool:
        about_media = any(word in template.source for word in ("image", "audio", "video", "vision"))
        return about_media or loops_over_content(template.parsed(), {"message", "msg", "m"})

    def tools_shown(self, tools: list[Any] | None) -> tuple[list[dict[str, Any]], list[str] | None]:
        """The tools with their fields in the client's order, and those that it has not given as null behind them."""
        made, kinds = described_tools(tools)
        for shown, tool in zip(made, tools or (), strict=True):
            function, given = shown["function"], tool["function"]
            if None in given.values() or not is_standard(function["parameters"]):
                raise invalid("a tool has null for a field, or a type that is none of JSON Schema's", "tools")
            order = [name for name in given if name in function]
            shown["function"] = {name: function[name] for name in (*order, *function)}
            shown.setdefault("defer_loading", None)
        return made, kinds

    def _messages(
        self, messages: Sequence[Any], *, with_tools: bool, checked: bool
    ) -> tuple[list[dict[str, Any]], list[str]]:
        seen: list[dict[str, Any]] = []
        turns: list[str] = []
        for message in messages:
            role, content, kinds = message.role, message.content, list[str]()
            made = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
            if role == "user":
                made = {"role": role, "content": content}
            misplaced = content is None if role == "user" else role != "assistant" and message.tool_calls is not None
            if misplaced or message.tools is not None:
                raise invalid("a message has tools, calls of another than the assistant, or no content", "messages")
            if content is None:
                made = {"role": role, "content": "", **made}
                kinds.append("nothing")
            elif isinstance(content, list):
                texts = [part.get("text") for part in content if part.get("type") == "text"]
                if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
                    raise invalid("a message has a part that is no text", "messages")
                if parts := self._takes_parts[with_tools]:
                    del made["content"]  # a list comes last
                in_parts = parts and role != "tool"
                made["content"] = [{"type": "text", "text": text} for text in texts] if in_parts else " ".join(texts)
                kinds.append("parts" if len(texts) > 1 else "part" if texts else "empty")
            if "tool_calls" in made:
                made["tool_calls"] = [
                    {"id": call["id"], "index": None, "type": "function", "function": call["function"]}
                    for call in described_calls(message.tool_calls, kinds, not checked)
                ]
            seen.append(made)
            kinds += sorted(made.keys() - {"role", "content"})
            turns.append(f"{role}({' '.join(kinds)})" if kinds else role)
        if seen and seen[-1]["role"] == "assistant" and isinstance(last := seen[-1]["content"], str):
            seen[-1] = {"role": "user", "content": last}
        return seen, turns

    def _arguments(self, asked: ChatFields) -> dict[str, Any]:
        given = dict(self._checked(asked.chat_template_kwargs or {}))
        if given.get("reasoning_effort", "") is None:
            del given["reasoning_effort"]
        if (effort := asked.reasoning_effort) is not None:
            thinks = dict.fromkeys(("thinking", "enable_thinking"), effort != "none")
            given = {"reasoning_effort": effort, **thinks, **given}
        return given


def tokenized(api: str, body: bytes) -> Question | None:
    """The question for `POST /tokenize`, which sees all fields of a chat."""
    fields = _decode(body)
    if api == "completions":
        prompt = msgspec.json.decode(fields["prompt"])
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        asked = {"model": fields.get("model"), "prompt": prompt}
        return Question(msgspec.json.encode(asked)) if isinstance(prompt, str) else None
    if api != "chat":
        return None
    return Question(msgspec.json.encode({name: value for name, value in fields.items() if name not in UNSEEN}))


def is_standard(schema: Any) -> bool:
    """Return whether no type is one of a database or the like, which the engine rewrites."""
    left = [schema]
    for value in left:  # which grows
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [value["type"] for value in left if isinstance(value, dict) and isinstance(value.get("type"), str | list)]
    named = [one if isinstance(one, list) else [one] for one in found]
    return all(len(set(map(str, each))) == len(each) and all(one in TYPES for one in each) for each in named)
