"""Turns requests into token ids, the same for router and replica.

A chat template renders the messages as one string. With a `tokenizer.json`, text that spells a special token becomes
that token, as in every server of such models. The byte tokenizer does not do this.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from api.errors import ApiError, context_length, invalid, too_long
from api.openai.engine_requests import DetokenizeRequest, TokenizeRequest
from api.openai.requests import ChatRequest, CompletionRequest, Message, SamplingFields
from api.prompts import chatml
from api.prompts.billing import without_billing
from api.prompts.breakpoints import ended_at, retained, without_control
from api.prompts.templates import ChatTemplate, Conversation
from api.retention import Breakpoint, Retain, common_tokens, shows_end, tokens_within
from api.tokens.tokenizer import ByteTokenizer, Tokenizer


class Prompts:
    """A tokenizer and its chat template. Thread-safe.

    `template` is a source that stands instead of the tokenizer's own, and `template_name` what errors call it.
    `vocab_size` is the model's, where that is larger than the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        vocab_size: int = 0,
        template_name: str = "the chat template",
    ) -> None:
        self.tokenizer = tokenizer
        self.given_template = template
        self.template_name = template_name
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        source = tokenizer.chat_template if template is None else template
        with_tools = tokenizer.tool_chat_template if template is None else None
        name = template_name if template is not None else f"the chat template of {tokenizer.name}"
        self._template = _compiled(source, tokenizer, name)
        self._tool_template = _compiled(with_tools, tokenizer, f"{name} for tools") or self._template

    @property
    def templates(self) -> list[str]:
        compiled = (self._template, self._tool_template)
        return list(dict.fromkeys(template.source for template in compiled if template is not None))

    def chat(self, request: ChatRequest, max_model_len: int | None = None) -> list[int]:
        """The prompt's token ids; raise ApiError 400 early if the prompt leaves no room in the model's length."""
        text = self.chat_text(request, max_model_len)
        return text if isinstance(text, list) else self._encode(text, bool(request.add_special_tokens), "messages")

    def chat_text(self, request: ChatRequest, max_model_len: int | None = None) -> str | list[int]:
        """The checked text that `chat` encodes; or token ids, if given or if no text can express them."""
        self._check(request)
        if request.prompt_token_ids is not None:
            check_room(len(request.prompt_token_ids), max_model_len, "messages")
            return self._checked(request.prompt_token_ids, "prompt_token_ids")
        return self._conversation_text(request, max_model_len)

    def retained(self, request: ChatRequest, token_ids: Sequence[int]) -> list[Retain]:
        """The beginnings of the prompt with these token ids that the client asks to keep."""

        def tokens_before(point: Breakpoint) -> int:
            text = self.text_ended_at(request, point)
            if isinstance(text, list):
                return common_tokens(token_ids, text)
            return tokens_within(self.tokenizer, token_ids, text)

        return retained(request, len(token_ids), tokens_before)

    def text_ended_at(self, request: ChatRequest, point: Breakpoint) -> str | list[int]:
        """A text, or token ids, that begin as the prompt does up to this point, and go on otherwise; empty: unknown."""
        ended = ended_at(point, request)
        try:
            conversation = self._conversation(request, ended.messages, ended.tools)
            conversation.add_generation_prompt = conversation.continue_final_message = False
            shown = self._shown_with(self.template(bool(ended.tools)), conversation)
        except ApiError:  # a template is a program: it may refuse a conversation only for this end
            return ""
        if isinstance(shown, str):
            return shown if shows_end(shown) else ""
        return chatml.encode(shown)

    def completion(self, request: CompletionRequest, max_model_len: int | None = None) -> list[list[int]]:
        """The token ids of each prompt; raise ApiError 400 as `chat` does."""
        add_special_tokens = request.add_special_tokens is not False
        texts = self.completion_texts(request, max_model_len)
        return [
            text if isinstance(text, list) else self._encode(text, add_special_tokens, param)
            for text, param in zip(texts, _params(len(texts)), strict=True)
        ]

    def completion_texts(self, request: CompletionRequest, max_model_len: int | None = None) -> list[str | list[int]]:
        """The checked texts that `completion` encodes; token ids for prompts of token ids."""
        self._check(request)
        given = request.prompt_token_ids
        prompts: Sequence[str | list[int]] = request.prompts if given is None else given
        for prompt in prompts:
            self.check_fits(prompt, max_model_len, "prompt")
        if given is not None:
            return [self._checked(ids, f"prompt_token_ids[{i}]") for i, ids in enumerate(given)]
        return [
            self._checked(prompt, param) if isinstance(prompt, list) else prompt
            for prompt, param in zip(prompts, _params(len(prompts)), strict=True)
        ]

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is not None:
            return self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        text = self._conversation_text(request)
        return text if isinstance(text, list) else self._encode(text, bool(request.add_special_tokens), "messages")

    def detokenize(self, request: DetokenizeRequest) -> str:
        self._check_ids(request.tokens, "tokens")
        return self.tokenizer.decode(request.tokens, skip_special_tokens=False)

    def render(self, request: ChatRequest | TokenizeRequest) -> str:
        """The text that the chat template makes from the messages."""
        shown = self._shown(request)
        return shown if isinstance(shown, str) else chatml.text(shown)

    def _conversation_text(
        self, request: ChatRequest | TokenizeRequest, max_model_len: int | None = None
    ) -> str | list[int]:
        return self._checked_text(self._shown(request), max_model_len)

    def conversation_text(self, conversation: Conversation, max_model_len: int | None = None) -> str | list[int]:
        """The checked text of a conversation whose messages are as its template takes them."""
        return self._checked_text(
            self._shown_with(self.template(bool(conversation.tools)), conversation), max_model_len
        )

    def _checked_text(self, shown: str | list[chatml.Segment], max_model_len: int | None) -> str | list[int]:
        if isinstance(shown, str):
            self.check_fits(shown, max_model_len, "messages")
            return shown
        check_room(sum(map(chatml.size, shown)), max_model_len, "messages")
        return self._checked(chatml.encode(shown), "messages")

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        return self._checked(self.tokenizer.encode(text, add_special_tokens=add_special_tokens), param)

    def _shown(self, request: ChatRequest | TokenizeRequest) -> str | list[chatml.Segment]:
        try:
            return self._shown_with(self.template(bool(request.tools)), self._conversation(request))
        except RecursionError:
            raise _too_deep() from None

    def _shown_with(self, template: ChatTemplate | None, conversation: Conversation) -> str | list[chatml.Segment]:
        try:
            return chatml.segments(conversation) if template is None else template.render(conversation)
        except RecursionError:
            raise _too_deep() from None

    def _conversation(
        self,
        request: ChatRequest | TokenizeRequest,
        messages: Sequence[Message] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Conversation:
        """The request's conversation, or one with these messages and tools instead of its own."""
        template = self.template(bool(request.tools))
        developer = template is not None and "developer" in template.source
        generation_prompt, kwargs = request.add_generation_prompt, request.chat_template_kwargs
        if generation_prompt is None:
            generation_prompt = not request.continue_final_message
        if request.reasoning_effort is not None:
            kwargs = {"reasoning_effort": request.reasoning_effort} | kwargs
        shown = (request.messages or ()) if messages is None else messages
        return Conversation(
            messages=[_message(message, i, developer) for i, message in enumerate(shown)],
            tools=list(map(without_control, request.tools if tools is None else tools)),
            add_generation_prompt=generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=kwargs,
        )

    def template(self, with_tools: bool) -> ChatTemplate | None:
        """The chat template; None: the byte tokenizer's own. Raise ApiError if there is none."""
        template = self._tool_template if with_tools else self._template
        if template is None and not isinstance(self.tokenizer, ByteTokenizer):
            fix = "use /v1/completions, or start the server with a --chat-template"
            raise invalid(f"the tokenizer {self.tokenizer.name} has no chat template; {fix}", "messages")
        return template

    def check_fits(self, prompt: str | list[int], max_model_len: int | None, param: str) -> None:
        """Refuse a prompt that is certainly too long, before it is encoded."""
        if isinstance(prompt, list):
            check_room(len(prompt), max_model_len, param)
        elif max_model_len is not None:
            check_room(
                -(-len(prompt.encode()) // self.tokenizer.max_bytes_per_token), max_model_len, param, exact=False
            )

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        self._check_ids(token_ids, param)
        if not token_ids:
            raise invalid(f"{param} is empty; send at least one token", param)
        return token_ids

    def _check(self, request: SamplingFields) -> None:
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        self._check_ids(request.logit_bias, "logit_bias")

    def check_resumed(self, resumed: Sequence[Sequence[int]]) -> None:
        for i, token_ids in enumerate(resumed):
            self._check_ids(token_ids, f"resume_token_ids[{i}]")

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            fix = f"token ids end at {self.vocab_size - 1}"
            raise invalid(f"{param} has the token id {max(token_ids)}; {fix}", param)


def _too_deep() -> ApiError:
    return invalid("tools or tool_calls are nested too deeply; flatten them", "tools")


def check_room(prompt_tokens: int, max_model_len: int | None, param: str, *, exact: bool = True) -> None:
    """Raise ApiError 400 if a prompt leaves no room for a response; without a limit there always is."""
    if max_model_len is None or prompt_tokens < max_model_len:
        return
    found = f"{prompt_tokens}" if exact else f"{prompt_tokens} or more"
    what = f"However, the prompt has {found} tokens; send at most {max_model_len - 1}, to leave room for an answer"
    raise too_long(f"{context_length(max_model_len)} {what}", param)


def _compiled(source: str | None, tokenizer: Tokenizer, name: str) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens, name)


def _params(prompts: int) -> list[str]:
    return [f"prompt[{i}]" for i in range(prompts)] if prompts > 1 else ["prompt"]


def _message(message: Message, i: int, developer: bool) -> dict[str, Any]:
    """A message for templates: text joined, arguments of calls parsed, missing fields left out."""
    seen: dict[str, Any] = msgspec.to_builtins(message)
    seen.pop("cache_control", None)
    if message.content is not None:
        if message.role == "system":
            seen["content"] = shown = without_billing(seen["content"])
            if not isinstance(shown, str):
                seen["content"] = "\n".join(part["text"] for part in shown)
        else:
            seen["content"] = message.text
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:
        seen["thinking"] = seen["reasoning_content"] = thought  # its names in templates
    if message.role == "developer" and not developer:
        seen["role"] = "system"  # its name of old, which most templates know alone
    for j, call in enumerate(seen.get("tool_calls") or ()):
        text, param = call["function"]["arguments"], f"messages[{i}].tool_calls[{j}].function.arguments"
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{param} is {text[:80]!r}; it must be the JSON of an object", param)
        call["function"]["arguments"] = arguments
    return seen
