"""Jinja's sandbox for chat templates, in which a template has a budget (`api.prompts.template_budget`).

A template is a program of a model's author, run on a client's data.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping
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
import jinja2.utils
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from api.prompts.template_budget import (
    CONTAINERS,
    STEP_CHARACTERS,
    WIDE,
    TooMuch,
    built,
    charge,
    check_arguments,
    check_format,
    check_layout,
    check_power,
    check_product,
    check_sum,
    current,
    size_of,
    sized,
    weight_of,
)


def _paid(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compared(left: Any, right: Any) -> Any:
        if type(left) is str:
            if type(right) is str:
                charge(min(len(left), len(right)))
        elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            charge(size_of(left))
        return compare(left, right)

    return compared


def contained(value: Any, among: Any) -> bool:
    kind = type(among)
    if kind is str:
        charge(len(among))
    elif kind is dict:
        if type(value) is not str:
            charge(size_of(value))
    elif isinstance(among, Iterator):
        return any(COMPARISONS["eq"](value, each) for each in among)
    elif isinstance(among, (str, *CONTAINERS)):
        charge(len(among) * size_of(value))
    return value in among


COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: _paid(getattr(operator, name)) for name in ("eq", "ne", "lt", "gt")},
    "lteq": _paid(operator.le),
    "gteq": _paid(operator.ge),
    "in": contained,
    "notin": lambda value, among: not contained(value, among),
}
_TESTS = {
    "eq": ("==", "eq", "equalto"),
    "ne": ("!=", "ne"),
    "in": ("in",),
    "gt": (">", "gt", "greaterthan"),
    "gteq": (">=", "ge"),
    "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"),
}


def chained(value: Any, *others: tuple[str, Callable[[], Any]]) -> Any:
    """The result of `a < b < c`; operands after a false comparison are not computed."""
    found: Any = True
    for how, later in others:
        other = later()
        found = COMPARISONS[how](value, other)
        if not found:
            break
        value = other
    return found


def shown(value: Any) -> str:
    """A value as text: every expression that is output or joined by `~` passes through here."""
    if type(value) is str:
        budget = current()  # as in `charge`: nothing is done as often
        left = budget.left = budget.left - len(value)
        if left < budget.look_at:
            budget.look()
        return value
    charge(weight_of(value, texts=True))
    return str(value)


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
        if self._in_sum:  # what the whole sum makes is enough
            super().visit_Add(node, frame)
            return
        self._in_sum = isinstance(node.left, jinja2.nodes.Add) and not isinstance(node.right, jinja2.nodes.Add)
        self.write("environment.sized(")
        super().visit_Add(node, frame)
        self.write(")")
        self._in_sum = False

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self._in_sum = isinstance(node, jinja2.nodes.Add)  # it will be shown, and paid for there

    def _output_child_post(self, node: Any, frame: Any, finalize: Any) -> None:
        self._in_sum = False
        super()._output_child_post(node, frame, finalize)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("str_join((")
        for each in node.nodes:
            self.write("environment.shown(")
            self.visit(each, frame)
            self.write("), ")
        self.write("))")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if len(node.ops) > 1:
            self._chain(node, frame)
            return
        [compared] = node.ops
        if _is_literal(compared.expr) or (compared.op not in ("in", "notin") and _is_literal(node.expr)):
            super().visit_Compare(node, frame)  # takes no longer than the literal is
            return
        self.write(f"environment.comparisons[{compared.op!r}](")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(compared.expr, frame)
        self.write(")")

    def _chain(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.chained(")
        self.visit(node.expr, frame)
        for each in node.ops:
            self.write(f", ({each.op!r}, lambda: ")
            self.visit(each.expr, frame)
            self.write(")")
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._paid("built", super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._paid("built", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._paid("built", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

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
            self._paid("sized", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _paid(
        self, how: str, visit: Callable[..., None], node: jinja2.nodes.Node, frame: jinja2.compiler.Frame
    ) -> None:
        self.write(f"environment.{how}(")
        visit(node, frame)
        self.write(")")


def _is_literal(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, (jinja2.nodes.List, jinja2.nodes.Tuple)):
        return all(map(_is_literal, node.items))
    return isinstance(node, jinja2.nodes.Const)


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
    built = staticmethod(built)
    shown = staticmethod(shown)
    comparisons = COMPARISONS
    chained = staticmethod(chained)

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
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            check_format(left, "%", (right,))
        return sized(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = obj.__dict__.get("__wrapped__") if isinstance(obj, FunctionType) else obj  # the sandbox wraps `format`
        if not isinstance(method, (BuiltinMethodType, MethodType)) or method.__name__ in _LOOKS:
            return super().call(context, obj, *args, **kwargs)
        of = method.__self__
        if isinstance(of, str):
            charge(len(of))
        elif isinstance(of, (list, tuple, LoopContext)):  # `index`, `count` and `changed` compare
            charge(sum(map(size_of, args)) * (1 if isinstance(of, LoopContext) else len(of)))
        if method.__name__ == "join" and args:
            args = (list(args[0]), *args[1:])
        check_arguments(method.__name__, of, args, kwargs)
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
_ORDERED = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
_FREE = frozenset(("count", "d", "default", "first", "items", "last", "length"))
# No longer than what comes in.
_AS_LONG = frozenset(("capitalize", "lower", "safe", "string", "title", "trim", "upper"))
_SHALLOW = frozenset(("attr", "batch", "list", "map", "random", "reverse", "slice", "sum"))
_SHALLOW |= {"reject", "rejectattr", "select", "selectattr"}


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose input, expected output and actual output are charged for."""
    as_long = name in _AS_LONG
    at = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # where its value stands

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, others = args[at], args[at + 1 :]
        if as_long and type(value) is str:
            charge(len(value))
            return function(*args, **kwargs)
        if (name in ("join", "sum") or name in _ORDERED) and not isinstance(value, (str, *CONTAINERS)):
            value = list(value)
            args = (*args[:at], value, *others)
        shallow = name in _SHALLOW and isinstance(value, CONTAINERS)
        weight = len(value) if shallow else weight_of(value, texts=True)
        charge(weight * len(value).bit_length() if name in _ORDERED else weight)
        if name == "sum":
            check_sum(*others, **{key: kwargs[key] for key in kwargs if key == "start"})
        if name not in _ANY_NUMBER:
            check_arguments(name, value, others, kwargs)
        if name == "join":
            charge(len(value) * sum(len(str(each)) for each in (*others, *kwargs.values())))
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


def _dict(*args: Any, **kwargs: Any) -> Any:
    return built(dict(*args, **kwargs))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    check_layout(value, indent, separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=shown,
    )
    made.filters["tojson"] = _tojson
    made.tests |= {name: COMPARISONS[how] for how, names in _TESTS.items() for name in names}
    made.filters |= {name: _counted(name, made.filters[name]) for name in made.filters.keys() - _FREE}
    del made.globals["lipsum"]
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "range": _range, "dict": _dict}
    return made
