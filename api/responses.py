"""The responses, in OpenAI's shapes with vLLM's additions. UNSET fields are omitted; None is sent as null."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from api.openai.requests import FunctionCall, ToolCall
from api.parsing.parsed import Parsed
from api.tokens.tokenizer import Tokenizer

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"] | None
# A token, its log probability, and the alternatives with theirs, most likely first.
TokenChoice: TypeAlias = tuple[int, float, Sequence[tuple[int, float]]]

# JSON has no infinity; vLLM writes this.
LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens))


class PromptLogprob(Struct, gc=False):  # there are many, and none holds another
    logprob: float
    rank: int  # 1 for the most likely
    decoded_token: str


# The token itself and the alternatives, by token id. Null stands for the first token, which nothing comes before.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


# ---- completions: the same object whole and streamed


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# ---- chat completions


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None  # None beside calls
    refusal: None = None
    annotations: list[Any] = []
    reasoning: str | UnsetType = UNSET  # vLLM's name
    reasoning_content: str | UnsetType = UNSET  # its older name, which many clients look for
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET  # a call's first delta has it
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET  # a call's first delta has it
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- the rest


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "warmroute"
    max_model_len: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # the model that a LoRA adapter changes


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedPrompt(Struct):
    prompt: str


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(Struct):
    error: ErrorDetails


encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

# An event of an API whose events have names: its type, and its other fields.
Event: TypeAlias = tuple[str, dict[str, Any]]


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def chat_message(said: Parsed) -> ChatMessage:
    """A whole message: `said` has one piece for each call."""
    thought: str | UnsetType = said.reasoning or UNSET
    calls = [ToolCall(call.id, "function", FunctionCall(call.name or "", call.arguments)) for call in said.calls]
    return ChatMessage(
        content=said.content or (None if calls else ""),
        reasoning=thought,
        reasoning_content=thought,
        tool_calls=calls or UNSET,
    )


def chat_delta(said: Parsed) -> Delta:
    thought: str | UnsetType = said.reasoning or UNSET
    calls = []
    for call in said.calls:
        calls.append(ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments)))
        if call.name is not None:
            calls[-1].id, calls[-1].type, calls[-1].function.name = call.id, "function", call.name
    return Delta(content=said.content or UNSET, reasoning=thought, reasoning_content=thought, tool_calls=calls or UNSET)


def chat_logprobs(tokenizer: Tokenizer, chosen: Iterable[TokenChoice]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(*_token(tokenizer, token_id, logprob), [TopLogprob(*_token(tokenizer, *one)) for one in top])
            for token_id, logprob, top in chosen
        ]
    )


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    written = tokenizer.token_bytes(token_id)
    return written.decode(errors="replace"), _finite(logprob), list(written)


def completion_logprobs(tokenizer: Tokenizer, chosen: Iterable[TokenChoice], text_offset: int) -> CompletionLogprobs:
    """`text_offset` is the length of the text before these tokens."""
    logprobs = CompletionLogprobs([], [], [], [])
    for one in chosen:
        text_offset += len(add_logprob(logprobs, tokenizer, one, text_offset))
    return logprobs


def add_logprob(logprobs: CompletionLogprobs, tokenizer: Tokenizer, chosen: TokenChoice, text_offset: int) -> str:
    token_id, logprob, top = chosen
    text = _legacy_text(tokenizer, token_id)
    logprobs.text_offset.append(text_offset)
    logprobs.token_logprobs.append(_finite(logprob))
    logprobs.tokens.append(text)
    alternatives = {_legacy_text(tokenizer, other): _finite(of_other) for other, of_other in top}
    logprobs.top_logprobs.append(alternatives | {text: _finite(logprob)})
    return text


def add_first_token(logprobs: CompletionLogprobs, tokenizer: Tokenizer, token_id: int) -> None:
    logprobs.text_offset.append(0)
    logprobs.token_logprobs.append(None)
    logprobs.tokens.append(_legacy_text(tokenizer, token_id))
    logprobs.top_logprobs.append(None)


def prompt_logprob(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]]
) -> dict[str, PromptLogprob]:
    """One token of a prompt; equally likely tokens have the same rank."""
    shown = {str(token_id): PromptLogprob(_finite(logprob), rank, _text(tokenizer, token_id))}
    of_alternative, before = 0, math.inf
    for place, (other, of_other) in enumerate(top, start=1):
        if of_other != before:
            of_alternative, before = place, of_other
        if other != token_id:
            shown[str(other)] = PromptLogprob(_finite(of_other), of_alternative, _text(tokenizer, other))
    return shown


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _legacy_text(tokenizer: Tokenizer, token_id: int) -> str:
    # The alternatives are keys of an object, so tokens without a text and parts of characters must stay distinct.
    written = tokenizer.token_bytes(token_id)
    if not written:
        return f"token_id:{token_id}"  # vLLM writes ids so
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
