"""Jinja's sandbox for chat templates, in which a template has a budget (`api.prompts.template_budget`).

A template is a program of a model's author, run on a client's data.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from api.prompts.template_budget import (
    STEP_CHARACTERS,
    WIDE,
    TooMuch,
    charge,
    check_bits,
    check_format,
    check_layout,
    check_numbers,
    check_product,
    sized,
)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, with charges at the start of repeated code and around values that may grow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._repeated: set[int] = set()
        self._in_sum = False

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._repeated.add(id(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: jinja2.compiler.Frame) -> Any:
        self._repeated.add(id(node.body))
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Any, frame: jinja2.compiler.Frame) -> None:
        if id(nodes) in self._repeated:
            self.writeline(f"environment.charge({STEP_CHARACTERS + sum(map(_constant_characters, nodes))})")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if self._in_sum:  # the value of the whole sum is enough
            super().visit_Add(node, frame)
            return
        self._in_sum = isinstance(node.left, jinja2.nodes.Add) and not isinstance(node.right, jinja2.nodes.Add)
        self._sized(super().visit_Add, node, frame)
        self._in_sum = False

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._sized(super().visit_Concat, node, frame)

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """A field of a variable that holds a dict, as `message.role` nearly always does, is looked up right here."""
        if not isinstance(node.node, jinja2.nodes.Name) or node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        name = frame.symbols.ref(node.node.name)
        self.write(f"({name}[{node.attr!r}] if type({name}) is dict and {node.attr!r} in {name} else ")
        super().visit_Getattr(node, frame)
        self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._sized(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _sized(self, visit: Callable[..., None], node: jinja2.nodes.Node, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.sized(")
        visit(node, frame)
        self.write(")")


def _constant_characters(node: jinja2.nodes.Node) -> int:
    if isinstance(node, jinja2.nodes.TemplateData):
        return len(node.data)
    if isinstance(node, jinja2.nodes.Const):
        return len(node.value) if isinstance(node.value, str) else 0
    return sum(map(_constant_characters, node.iter_child_nodes()))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for the most frequent operation, `message.role`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("*", "**", "%"))
    charge = staticmethod(charge)
    sized = staticmethod(sized)

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
        return attr not in _OF_BYTES and super().is_safe_attribute(obj, attr, value)

    @lru_cache(maxsize=1024)  # noqa: B019  # there is one environment, which lives as long as the process
    def _is_safe_of_type(self, of_type: type, attr: str) -> bool:
        return attr not in _OF_BYTES and super().is_safe_attribute(_DECIDED_BY_TYPE[of_type], attr, None)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif isinstance(left, str):
            check_format(left)
        return sized(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = obj.__dict__.get("__wrapped__") if isinstance(obj, FunctionType) else obj  # the sandbox wraps `format`
        if not isinstance(method, (BuiltinMethodType, MethodType)) or method.__name__ in _LOOKS:
            return super().call(context, obj, *args, **kwargs)
        if method.__name__ in ("format", "format_map") and isinstance(method.__self__, str):
            check_format(method.__self__)
        check_numbers(method.__name__, (*args, *kwargs.values()))
        return sized(super().call(context, obj, *args, **kwargs))


_MISSING = object()
_OF_LOOPS = frozenset(("depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
_DICT_ATTRIBUTES = frozenset(dir(dict))
# The sandbox's verdict on an attribute asks for the object's type alone; an object of each type to ask with.
_DECIDED_BY_TYPE: dict[type, Any] = {
    str: "",
    dict: {},
    list: [],
    LoopContext: LoopContext((), jinja2.Undefined, None),
}
_OF_BYTES = frozenset(("encode", "from_bytes", "to_bytes"))  # the methods of bytes are not charged for
_LOOKS = frozenset(("get", "items", "keys", "values"))
_ANY_NUMBER = frozenset(("float", "int", "string"))
_FREE = frozenset(("count", "d", "default", "first", "items", "last", "length"))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is charged for, and whose numbers are looked at before."""

    first = 1 if getattr(function, "jinja_pass_arg", None) is None else 2  # after the value

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if name not in _ANY_NUMBER and (len(args) > first or kwargs):
            check_numbers(name, (*args[first:], *kwargs.values()))
        if name == "format":
            check_format(str(args[0]))
        return sized(function(*args, **kwargs))

    return run


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if WIDE.search(format):
        raise TooMuch(f"it formats the time with {format[:80]!r}")
    return datetime.now().strftime(format)


def _range(*args: int) -> range:
    made = jinja2.sandbox.safe_range(*args)
    charge(len(made))
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    check_layout(value, indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=sized,
    )
    made.filters["tojson"] = _tojson
    made.filters |= {name: _counted(name, made.filters[name]) for name in made.filters.keys() - _FREE}
    del made.globals["lipsum"]
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "range": _range}
    return made
