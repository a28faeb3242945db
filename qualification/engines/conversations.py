"""Odd requests as clients may send them, for the fuzz of templates (`python -m qualification.engines.templates`)."""

import random
from collections.abc import Callable
from typing import Any

TEXTS = (
    *("Hi", "Say a word.", "b", "", "", " ", "\n", " a ", "a\n\nb\n"),
    *("é\u2028<b>&'😀", "e\u0301 ﬁ \u202e نص", "\t東京"),
    *("<|im_end|>", "</s>[INST] a", "<|eot_id|>", "x-anthropic-billing-header: 1", "x-anthropic-billing-header: 1\nb"),
    *("a\u0000b", "👩‍👧 12345", "{{ 1 }}", "2026-11-28", "</think> a"),
)
ROLES = (*("user",) * 12, *("assistant",) * 8, *("system",) * 3, *("developer",) * 2, "tool", "tool", "tool", "critic")
ARGUMENTS = ('{"a": 1.0, "b": [1e3, 12345678901234567890123]}', "{}", "", "nojson", "[1]", "null", '{"é": "\\u2028"}')
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"minimum": 1.0, "maximum": 10}}},
    {"properties": {}},
    {},
)
EXTRA: tuple[dict[str, Any], ...] = (
    {"cache_control": {"type": "ephemeral"}},
    {"foo": None},
    {"name": "n"},
    {"uuid": "u"},
    {"uuid": None},
    {"refusal": "no"},
    {"annotations": []},
)


