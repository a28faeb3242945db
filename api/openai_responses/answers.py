"""Responses of the Responses API: the object, and the items of its output."""

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class MessageItem(Struct, kw_only=True, tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, kw_only=True, tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(Struct, kw_only=True, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCallItem(Struct, kw_only=True, tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    presence_penalty: float
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Any = None
    safety_identifier: None = None
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float
    text: Any
    tool_choice: Any
    tools: list[Any]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
