"""The formats of tool calls and reasoning: their names, and which of them a chat template asks for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from msgspec import Struct

from api.parsing.calls import CallParser
from api.parsing.json_calls import HermesParser, Llama3JsonParser, MistralParser
from api.parsing.reasoning import ReasoningMarkers

if TYPE_CHECKING:
    from api.tokens.tokenizer import Tokenizer  # not for a configuration, which the engine's process reads

ToolFormat: TypeAlias = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningFormat: TypeAlias = Literal["auto", "none", "think", "mistral"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)

CALL_PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
REASONING: dict[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}
NOT_HERMES = ("<function=", "<arg_key>")  # begin what other formats have between the markers of Hermes


class AnswerFormats(Struct, frozen=True):
    tools: str | None = None  # a name in CALL_PARSERS
    reasoning: ReasoningMarkers | None = None
    tool_tokens: frozenset[int] = frozenset()  # special tokens that a parser has to see
    reasoning_tokens: frozenset[int] = frozenset()


def answer_formats(
    tokenizer: "Tokenizer", templates: Sequence[str], tools: ToolFormat = "auto", reasoning: ReasoningFormat = "auto"
) -> AnswerFormats:
    """Return the formats with these names; `auto`: those of the chat templates."""
    source = "\n".join(templates)
    call_name = tool_format(source) if tools == "auto" else None if tools == "none" else tools
    markers = REASONING.get(reasoning_format(source) or "" if reasoning == "auto" else reasoning)
    return AnswerFormats(
        call_name,
        markers,
        _special_ids(tokenizer, () if call_name is None else CALL_PARSERS[call_name].markers),
        _special_ids(tokenizer, markers or ()),
    )


def tool_format(template: str) -> str | None:
    """Return the format in which a chat template asks for tool calls, as far as it can be told."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(marker in template for marker in NOT_HERMES) else "hermes"
    return "llama3_json" if '"parameters":' in template else None


def reasoning_format(template: str) -> str | None:
    for name, markers in REASONING.items():
        if any(marker in template for marker in markers):
            return name
    return None


def _special_ids(tokenizer: "Tokenizer", texts: Sequence[str]) -> frozenset[int]:
    if not texts:
        return frozenset()
    decode = tokenizer.decode
    return frozenset(i for i in tokenizer.special_token_ids if decode([i], skip_special_tokens=False).strip() in texts)
