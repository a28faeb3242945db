"""The requests for completions and chats that clients may send. Unknown fields are ignored, as in vLLM.

Where a rule spans several fields, say it in `api.schema` too: a test compares the two. Numbers stay within what the
engine's messages can hold.
"""

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, defstruct, field

from api.errors import invalid, quoted
from api.openai.constraint_fields import Choices, ResponseFormat, Schema, StructuredOutputs, ToolChoice
from api.openai.sampling import MAX_INT, OF_THE_MODEL, MinP, RepetitionPenalty, Temperature, TopK, TopP
from api.reading import read as read  # the way in: read(body, ChatRequest)
from api.retention import CacheControl

# Fields with an effect that we cannot give, and the values that ask for none of it (null always does).
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


if TYPE_CHECKING:
    _Fields = Struct
else:
    _Fields = defstruct("_Fields", [(name, Any, None) for name in UNSUPPORTED], kw_only=True)


class Unsupported(_Fields, kw_only=True):
    """The fields of `UNSUPPORTED`, decoded in order to be refused."""

    def __post_init__(self) -> None:
        for name, neutral in UNSUPPORTED.items():
            check_neutral(name, getattr(self, name), neutral)


def check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Raise ApiError 400 unless the value asks for nothing."""
    if value is not None and not any(type(value) is type(none) and value == none for none in neutral):
        accepted = " or ".join(map(quoted, neutral))
        fix = f"send {accepted}, or leave it out" if accepted else "leave it out"
        raise invalid(f"{name} is {quoted(value)}, which is not supported; {fix}", name, "unsupported")


T = TypeVar("T")
if TYPE_CHECKING:
    # A client may send null, which stands for the default; `__post_init__` puts it in its place.
    Nullable: TypeAlias = Annotated[T, "or null"]
else:
    Nullable = Optional

MAX_PROMPTS = 1024
MAX_MESSAGES = 2**16
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 1024

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INT)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
LONGEST_NAME = 256
Identifier: TypeAlias = Annotated[str, Meta(max_length=LONGEST_NAME)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk, as vLLM has it


class SamplingFields(Unsupported, kw_only=True):
    model: str
    temperature: Nullable[Temperature] = OF_THE_MODEL
    top_p: Nullable[TopP] = OF_THE_MODEL
    top_k: Nullable[TopK] = OF_THE_MODEL  # 0: all; -1 is read as 0
    min_p: Nullable[MinP] = OF_THE_MODEL
    presence_penalty: Nullable[Penalty] = 0.0
    frequency_penalty: Nullable[Penalty] = 0.0
    repetition_penalty: Nullable[RepetitionPenalty] = OF_THE_MODEL
    logit_bias: Nullable[
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)]
    ] = field(default_factory=dict)
    seed: Seed | None = None
    n: Nullable[Annotated[int, Meta(ge=1, le=128)]] = 1
    min_tokens: Nullable[Annotated[int, Meta(ge=0, le=MAX_INT)]] = 0
    ignore_eos: Nullable[bool] = False
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Nullable[Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]] = field(
        default_factory=list
    )
    include_stop_str_in_output: Nullable[bool] = False
    skip_special_tokens: Nullable[bool] = True
    add_special_tokens: bool | None = None
    stream: Nullable[bool] = False
    stream_options: StreamOptions | None = None
    return_token_ids: Nullable[bool] = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # alternatives beside each prompt token's own
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: Identifier | None = None  # a hint that keeps a router's choice stable; the cache does not see it
    user: Identifier | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None  # vLLM's older names
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fill_nulls(self)
        if self.top_k == -1:
            self.top_k = 0
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options is set and stream is not; set stream or leave stream_options out", "stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise invalid(
                f"prompt_logprobs is {self.prompt_logprobs} and stream is set; a stream has none: unset one of them",
                "prompt_logprobs",
            )
        limit = self.usual_output if self.output_limit is None else self.output_limit
        if limit is not None and self.min_tokens > limit:
            raise invalid(f"min_tokens is {self.min_tokens}; the most that may be generated is {limit}", "min_tokens")

    @property
    def output_limit(self) -> int | None:
        raise NotImplementedError

    @property
    def usual_output(self) -> int | None:
        """The default limit of generated tokens; None: as many as fit the model's length."""
        return None

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives beside each token's log probability; None: no log probabilities."""
        raise NotImplementedError

    @property
    def scored(self) -> int | None:
        """The number of alternatives beside each prompt token's log probability; None: the prompt is not scored."""
        return self.prompt_logprobs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | TokenId | TokenIds]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None  # 0: only the prompt is echoed
    echo: Nullable[bool] = False  # begin the text, and the log probabilities, with the prompt's
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # One per prompt; used instead of tokenizing.
    prompt_token_ids: Annotated[list[TokenIds], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = len(self.prompts)
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != prompts:
            given = len(self.prompt_token_ids)
            raise invalid(f"prompt_token_ids has {given} lists; there are {prompts} prompts", "prompt_token_ids")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens is 0; ask for at least 1, or set echo to score the prompt alone", "max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            fix = "a stream has no log probabilities of its prompt: unset one of them"
            raise invalid(f"echo and stream are set, and logprobs is {self.logprobs}; {fix}", "echo")

    @property
    def scored(self) -> int | None:
        found = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in found if count is not None), default=None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))
        if len(kinds) != 1:
            found = "mixes strings, token ids and lists" if kinds else "is an empty list"
            fix = "send strings only, token ids only or lists of token ids only"
            raise invalid(f"prompt {found}; {fix}", "prompt")
        if kinds == {int}:
            return [cast(list[int], prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt has {len(prompt)} entries; send at most {MAX_PROMPTS} in one request", "prompt")
        return cast(list[str], prompt)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def usual_output(self) -> int | None:
        return 16  # OpenAI's

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class TextPart(Struct, omit_defaults=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None  # keep the prompt up to here, as Anthropic's API has it


class FunctionCall(Struct):
    name: str
    arguments: str  # JSON


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Struct, kw_only=True, omit_defaults=True):
    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # templates may show earlier thoughts
    reasoning: str | None = None  # its newer name
    cache_control: CacheControl | None = None  # keep the prompt up to the end of this message

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """The known fields of a tool. The request keeps the tool as sent: templates show all its fields in order."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None  # templates do not see it


class _Tools(Struct):
    tools: list[Tool]


def check_tools(tools: list[dict[str, Any]]) -> None:
    msgspec.convert({"tools": tools}, _Tools)  # its error says where


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingFields, kw_only=True):
    messages: Messages
    tools: Nullable[list[dict[str, Any]]] = field(default_factory=list)  # each a Tool
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Nullable[bool] = True  # false: the first call of an answer is its only one
    include_reasoning: Nullable[bool] = True
    max_tokens: Count | None = None
    echo: Any = None  # vLLM's own field in chats; it changes the prompt
    max_completion_tokens: Count | None = None  # wins over max_tokens, its old name
    logprobs: Nullable[bool] = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Nullable[bool] = False
    chat_template_kwargs: Nullable[dict[str, Any]] = field(default_factory=dict)
    reasoning_effort: str | None = None  # handed to the template
    prompt_token_ids: TokenIds | None = None  # used instead of the messages
    prompt_cache_retention: Identifier | None = None  # "24h": keep the whole prompt; any other: nothing more than usual

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true", "top_logprobs")
        check_neutral("echo", self.echo, (False,))
        check_tools(self.tools)
        check_conversation(self.messages, self.add_generation_prompt, self.continue_final_message)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def check_conversation(messages: list[Message], generation_prompt: bool | None, continued: bool) -> None:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise invalid(f'messages[{i}].content is missing; only "assistant" may have none', f"messages[{i}].content")
    if not continued:
        return
    if generation_prompt:
        fix = "unset one of them"
        raise invalid(f"continue_final_message and add_generation_prompt are both set; {fix}", "continue_final_message")
    if messages[-1].content is None:
        raise invalid(
            "continue_final_message is set; the last message has no content to continue", "continue_final_message"
        )


def fill_nulls(request: Struct) -> None:
    for name, default in _defaults(type(request)):
        if getattr(request, name) is None:
            setattr(request, name, default() if callable(default) else default)


@cache
def _defaults(request_type: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """The fields that null resets, with their defaults or factories."""
    made = [
        (info.name, info.default_factory if info.default is msgspec.NODEFAULT else info.default)
        for info in msgspec.structs.fields(request_type)
        if not info.required
    ]
    return tuple((name, default) for name, default in made if default is not None)
