"""Chooses the parser of an answer, from the request and the model's formats."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

from api.openai.constraint_fields import NamedTool
from api.openai.requests import ChatRequest
from api.parsing.calls import CallParser
from api.parsing.formats import CALL_PARSERS, AnswerFormats
from api.parsing.json_calls import RequiredCallsParser
from api.parsing.parsed import AnswerParser, CallDelta, Parsed
from api.parsing.reasoning import ReasoningParser

MISTRAL_ID = 9  # characters; its templates refuse other lengths
ID_DIGITS = 24


class _Calls(Protocol):
    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]: ...
    def finish(self) -> tuple[str, tuple[CallDelta, ...]]: ...


class _Answer:
    def __init__(self, reasoning: ReasoningParser | None, calls: _Calls | None, include_reasoning: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._include_reasoning = include_reasoning

    def feed(self, text: str) -> Parsed:
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
        content, calls = (text, ()) if self._calls is None or not text else self._calls.feed(text)
        return Parsed(thought if self._include_reasoning else "", content, calls)

    def finish(self) -> Parsed:
        thought, rest = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return Parsed(thought if self._include_reasoning else "", rest)
        content, calls = self._calls.feed(rest)
        more, more_calls = self._calls.finish()
        return Parsed(thought if self._include_reasoning else "", content + more, calls + more_calls)


class _NamedCall:
    """An answer that is the arguments of one call, as `tool_choice` named its function."""

    def __init__(self, new_id: Callable[[int], str], name: str) -> None:
        self._id = new_id(0)
        self._name: str | None = name

    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        if self._name is not None:
            text = text.lstrip()
        if not text:
            return "", ()
        name, self._name = self._name, None
        return "", (CallDelta(0, self._id, name, text),)

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        return "", ()


def answer_parser(
    request: ChatRequest,
    formats: AnswerFormats,
    answer_id: str,
    choice_index: int,
    *,
    prompt_end: str = "",
    constrained: bool = False,
) -> AnswerParser | None:
    """Return the parser of one choice; None: its text is the content.

    `prompt_end` is the text of the prompt's last tokens: it may begin the reasoning. A constrained answer has its form
    from its first token on, so there is no reasoning, and no call but those that the form is made of.
    """
    new_id = partial(call_id, answer_id, choice_index, mistral=formats.tools == "mistral")
    forced = is_forced(request)
    calls = _call_parser(request, formats, new_id) if forced or not constrained else None
    reasoning = None
    if formats.reasoning is not None and not (forced or constrained):
        # Tell whether the prompt ends within reasoning.
        markers = formats.reasoning
        if request.continue_final_message:
            continued = request.messages[-1].text
            opened = continued.rfind(markers.begin) > continued.rfind(markers.end)
        else:
            opened = prompt_end.rstrip().endswith(markers.begin)
        marker = calls.markers[0] if isinstance(calls, CallParser) and calls.markers else ""
        reasoning = ReasoningParser(formats.reasoning, opened=opened, call=marker)
    return None if calls is None and reasoning is None else _Answer(reasoning, calls, request.include_reasoning)


def parsed_tokens(request: ChatRequest, formats: AnswerFormats) -> frozenset[int]:
    """Return the special tokens that the parser of this request has to see, although its client does not."""
    if is_forced(request):
        return frozenset()
    return formats.reasoning_tokens | (formats.tool_tokens if may_call(request) else frozenset())


def is_forced(request: ChatRequest) -> bool:
    choice = request.tool_choice
    return choice.is_forced if isinstance(choice, NamedTool) else choice == "required"


def may_call(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none" and not is_forced(request)


def named_function(request: ChatRequest) -> str | None:
    choice = request.tool_choice
    return choice.names[0] if isinstance(choice, NamedTool) and choice.type == "function" else None


def call_id(answer_id: str, choice_index: int, call_index: int, *, mistral: bool = False) -> str:
    """Return a call's id, the same on every replica that works on the answer."""
    digest = hashlib.sha256(f"{answer_id}/{choice_index}/{call_index}".encode()).hexdigest()
    return digest[:MISTRAL_ID] if mistral else f"call_{digest[:ID_DIGITS]}"


def _call_parser(
    request: ChatRequest, formats: AnswerFormats, new_id: Callable[[int], str]
) -> CallParser | _NamedCall | None:
    most = None if request.parallel_tool_calls else 1
    if (name := named_function(request)) is not None:
        return _NamedCall(new_id, name)
    if is_forced(request):
        return RequiredCallsParser(new_id, most=most)
    if formats.tools is None or not may_call(request):
        return None
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools}
    if isinstance(request.tool_choice, NamedTool):
        functions = {name: functions.get(name, {}) for name in request.tool_choice.names}
    return CALL_PARSERS[formats.tools](new_id, functions, most)
