"""The requests of the Messages API. Unknown fields are ignored; tools and servers that run elsewhere are refused."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from api.errors import invalid, quoted
from api.openai.requests import MAX_MESSAGES, Count, Identifier, Nullable, Seed, StopString, TextPart
from api.retention import CacheControl

Some: TypeAlias = Annotated[str, Meta(min_length=1)]


class TextBlock(Struct, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    data: Some


class ToolUseBlock(Struct, tag="tool_use", kw_only=True):
    id: Some
    name: Some
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class Source(Struct):
    type: Literal["text", "base64", "url", "file", "content"]
    data: str | None = None  # set for texts and for parts that cannot be read


class ImageBlock(Struct, tag="image"):
    pass


class DocumentBlock(Struct, tag="document", kw_only=True):
    source: Source
    title: str | None = None
    cache_control: CacheControl | None = None


ResultBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(Struct, tag="tool_result", kw_only=True):
    tool_use_id: Some
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block: TypeAlias = (
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock
)


class Turn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Struct, kw_only=True):
    """A tool that the client runs. Those that Anthropic's servers run have another type, and are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Conversation(Struct, kw_only=True):
    """The fields of a prompt, which messages and their count share."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextPart] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's addition
    mcp_servers: list[Any] | None = None
    cache_control: CacheControl | None = None  # the last message's

    def __post_init__(self) -> None:
        if self.mcp_servers:
            raise invalid("mcp_servers is set, and servers are not called here; leave it out", "mcp_servers")
        for i, tool in enumerate(self.tools or ()):
            if tool.input_schema is None:
                kind = f"is of type {quoted(tool.type)}" if tool.type not in (None, "custom") else "has no input_schema"
                fix = "only tools that the client runs are supported: give it a name and an input_schema"
                raise invalid(f"tools[{i}] {kind}; {fix}", f"tools[{i}]", "unsupported")
        choice = self.tool_choice
        if choice is not None and choice.type == "tool":
            names = [tool.name for tool in self.tools or ()]
            if choice.name not in names:
                message = f"tool_choice names {quoted(choice.name)}, which is not one of the tools; name one of them"
                raise invalid(message, "tool_choice.name")


class MessagesRequest(Conversation, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: Nullable[bool] = False
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    # Additions that other requests have, too:
    seed: Seed | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: Identifier | None = None


class CountTokensRequest(Conversation, kw_only=True):
    pass
