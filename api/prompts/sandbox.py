"""Jinja's sandbox for chat templates, in which each rendering has a budget of characters and of time.

A template is a program of a model's author, trusted as the weights beside it are. The budget bounds what a client's
messages can make of it: each round of a loop, each call of a macro and all that is shown costs characters, and the
clock is looked at as they are spent.
"""

import json
import time
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MAX_CHARACTERS = 128 * 1024 * 1024  # made by one rendering, in all
MAX_SECONDS = 2.0
STEP_CHARACTERS = 64  # the cost of a round or a call
LOOK_EVERY = 4096  # characters: then the clock is looked at
DEEPEST_INDENTED = 32  # values in values: each line begins with as many indents


class TooMuch(jinja2.TemplateError):
    """The template exceeded its budget."""


class Budget:
    __slots__ = ("left", "look_at", "until_s")

    def __init__(self) -> None:
        self.left = MAX_CHARACTERS
        self.look_at = MAX_CHARACTERS - LOOK_EVERY
        self.until_s = time.monotonic() + MAX_SECONDS

    def look(self) -> None:
        if self.left < 0:
            raise TooMuch(f"it makes more than {MAX_CHARACTERS} characters of them")
        if time.monotonic() > self.until_s:
            raise TooMuch(f"it takes longer than {MAX_SECONDS:g} s")
        self.look_at = self.left - LOOK_EVERY


_budget: ContextVar[Budget] = ContextVar("budget")
_current = _budget.get


def grant() -> None:
    """Start the budget of a rendering or compilation on this thread."""
    _budget.set(Budget())


def _charge(characters: int) -> None:
    budget = _current()
    left = budget.left = budget.left - characters
    if left < budget.look_at:
        budget.look()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    _charge(len(text))
    return text


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, with a charge at the start of code that is repeated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._repeated: set[int] = set()

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._repeated.add(id(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: jinja2.compiler.Frame) -> Any:
        self._repeated.add(id(node.body))
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Any, frame: jinja2.compiler.Frame) -> None:
        if id(nodes) in self._repeated:
            texts = (each.data for node in nodes for each in node.find_all(jinja2.nodes.TemplateData))
            values = (each.value for node in nodes for each in node.find_all(jinja2.nodes.Const))
            characters = sum(map(len, chain(texts, (value for value in values if isinstance(value, str)))))
            self.writeline(f"environment.charge({STEP_CHARACTERS + characters})")
        super().blockvisit(nodes, frame)

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """A field of a variable that holds a dict, as `message.role` nearly always does, is looked up right here."""
        if not isinstance(node.node, jinja2.nodes.Name) or node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        name = frame.symbols.ref(node.node.name)
        self.write(f"({name}[{node.attr!r}] if type({name}) is dict and {node.attr!r} in {name} else ")
        super().visit_Getattr(node, frame)
        self.write(")")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for the most frequent operation, `message.role`."""

    code_generator_class = _CodeGenerator
    charge = staticmethod(_charge)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if value is _MISSING else value
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):  # holds what the template has put there
            value = obj._Namespace__attrs.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if value is _MISSING else value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _DECIDED_BY_TYPE:
            return self._is_safe_of_type(type(obj), attr)  # type: ignore[arg-type]  # types are hashable
        return super().is_safe_attribute(obj, attr, value)

    @lru_cache(maxsize=1024)  # noqa: B019  # there is one environment, which lives as long as the process
    def _is_safe_of_type(self, of_type: type, attr: str) -> bool:
        return super().is_safe_attribute(_DECIDED_BY_TYPE[of_type], attr, None)


_MISSING = object()
_OF_LOOPS = frozenset(("depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
_DICT_ATTRIBUTES = frozenset(dir(dict))
# The sandbox's verdict on an attribute asks for the object's type alone; an object of each type to ask with.
_DECIDED_BY_TYPE: dict[type, Any] = {str: "", dict: {}, list: [], LoopContext: LoopContext((), jinja2.Undefined, None)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML of Jinja's own filter."""
    if indent:
        # Some kilobytes of a client's, nested deep, would become megabytes of blanks.
        level = [value]
        for _ in range(DEEPEST_INDENTED + 1):
            nested = (each for each in level if isinstance(each, (dict, list, tuple)))
            level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
            _charge(len(level))
        if level:
            raise TooMuch(f"it indents JSON that is nested deeper than {DEEPEST_INDENTED}; nest less")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    made = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_shown
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
