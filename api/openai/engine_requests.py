"""The requests of engines that the OpenAI API does not have: about tokens and adapters."""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from api.errors import invalid
from api.openai.requests import (
    NO_CONTROL_CODES,
    AdapterName,
    Messages,
    Nullable,
    TokenId,
    check_conversation,
    check_tools,
    fill_nulls,
)


class TokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: for a prompt, and not for messages, whose template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: Nullable[bool] = False
    tools: Nullable[list[dict[str, Any]]] = field(default_factory=list)  # each a Tool
    chat_template_kwargs: Nullable[dict[str, Any]] = field(default_factory=dict)
    reasoning_effort: str | None = None
    return_token_strs: Nullable[bool] = False

    def __post_init__(self) -> None:
        fill_nulls(self)
        check_tools(self.tools)
        if (self.prompt is None) == (self.messages is None):
            found = (
                "neither prompt nor messages is given" if self.prompt is None else "both prompt and messages are given"
            )
            raise invalid(f"{found}; send one of them", "prompt")
        if self.messages is not None:
            check_conversation(self.messages, self.add_generation_prompt, bool(self.continue_final_message))


class LoadAdapterRequest(Struct, kw_only=True):
    """A LoRA adapter to serve from now on, as a model of this name."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(max_length=4096, pattern=NO_CONTROL_CODES)]


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: AdapterName


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
