"""The requests of engines that the OpenAI API does not have: about tokens."""

from typing import Any

from msgspec import Struct, field

from api.errors import invalid
from api.openai.requests import Messages, Nullable, TokenId, check_conversation, check_tools, fill_nulls


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


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
