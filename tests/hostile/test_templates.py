"""Chat templates that loop without end, show gigantic texts, or try to leave their sandbox."""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import pytest

from api.errors import ApiError
from api.prompts.sandbox import MAX_SECONDS
from api.prompts.templates import MAX_BYTES, ChatTemplate, Conversation

USER = {"role": "user", "content": "Hello\nyou"}
BACK_WITHIN_S = 5 * MAX_SECONDS  # of a machine that does other things beside


def nested(depth: int, of: str = "range(1000)") -> str:
    loops = "".join(f"{{% for i{level} in {of} %}}" for level in range(depth))
    return loops + "x" + "{% endfor %}" * depth


ENDLESS = {
    "nested loops": nested(4),
    "nested loops over data": nested(16, "messages * 10"),
    "loops that say nothing": nested(4).replace("x{%", "{%"),
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(200) }}",
    "a macro of long text": "{% macro m(n) %}" + "y" * 5000 + "{% endmacro %}{% for i in range(99999) %}"
    "{{ m(i) }}{% endfor %}",
    "a constant of long text": "{% for i in range(99999) %}{{ '" + "y" * 5000 + "' }}{% endfor %}",
    "a block set": "{% set ns = namespace(x='ab') %}{% for i in range(90) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "slow rounds": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "a range": "{% for i in range(10 ** 9) %}x{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", list(ENDLESS)[::3])
def test_a_template_without_end_is_refused(name: str) -> None:
    said, took_s = refusal(ENDLESS[name])
    assert said
    assert took_s < BACK_WITHIN_S


def refusal(source: str) -> tuple[str | None, float]:
    """At the start; or, where Jinja's own limits stop it, with each request. And how many seconds that took."""
    began_s = time.monotonic()
    said = _refusal(source)
    return said, time.monotonic() - began_s


def _refusal(source: str) -> str | None:
    try:
        ChatTemplate(source, {}, "t.jinja").render(Conversation(messages=[USER]))
    except ValueError as error:
        return str(error)
    except ApiError as error:
        return error.message
    return None


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[str | None, float]]:
    """Each template's, from one process that gets little memory."""
    code = (
        "import json; from tests.hostile.test_templates import ENDLESS, refusal; "
        "print(json.dumps({name: refusal(source) for name, source in ENDLESS.items()}))"
    )
    limit = 2 * 2**30

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    ended = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=len(ENDLESS) * BACK_WITHIN_S,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, tuple[str | None, float]] = json.loads(ended.stdout)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_takes_no_gigabyte(name: str, refusals: dict[str, tuple[str | None, float]]) -> None:
    said, took_s = refusals[name]
    assert said
    assert took_s < BACK_WITHIN_S
    assert "MemoryError" not in said
    assert not said.strip().endswith(":"), "a MemoryError has no message"


def test_what_only_some_messages_make_endless_is_refused_with_those_messages() -> None:
    """A probe at the start cannot find it."""
    template = ChatTemplate("{% if messages | length > 1 %}" + nested(4) + "{% endif %}ok", {})
    assert template.render(Conversation(messages=[USER])) == "ok"
    began = time.monotonic()
    with pytest.raises(ApiError, match="the chat template refuses the messages: it ") as refused:
        template.render(Conversation(messages=[USER, USER]))
    assert refused.value.status == 400
    assert time.monotonic() - began < BACK_WITHIN_S
    assert template.render(Conversation(messages=[USER])) == "ok", "each rendering has its own budget"


ESCAPES = {
    "of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by attr": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "by a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "by a format map": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "by map": "{{ ['{0.__class__}'] | map('format', '') | list }}{{ [''] | map(attribute='__class__') | list }}",
    "of a function": "{{ raise_exception.__globals__ }}",
    "of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "of the loop": "{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "of itself": "{{ self.__init__.__globals__ }}",
    "of the cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "of a generator": "{{ ([1] | map('string')).gi_frame.f_globals }}",
    "by groupby": "{{ [''] | groupby('__class__') }}",
    "by sort": "{{ [''] | sort(attribute='__class__.__mro__') }}{{ [''] | sum(attribute='__class__') }}",
    "by another file": "{% include '/etc/passwd' %}",
    "by an import": "{% import 'os' as os %}{{ os.system('id') }}",
    "by extending": "{% extends '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=list(ESCAPES))
def test_nothing_of_pythons_is_within_reach(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(Conversation(messages=[USER]))
    except (ApiError, ValueError):
        return
    assert not any(sign in text for sign in ("<class", "object at", "<built-in", "__name__", "root:", "uid="))


@pytest.mark.parametrize(
    "change", ["messages.append(1)", "messages[0].update({'role': 'system'})", "messages[0].clear()", "messages.pop()"]
)
def test_a_template_changes_nothing_that_it_is_given(change: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(ApiError, match="refuses the messages"):
        ChatTemplate(f"{{% set x = {change} %}}{{{{ x }}}}", {}).render(Conversation(messages=messages))
    assert messages == [USER]


@pytest.mark.parametrize(("depth", "refused"), [(20, False), (300, True)])
def test_tools_nested_deep_are_not_indented(depth: int, refused: bool) -> None:
    """Some kilobytes of a client's would become megabytes of blanks."""
    template = ChatTemplate("{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}", {})
    parameters: list[Any] = [0] * 1000
    for _ in range(depth):
        parameters = [parameters]
    conversation = Conversation(messages=[USER], tools=[{"function": {"parameters": parameters}}])
    if refused:
        with pytest.raises(ApiError, match="nested deeper than 32; nest less") as found:
            template.render(conversation)
        assert found.value.status == 400
    else:
        assert template.render(conversation) == json.dumps(conversation.tools[0], indent=4)


def test_a_gigantic_template_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="has 1048577 characters; at most 1048576 are read"):
        ChatTemplate("x" * (MAX_BYTES + 1), {}, "t.jinja")


def test_a_long_conversation_is_no_attack() -> None:
    """Thousands of messages of some kilobytes, shown by a template that looks at all of them for each."""
    source = (
        "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content | trim %}"
        "{{- '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}"
        "{%- if loop.index0 == messages | length - 1 and loop.last %}{{- m | tojson }}{%- endif %}{%- endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 400}] * 4000  # 8 MB
    text = ChatTemplate(source, {}).render(Conversation(messages=messages))
    assert text.count("<|im_start|>") == 4000
