"""Chat templates, rendered as transformers renders them, in Jinja's sandbox.

The sandbox keeps a template from Python's internals, and clients send data, never templates. A template that loops for
ever or builds a gigantic string is not stopped: it comes from whoever runs the server, who must choose it with care.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from msgspec import Struct

from api.errors import invalid

# Stands where the text of a continued message ends: plain letters, which no filter escapes. Whether a template has
# trimmed the message shows at the space that ends this; a message that contains it harms only its own request.
_END_OF_MESSAGE = "END_OF_THE_CONTINUED_MESSAGE "


class Conversation(Struct, kw_only=True):
    """What is rendered: messages and tools as templates know them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}


class ChatTemplate:
    """One compiled template. Raises ValueError, with the name that it is known by, when its source is not one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the chat template") -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of {name} is not Jinja: {error.message}") from error
        except Exception as error:
            # Jinja makes Python of it, which has limits of its own (20 nested loops), and computes constants.
            reason = str(error) or type(error).__name__
            raise ValueError(f"{name} cannot be compiled: {reason}; make it simpler") from error

    def render(self, conversation: Conversation) -> str:
        if conversation.tools and "tools" not in self.source:
            raise invalid("tools is set; this model's chat template has no place for them, leave it out", "tools")
        if taken := conversation.kwargs.keys() & self._reserved():
            name = min(taken)
            raise invalid(f"chat_template_kwargs sets {name!r}; that is the server's to set", "chat_template_kwargs")
        if not conversation.continue_final_message:
            return self._render(conversation, conversation.messages)
        *earlier, last = conversation.messages
        text = self._render(conversation, [*earlier, last | {"content": last["content"] + _END_OF_MESSAGE}])
        return _cut(text, last["content"])

    def _reserved(self) -> set[str]:
        return {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        try:
            return self._rendered(conversation, messages)
        except Exception as error:
            # A template is a program that runs on the client's data: it may fail in any way.
            raise invalid(f"the chat template refuses the messages: {error}", "messages") from error

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        fields: dict[str, Any] = {
            **self._special_tokens,
            **conversation.kwargs,
            "tools": conversation.tools or None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            return self._template.render(fields, messages=messages)
        except jinja2.UndefinedError:
            # A message of calls alone has no content. Templates that cannot do without get an empty one.
            return self._template.render(fields, messages=[{"content": ""} | message for message in messages])


def _cut(text: str, message: str) -> str:
    end = text.rfind(_END_OF_MESSAGE.rstrip())
    if end < 0 or message.strip() not in text:  # the template may have left out a part, such as the thoughts
        reason = "the chat template does not show the last message as it is, so it cannot be continued"
        raise invalid(f"continue_final_message is set; {reason}", "continue_final_message")
    kept_spaces = text.startswith(_END_OF_MESSAGE, end)
    return text[:end] if kept_spaces else text[:end].rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with two short ways that lead to the same place: most of what a template does is `message.role`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        value = obj.get(attribute, _MISSING)
        return self.undefined(obj=obj, name=attribute) if value is _MISSING else value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _DECIDED_BY_TYPE:
            return self._is_safe_of_type(type(obj), attr)  # type: ignore[arg-type]  # types are hashable
        return super().is_safe_attribute(obj, attr, value)

    @lru_cache(maxsize=1024)  # noqa: B019  # there is one environment, which lives as long as the process
    def _is_safe_of_type(self, of_type: type, attr: str) -> bool:
        return super().is_safe_attribute(_DECIDED_BY_TYPE[of_type], attr, None)


_MISSING = object()
_DICT_ATTRIBUTES = frozenset(dir(dict))
# The sandbox's verdict on an attribute asks for the object's type alone; an object of each type to ask with.
_DECIDED_BY_TYPE: dict[type, Any] = {
    str: "",
    dict: {},
    list: [],
    jinja2.runtime.LoopContext: jinja2.runtime.LoopContext((), jinja2.Undefined, None),
}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
