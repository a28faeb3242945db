"""The fields in which clients say what form an answer must have."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from api.errors import invalid

MAX_CHOICES = 4096

Schema: TypeAlias = dict[str, Any]
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Schema
    strict: bool | None = None  # the answer follows the schema in any case


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's field: one of them is set."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class NamedFunction(Struct):
    name: str


class AllowedTool(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class NamedTool(Struct, omit_defaults=True):
    function: NamedFunction | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            param = f"tool_choice.{self.type}"
            raise invalid(f'tool_choice is of type "{self.type}" and lacks this field; set {param}', param)

    @property
    def names(self) -> list[str]:
        if self.type == "function":
            assert self.function is not None
            return [self.function.name]
        assert self.allowed_tools is not None
        return [tool.function.name for tool in self.allowed_tools.tools]

    @property
    def is_forced(self) -> bool:
        return self.allowed_tools is None or self.allowed_tools.mode == "required"


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool
