from datetime import datetime
from typing import Any

import jinja2
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import pytest

from api.errors import ApiError
from api.prompts.sandbox import grant
from api.prompts.templates import _ENVIRONMENT, ChatTemplate, Conversation

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}\n"
    "    <|im_start|>{{ message.role }}:{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
TRIMMING = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"


def render(source: str, messages: list[dict[str, Any]] = HI, **fields: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Conversation(messages=messages, **fields))


def refused(source: str, messages: list[dict[str, Any]] = HI, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(source, messages, **fields)
    assert caught.value.status == 400
    return caught.value


def test_blocks_are_trimmed_as_in_transformers() -> None:
    assert render(CHATML) == "    <|im_start|>user:hi<|im_end|>\n<|im_start|>assistant:"
    assert render(CHATML, add_generation_prompt=False) == "    <|im_start|>user:hi<|im_end|>\n"


def test_a_template_sees_the_special_tokens_and_the_clients_arguments() -> None:
    source = "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    assert render(source) == "<s>"
    assert render(source, kwargs={"enable_thinking": False, "unknown": 1}) == "<s>no"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_a_client_cannot_replace_what_the_server_sets(name: str) -> None:
    error = refused("x", kwargs={name: []})
    assert error.param == "chat_template_kwargs"
    assert name in error.message


def test_loop_controls_and_the_generation_block_are_known() -> None:
    marked = "{% generation %}{{ m }}{% endgeneration %}"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}" + marked + "{% endfor %}") == "1"


def test_tojson_writes_what_transformers_writes() -> None:
    value = [{"role": "user", "content": {"b": "<é&'>", "a": [1, None]}}]
    assert render("{{ messages[0].content | tojson }}", value) == '{"b": "<é&\'>", "a": [1, null]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":2,"b":1}'


def test_text_is_not_escaped() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>&{{ 7 * 7 }}"}]) == "<b>&{{ 7 * 7 }}"


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_can_refuse_the_messages() -> None:
    error = refused("{{ raise_exception('Roles must alternate user/assistant') }}")
    assert "the chat template refuses the messages: Roles must alternate user/assistant" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages | tojson(indent=[]) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    assert refused(source).param == "messages"


def test_a_source_that_is_no_template_is_the_operators_error() -> None:
    with pytest.raises(ValueError, match="line 2 of the chat template is not Jinja"):
        ChatTemplate("fine\n{% if %}", {})


def test_tools_are_rendered_where_the_template_mentions_them() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    assert render("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", tools=[tool]) == (
        '{"type": "function", "function": {"name": "add"}}'
    )
    assert render("{{ tools is none }}") == "True"
    assert refused("no place", tools=[tool]).param == "tools"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (CHATML, "The answer is ", "    <|im_start|>assistant:The answer is "),
        (TRIMMING, "The answer is ", "[The answer is"),
        (TRIMMING, "", "["),
        ("{{ messages | tojson }}", "x", '[{"role": "assistant", "content": "x'),
        ("{{ messages[-1].content }}|{{ messages[-1].content }}", "x", None),
    ],
)
def test_a_continued_message_is_left_open(source: str, content: str, expected: str | None) -> None:
    last = [{"role": "assistant", "content": content}]
    text = render(source, last, continue_final_message=True, add_generation_prompt=False)
    if expected is not None:
        assert text == expected
    assert "END_OF" not in text.rpartition("|")[2]


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    assert refused("nothing", continue_final_message=True).param == "continue_final_message"


def test_a_message_that_is_shown_in_part_cannot_be_continued() -> None:
    shown = "{{ messages[-1].content.split('</think>')[-1] }}"
    last = [{"role": "assistant", "content": "<think>one</think>two"}]
    assert refused(shown, last, continue_final_message=True).param == "continue_final_message"


def test_a_missing_content_is_empty_for_a_template_that_needs_one() -> None:
    assert render("{{ 'a' + messages[0].content + 'b' }}", [{"role": "assistant"}]) == "ab"
    assert render("{{ messages[0].content is defined }}", [{"role": "assistant"}]) == "False"
    assert "no_such" in refused("{{ no_such.field }}", [{"role": "assistant"}]).message


# ---- templates that are none


NESTED = 30  # Python takes 20 loops within each other


@pytest.mark.parametrize(
    "source", ["{% for a in %}", "{% for a in b %}" * NESTED + "{% endfor %}" * NESTED], ids=["syntax", "nested"]
)
def test_what_is_no_template_is_named(source: str) -> None:
    with pytest.raises(ValueError, match=r"the/file\.jinja"):
        ChatTemplate(source, {}, "the/file.jinja")


# ---- short ways in the sandbox


OBJECTS: list[Any] = [
    *({}, {"role": "user"}, {"items": 1, "get": 2}, {"__class__": 1, "_x": 2, "a b": 3}, [], [1], "text", 5, 1.5, None),
    *(jinja2.runtime.LoopContext([1], jinja2.Undefined, lambda *_: ""), jinja2.utils.Namespace(found=1)),
]
ATTRIBUTES = [
    *("role", "items", "get", "pop", "update", "clear", "append", "insert", "sort", "startswith", "format", "upper"),
    *("first", "last", "index0", "length", "found", "missing", "_x", "__class__", "__init__", "__dict__", "mro"),
    "real",
]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_templates_see_what_they_see_in_the_plain_sandbox(attribute: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    source = f"{{{{ one.{attribute} is defined }}}}{{{{ one.{attribute} }}}}{{{{ nothing.{attribute} is defined }}}}"
    for one in OBJECTS:
        grant()
        shown = [tried(environment, source, one) for environment in (_ENVIRONMENT, plain)]
        assert shown[0] == shown[1]


def tried(environment: jinja2.Environment, source: str, one: object) -> str:
    try:
        return environment.from_string(source).render(one=one)
    except jinja2.TemplateError as error:
        return repr(error)