class Conversations:
    """Random requests; equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._of: dict[str, Callable[[], dict[str, Any]]] = {
            "chat": self._chat,
            "completions": self._completion,
            "messages": self._messages,
            "responses": self._responses,
        }

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return an API and a request of it."""
        [api] = self._rng.choices(tuple(self._of), (10, 1, 4, 4))
        return api, {"model": "m"} | self._of[api]()

    def _may(self, share: float) -> bool:
        return self._rng.random() < share

    def _text(self) -> str:
        return self._rng.choice(TEXTS)

    # ---- chat

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        asked: dict[str, Any] = {"messages": [self._message() for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 6)))]}
        if self._may(0.6):  # most templates refuse a conversation that ends otherwise
            asked["messages"].append({"role": "user", "content": self._content()})
        if self._may(0.2):
            asked["tools"] = [self._tool() for _ in range(rng.choice((1, 1, 2, 0)))]
        options: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("tool_choice", ("none", "auto", None)),
            ("reasoning_effort", ("high", "none", "low", None)),
            ("documents", ([{"title": "a", "text": self._text()}], [], None)),
            ("add_generation_prompt", (False, True, None)),
            ("continue_final_message", (True, False)),
            ("add_special_tokens", (True, False)),
            ("response_format", ({"type": "json_object"}, {"type": "text"}, None)),
            ("chat_template_kwargs", (self._arguments(),)),
            ("n", (1, 2)),
            ("include_reasoning", (False,)),
            ("foo", (1,)),
        )
        asked |= {name: rng.choice(values) for name, values in options if self._may(0.08)}
        if asked.get("continue_final_message"):
            asked.setdefault("add_generation_prompt", False)
        return asked

    def _arguments(self) -> dict[str, Any]:
        names = ("enable_thinking", "reasoning_effort", "custom_tools", "date_string", "notes", "tools_in_user_message")
        values = (True, False, None, "auto", "a", 1, [1, {"a": None}], self._text())
        return {name: self._rng.choice(values) for name in self._rng.sample(names, self._rng.choice((0, 1, 2)))}

    def _message(self) -> dict[str, Any]:
        rng, role = self._rng, self._rng.choice(ROLES)
        made: dict[str, Any] = {"role": role}
        if not self._may(0.05):
            made["content"] = self._content()
        if role == "assistant" and self._may(0.25):
            made["tool_calls"] = rng.choice(([], None, *([self._call() for _ in range(rng.choice((1, 1, 2)))],) * 4))
        if role == "tool":
            made["tool_call_id"] = rng.choice(("c1", "c2"))
        for name, values in (
            ("name", ("bob", "", None)),
            ("reasoning_content", (self._text(), None)),
            ("reasoning", (self._text(), None)),
            ("refusal", (None, "no")),
            ("task", ("a", None)),
            ("foo", (1,)),
            ("tool_call_id", ("c3",)),
        ):
            if self._may(0.06):
                made[name] = rng.choice(values)
        return made

    def _content(self) -> Any:
        kind = self._rng.random()
        if kind < 0.6:
            return self._text()
        if kind < 0.65:
            return None
        return [self._part() for _ in range(self._rng.choice((0, 1, 1, 2, 2, 3)))]

    def _part(self) -> Any:
        kind, text = self._rng.random(), self._text()
        if kind < 0.05:
            return text
        name = self._rng.choice(("text",) * 8 + ("input_text", "output_text", "refusal", "thinking", "tool_reference"))
        field = name if name in ("refusal", "thinking") else "name" if name == "tool_reference" else "text"
        part: dict[str, Any] = {"type": name, field: text}
        if self._may(0.05):
            part[field] = None
        elif self._may(0.03):
            del part[field]
        return part | (self._rng.choice(EXTRA) if self._may(0.12) else {})

    def _call(self) -> dict[str, Any]:
        function: Any = {"name": self._rng.choice(("f", "look_up")), "arguments": self._rng.choice(ARGUMENTS)}
        call: dict[str, Any] = {"id": "c1", "type": "function", "function": function}
        if self._may(0.1):
            call["extra"] = 2
        if self._may(0.1):
            function["zzz"] = 1
        return dict(self._rng.sample(list(call.items()), len(call)))

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._rng.choice(("f", "look_up"))}
        for name, values in (
            ("description", ("d", "", None, self._text())),
            ("parameters", (*SCHEMAS, None)),
            ("strict", (True, False, None)),
        ):
            if self._may(0.5):
                function[name] = self._rng.choice(values)
        return {"type": "function", "function": function} | ({"cache_control": {"type": "x"}} if self._may(0.1) else {})

    # ---- the other APIs

    def _completion(self) -> dict[str, Any]:
        prompt = self._rng.choice((self._text(), self._text() + self._text(), [5, 6, 7]))
        return {"prompt": prompt} | ({"add_special_tokens": self._may(0.5)} if self._may(0.3) else {})

    def _messages(self) -> dict[str, Any]:
        rng = self._rng
        asked: dict[str, Any] = {"max_tokens": 5, "messages": []}
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            role = rng.choice(("user", "user", "assistant", "assistant", "system"))
            asked["messages"].append({"role": role, "content": self._blocks(role)})
        if self._may(0.6):
            asked["messages"].append({"role": "user", "content": self._blocks("user")})
        if self._may(0.5):
            asked["system"] = self._text() if self._may(0.5) else [self._block("system") for _ in range(2)]
        if self._may(0.2):
            tool = {"name": "f", "input_schema": rng.choice(SCHEMAS)}
            asked["tools"] = [tool | ({"description": self._text()} if self._may(0.5) else {})]
            if self._may(0.5):
                asked["tool_choice"] = {"type": rng.choice(("auto", "none"))}
        if self._may(0.1):
            asked["thinking"] = {"type": rng.choice(("disabled", "adaptive"))}
        if self._may(0.1):
            asked["output_config"] = {"effort": rng.choice(("low", "high"))}
        return asked

    def _blocks(self, role: str) -> Any:
        if self._may(0.5):
            return self._text()
        return [self._block(role) for _ in range(self._rng.choice((0, 1, 1, 2, 3)))]

    def _block(self, role: str) -> dict[str, Any]:
        text = {"type": "text", "text": self._text()} | (
            {"cache_control": {"type": "ephemeral"}} if self._may(0.1) else {}
        )
        if role == "assistant":
            thinking = {"type": "thinking", "thinking": self._text(), "signature": "s"}
            call = {"type": "tool_use", "id": "c1", "name": "f", "input": self._rng.choice(({}, {"a": 1.0}))}
            return self._rng.choice((text, text, thinking, call, {"type": "redacted_thinking", "data": "x"}))
        if role == "user":
            content = self._rng.choice((self._text(), [], [text, text], [{"type": "text", "text": ""}]))
            result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
            return self._rng.choice((text, text, text, result))
        return text

    def _responses(self) -> dict[str, Any]:
        rng = self._rng
        asked: dict[str, Any] = {"input": self._text()}
        if self._may(0.8):
            asked["input"] = [self._item() for _ in range(rng.choice((1, 1, 2, 3, 5)))]
            if self._may(0.6):
                asked["input"].append({"role": "user", "content": self._text()})
        if self._may(0.4):
            asked["instructions"] = self._text()
        if self._may(0.2):
            tool = {"type": "function", "name": "f", "parameters": rng.choice(SCHEMAS)}
            asked["tools"] = [tool | rng.choice(({}, {"strict": True}, {"description": self._text()}))]
            if self._may(0.5):
                asked["tool_choice"] = rng.choice(("none", "auto"))
        if self._may(0.1):
            asked["reasoning"] = {"effort": rng.choice(("low", "none"))}
        if self._may(0.05):
            asked["chat_template_kwargs"] = self._arguments()
        return asked

    def _item(self) -> dict[str, Any]:
        rng = self._rng
        role = rng.choice(("user", "user", "assistant", "assistant", "system", "developer"))
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": self._text()} for _ in range(rng.choice((1, 1, 2)))]
        message: dict[str, Any] = {"role": role, "content": parts if self._may(0.5) else self._text()}
        if self._may(0.3):
            message["type"] = "message"
        if role == "assistant" and self._may(0.2):
            message |= {"type": "message", "id": "msg_1", "status": rng.choice(("completed", "in_progress"))}
            message["content"] = [part | {"annotations": []} for part in parts]
        call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": rng.choice(ARGUMENTS)}
        output: Any = {"type": "function_call_output", "call_id": "c1", "output": self._text()}
        texts = [{"type": "reasoning_text", "text": self._text()}]
        thought: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "content": texts}
        summed: Any = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": self._text()}]}
        return rng.choice((message, message, message, message, call, output, thought, summed))
