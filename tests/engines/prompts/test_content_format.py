import pytest

from api.prompts.templates import ChatTemplate
from engines.prompts.content_format import takes_parts
from tests.api.chat_templates import TEMPLATES

LOOPS = {
    "directly": "{% for m in messages %}{% for part in m['content'] %}{{ part }}{% endfor %}{% endfor %}",
    "by attribute": "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}",
    "filtered": "{% for m in messages %}{% for p in m.content | selectattr('type') %}{{ p }}{% endfor %}{% endfor %}",
    "of a slice": "{% for m in messages[1:] %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}",
    "of another name": "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{{ p }}{% endfor %}"
    "{% endfor %}",
    "of a namespace": "{% set ns = namespace(rest=messages) %}{% for m in ns.rest %}{% for p in m.content %}{{ p }}"
    "{% endfor %}{% endfor %}",
    "named content": "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}"
    "{% endfor %}",
    "in a macro": "{% macro show(what) %}{% for p in what %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
}
NONE = {
    "a text": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
    "a macro for tools": "{% macro show(what) %}{% for p in what %}{{ p }}{% endfor %}{% endmacro %}"
    "{{ show(tools) }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "content of something else": "{% for t in tools %}{% for p in t.content %}{{ p }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_a_content_is_found(name: str) -> None:
    assert takes_parts(ChatTemplate(LOOPS[name], {}).parsed())


@pytest.mark.parametrize("name", NONE)
def test_no_other_loop_is_taken_for_one(name: str) -> None:
    assert not takes_parts(ChatTemplate(NONE[name], {}).parsed())


def test_the_templates_of_text_models_take_texts() -> None:
    assert not any(takes_parts(ChatTemplate(source, {}).parsed()) for source in TEMPLATES.values())
