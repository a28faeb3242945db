"""The fields in which clients say what form an answer must have."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

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


class NamedTool(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool
