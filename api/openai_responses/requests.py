"""The requests of the Responses API. Unknown fields are ignored; what has an effect we cannot give is refused."""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from api.openai.requests import MAX_MESSAGES, Count, Identifier, Nullable, Seed, check_neutral
from api.openai_responses.tools import OfferedTool, check_tools

# Fields that are refused, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


REFERENCE = "item_reference"
# `$` would accept a line's end after the id, and expressions in JSON schemas know no `\Z`.
RESPONSE_ID = r"^resp_[A-Za-z0-9_-]{1,128}(?![\s\S])"
_find_response_id = re.compile(RESPONSE_ID).search
_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc)_([\w-]{1,128})_[0-9]{1,9}", re.ASCII)  # `output` makes them


def is_response_id(text: str) -> bool:
    return _find_response_id(text) is not None


def response_of(item_id: object) -> str | None:
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if found is None else f"resp_{found[1]}"


class Part(Struct, kw_only=True):
    type: str
    text: str | None = None


class Item(Struct, kw_only=True, omit_defaults=True):
    """One item of the input; without a type, it is a message."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class NamedFunction(Struct, kw_only=True):
    type: Literal["function", "custom"]
    name: str


class NamedChoice(Struct, kw_only=True, omit_defaults=True):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedFunction] | None = None


class Reasoning(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class Format(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(Struct, kw_only=True):
    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    request_id: Annotated[str, Meta(pattern=RESPONSE_ID)] | None = None  # the response's id, as vLLM and SGLang take it
    store: Nullable[bool] = True
    stream: Nullable[bool] = False
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    user: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: Identifier | None = None
    # Additions that other requests have, too:
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # The conversation of `previous_response_id`, by whoever has looked it up.
    previous_items: Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    # The conversation in which the items are that the input only names, likewise.
    referenced_items: Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    # Refused:
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def __post_init__(self) -> None:
        self.store = self.store is not False  # null, too, stands for true
        for name, neutral in UNSUPPORTED.items():
            check_neutral(name, getattr(self, name), neutral)
        check_tools(self.tools or ())

    @property
    def items(self) -> list[Item]:
        """The input of this request, without what came before; items that it names, as far as they are known."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        if self.referenced_items is None:
            return self.input
        known = {item.id: item for item in self.referenced_items}
        return [known.get(item.id, item) if item.type == REFERENCE else item for item in self.input]
