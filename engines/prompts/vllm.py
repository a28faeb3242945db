"""Prompts as vLLM builds them (read in 0.33.0, and held against it; docs/vllm.md lists the checks).

Fields that are not read here leave the prompt as it is. What is read and cannot be reproduced raises ApiError with
the field's name: its prompt is matched approximately.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Struct

from api.errors import ApiError, invalid
from api.prompts.billing import without_billing
from api.prompts.prompts import Prompts
from api.prompts.templates import ChatTemplate, Conversation
from api.reading import read
from engines.prompts import dates
from engines.prompts.asked import Asked, Question, Text, chat_shape
from engines.prompts.content_format import takes_parts
from engines.prompts.vllm_apis import CHATS, DISABLED
from engines.prompts.vllm_tools import described_calls, described_tools

VERSION = "0.33.0"

# Arguments of a template that the server sets, or that change more than the template's text.
RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
SPOKEN = ("user", "assistant")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DROPPED = (None, "auto")  # values of a template's arguments that count as not given
PART_FIELDS = frozenset(  # fields of its types; a template that takes parts sees all others
    (
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    )
)
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}

TOKENIZED = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Message(Struct, omit_defaults=True):
    role: str
    content: str | list[Any] | None = None
    name: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tools: Any = None
    task: Any = None


class _Everywhere(Struct, kw_only=True):
    """Fields of all requests that change the prompt."""

    n: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: Any = None
    kv_transfer_params: Any = None
    mm_processor_kwargs: Any = None


class ChatFields(_Everywhere, kw_only=True):
    messages: list[Message]
    tools: list[Any] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    response_format: Any = None
    chat_template: Any = None


class _Completion(_Everywhere, kw_only=True):
    prompt: str | list[Any]
    add_special_tokens: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class Vllm:
    """The engine's reading of requests to one model."""

    name = "vllm"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        # Properties of the templates without and with tools.
        self._takes_parts, self._shown, self._knows_developer = list[bool](), list[dates.Shown](), list[bool]()
        for with_tools in (False, True):
            try:
                template = prompts.template(with_tools)
            except ApiError:  # there is none, and no chat
                template = None
            source = "" if template is None else template.source
            self._takes_parts.append(template is not None and self.wants_parts(template))
            self._shown.append(dates.shown(source))
            self._knows_developer.append('"developer"' in source or "'developer'" in source)

    def read(self, api: str, body: bytes, max_model_len: int | None = None) -> Asked:
        """Read a request of this API; raise ApiError if its prompt cannot be known."""
        if api == "completions":
            asked = read(body, _Completion)
            _check(asked, ("truncate_prompt_tokens", "mm_processor_kwargs", "suffix", "prompt_embeds"))
            prompt, special = asked.prompt, asked.add_special_tokens is not False
            several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
            texts: list[Text] = prompt if several else [prompt]  # type: ignore[assignment]  # checked below
            for text in texts:
                is_ids = isinstance(text, list) and all(type(one) is int and 0 <= one < 2**32 for one in text)
                if not (isinstance(text, str) or is_ids):
                    raise invalid("prompt mixes what is none with texts or token ids", "prompt")
                self._prompts.check_fits(text, max_model_len, "prompt")
            of_ids = all(isinstance(text, list) for text in texts)
            shape = None if of_ids else f"completions; {'with' if special else 'without'} special tokens"
            return Asked(texts, asked.n or 1, special, shape)
        if (chat_of := CHATS.get(api)) is not None:
            made = chat_of(body)
            if made.get("reasoning_effort") == DISABLED:
                made["reasoning_effort"] = self._least_effort
            try:
                fields = msgspec.convert(made, ChatFields)
            except msgspec.ValidationError as error:
                raise invalid(f"the request cannot be read as a chat: {error}", "messages") from None
            return self.chat(api, fields, max_model_len)
        return self.chat(api, read(body, ChatFields), max_model_len)

    def chat(self, api: str, asked: ChatFields, max_model_len: int | None = None) -> Asked:
        _check(asked, ("truncate_prompt_tokens", "mm_processor_kwargs", "chat_template"))
        given = self._arguments(asked)
        tools, kinds = self.tools_shown(asked.tools)
        messages, turns = self._messages(asked.messages, with_tools=bool(tools), checked=api != "responses")
        template = self._prompts.template(bool(tools))
        conversation = Conversation(
            messages=messages,
            tools=tools if template is None or "tools" in template.source else [],
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            kwargs=given,
            documents=asked.documents,
        )
        if conversation.continue_final_message and not isinstance(messages[-1]["content"], str):
            raise invalid("the last message's content is a list, which is not continued here", "continue_final_message")
        text = self._prompts.conversation_text(conversation, max_model_len)
        special = bool(asked.add_special_tokens)
        flags = {
            "no generation prompt": asked.add_generation_prompt is False,
            "continued": asked.continue_final_message,
            "special tokens": special,
            "documents": asked.documents is not None,
            "tool_choice none": asked.tools and asked.tool_choice == "none",
            "response_format": asked.response_format is not None,
        }
        shape = chat_shape(api, turns, kinds, [flag for flag, is_set in flags.items() if is_set], given)
        made = Asked([text], asked.n or 1, special, shape)
        shown = self._shown[bool(tools)]
        if shown == "date":
            made.dated_s = time.time()
        elif shown == "time":
            made.doubt = dates.SHOWS_TIME
        return made

    # ---- the engine's own words

    def tokenized(self, api: str, body: bytes) -> Question | None:
        return tokenized(api, body, self._least_effort)

    @cached_property
    def _least_effort(self) -> str:
        """The effort of a message without thinking: the engine tries what the template makes of each."""
        none = self._with_effort("none")
        return "low" if none is None or none in map(self._with_effort, EFFORTS) else "none"

    def _with_effort(self, effort: str) -> Text | None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        greeting = Conversation(messages=[{"role": "user", "content": "Hi"}], kwargs=arguments)
        try:
            return self._prompts.conversation_text(greeting)
        except ApiError:
            return None

    # ---- parts of a chat

    def _messages(
        self, messages: Sequence[Message], *, with_tools: bool, checked: bool
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The messages as a template sees them, and a description of each. `checked`: they went through its types."""
        parts = self._takes_parts[with_tools]
        seen: list[dict[str, Any]] = []
        turns: list[str] = []
        developer = False
        for message in messages:
            role, content = message.role, message.content
            if type(content) is str and role in SPOKEN and not parts and _is_plain(message):  # most are
                seen.append({"role": role, "content": content})
                turns.append(role)
                continue
            kinds: list[str] = []
            if role == "system" and content is not None:
                content = without_billing(content)
            if type(content) is str:
                shown: Any = [{"type": "text", "text": content}] if parts else content
            else:
                shown = _parts(content if isinstance(content, list) else None, parts, kinds)
            if parts and role == "tool" and all(part.get("type") == "text" for part in shown):
                shown = "\n".join(part["text"] for part in shown)
            made = {"role": role, "content": shown}
            _add_fields(message, role, made, kinds, checked)
            developer = developer or role == "developer"
            seen.append(made)
            turns.append(f"{role}({' '.join(kinds)})" if kinds else role)
        if not seen:
            raise invalid("messages is empty; send at least one", "messages")
        if developer and not self._knows_developer[with_tools]:
            # Developers become systems for a template that knows none, and several systems become one at the beginning.
            renamed = [
                {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
                if message["role"] == "developer"
                else message
                for message in seen
            ]
            systems = [message for message in renamed if message["role"] == "system"]
            if len(systems) <= 1 and renamed[0]["role"] == "system":
                seen = renamed
            else:
                contents = [
                    content if isinstance(content, str) else "\n".join(part["text"] for part in content)
                    for content in (message["content"] for message in systems)
                ]
                others = [message for message in renamed if message["role"] != "system"]
                seen = [{"role": "system", "content": "\n\n".join(filter(None, contents))}, *others]
        return seen, turns

    def wants_parts(self, template: ChatTemplate) -> bool:
        return takes_parts(template.parsed())

    def tools_shown(self, tools: list[Any] | None) -> tuple[list[dict[str, Any]], list[str] | None]:
        return described_tools(tools)

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        if taken := given.keys() & (RESERVED | self._prompts.tokenizer.special_tokens.keys()):
            raise invalid(f"chat_template_kwargs sets {min(taken)!r}", "chat_template_kwargs")
        return given

    def _arguments(self, asked: ChatFields) -> dict[str, Any]:
        given = self._checked(asked.chat_template_kwargs or {})
        effort = asked.reasoning_effort
        if effort is not None:
            thinks = {} if "enable_thinking" in given else {"enable_thinking": effort != "none"}
            given = {**given, "reasoning_effort": effort, **thinks}
        return {name: value for name, value in given.items() if value not in DROPPED} if given else given


def tokenized(api: str, body: bytes, least_effort: str | None = None) -> Question | None:
    """The question for `POST /tokenize`, which does not see all fields."""
    fields = _decode(body)
    if (chat_of := CHATS.get(api)) is not None:
        fields = {"model": fields.get("model"), **chat_of(body)}
    asked = {name: fields[name] for name in TOKENIZED if fields.get(name) is not None}
    if api == "completions":
        prompt = fields.get("prompt")
        asked["prompt"] = prompt[0] if isinstance(prompt, list) and prompt else prompt
        unseen = "prompt" if isinstance(prompt, list) and len(prompt) > 1 else None
        return Question(msgspec.json.encode(asked), unseen) if isinstance(asked["prompt"], str) else None
    messages, arguments = asked.get("messages"), fields.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not isinstance(arguments, dict):
        return None
    asked["messages"] = [_with_reasoning(message) for message in messages]
    unseen = api if api in CHATS else None  # how the engine makes a chat of it
    if asked.get("tools") and fields.get("tool_choice") == "none":
        unseen = "tool_choice"
    effort = fields.get("reasoning_effort")
    if (effort := least_effort if effort == DISABLED else effort) is not None:
        arguments = {"enable_thinking": effort != "none"} | arguments | {"reasoning_effort": effort}
        unseen = "reasoning_effort"
    if fields.get("documents") is not None:
        arguments["documents"] = fields["documents"]
        unseen = "documents"
    if arguments:
        asked["chat_template_kwargs"] = arguments
    return Question(msgspec.json.encode(asked), unseen)


def _check(asked: _Everywhere, names: Sequence[str]) -> None:
    """Refuse fields that make another prompt, or none of tokens."""
    for name in names:
        if getattr(asked, name) is not None:
            raise invalid(f"{name} is set, which changes the prompt", name)
    transfer = asked.kv_transfer_params
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise invalid("kv_transfer_params sets the prompt's token ids", "kv_transfer_params")


def _is_plain(message: Message) -> bool:
    return (
        message.tool_calls is None
        and message.reasoning is None
        and message.reasoning_content is None
        and message.name is None
        and message.task is None
    )


def _add_fields(message: Message, role: str, made: dict[str, Any], kinds: list[str], checked: bool) -> None:
    """Add a message's other fields in the engine's order."""
    if role == "assistant":
        if message.tool_calls:
            made["tool_calls"] = described_calls(message.tool_calls, kinds, checked)
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise invalid("reasoning is no text", "messages")
            made["reasoning"] = made["reasoning_content"] = reasoning
            kinds.append("reasoning")
    elif role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
        kinds.append("id")
    for name, value in (("name", message.name), ("task", message.task)):
        if isinstance(value, str):
            made[name] = value
            kinds.append(name)
    if role == "developer":
        made["tools"] = message.tools
        if message.tools is not None:
            raise invalid("a developer's message has tools of its own", "messages")


def _parts(content: list[Any] | None, wrapped: bool, kinds: list[str]) -> Any:
    """A content of parts, as one text without its empty parts, or as the parts that a template loops over."""
    texts: list[str] = []
    shown: list[dict[str, Any]] = []
    for part in content or ():
        kind = str(part.get("type")) if isinstance(part, dict) else "text"
        text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("uuid") is not None):
            raise invalid(f"a message has a part of type {kind[:40]!r}, whose tokens are not known here", "messages")
        texts.append(text)
        others = {name: part[name] for name in part if name not in PART_FIELDS} if isinstance(part, dict) else {}
        shown.append({"type": "text", "text": text, **others})
        kinds.append(" ".join(sorted((str(kind), *others) if wrapped else (str(kind),))))
    if len(kinds) > 1:
        kinds[:] = [*sorted(set(kinds)), "several"]
    if content is None:
        kinds.append("nothing")
    elif not content:
        kinds.append("empty")
    return shown if wrapped else "\n".join(filter(None, texts))


def _with_reasoning(message: Any) -> Any:
    """A message with its reasoning under the name that `/tokenize` reads."""
    if (
        not isinstance(message, dict)
        or message.get("reasoning_content") is None
        or message.get("reasoning") is not None
    ):
        return message
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    return others | {"reasoning": message["reasoning_content"]}
