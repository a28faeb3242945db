from pathlib import Path

import pytest
from tokenizers import AddedToken

from api.parsing.formats import CALL_PARSERS, REASONING, answer_formats, reasoning_format, tool_format
from api.tokens.tokenizer import ByteTokenizer, HfTokenizer
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import byte_level, saved


def test_a_template_tells_its_format() -> None:
    found = {name: tool_format(template) for name, template in TEMPLATES.items()}
    assert found == {"llama3": "llama3_json", "qwen": "hermes", "mistral": "mistral", "other": None}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("put calls in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", None),
        ("<tool_call>\n<function=name>\n<parameter=key>", None),
        ("<tool_call>name<arg_key>", None),
        ("", None),
    ],
)
def test_what_a_template_shows_tells_the_format(template: str, expected: str | None) -> None:
    assert tool_format(template) == expected


def test_a_template_tells_its_reasoning() -> None:
    assert reasoning_format("{{ content.split('</think>')[-1] }}") == "think"
    assert reasoning_format("[THINK]{{ thought }}[/THINK]") == "mistral"
    assert reasoning_format("{{ content }}") is None


def test_flags_win_over_the_template() -> None:
    template = ["<tool_call></think>"]
    found = answer_formats(ByteTokenizer(), template)
    assert (found.tools, found.reasoning) == ("hermes", REASONING["think"])
    off = answer_formats(ByteTokenizer(), template, "none", "none")
    assert (off.tools, off.reasoning) == (None, None)
    other = answer_formats(ByteTokenizer(), template, "llama3_json", "mistral")
    assert (other.tools, other.reasoning) == ("llama3_json", REASONING["mistral"])


def test_the_formats_special_tokens_are_found(tmp_path: Path) -> None:
    markers = [marker for parser in CALL_PARSERS.values() for marker in parser.markers]
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(marker, special=True) for marker in [*markers, "[THINK]", "<think>"]])
    loaded = HfTokenizer(saved(tokenizer, tmp_path))
    for name, parser in CALL_PARSERS.items():
        found = answer_formats(loaded, [], name, "mistral")  # type: ignore[arg-type]
        shown = {loaded.decode([token], skip_special_tokens=False) for token in found.tool_tokens}
        assert shown == set(parser.markers)
        assert found.reasoning_tokens == {loaded.encode("[THINK]", add_special_tokens=False)[0]}
