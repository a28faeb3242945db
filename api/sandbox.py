"""Jinja's sandbox for chat templates, with a budget for the output and time of a template.

A template is a program of a model's author, run on a client's data. It has a budget of characters: every round of a
loop, every call of a macro, and every value that is made costs some. The clock is looked at as the budget is spent.
Nothing that takes long or grows stands between two costs: numbers, widths and repetitions are looked at before.
"""

import json
import operator
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from string import Formatter
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

MOST_CHARACTERS = 128 * 1024 * 1024  # made by one rendering, in all
MOST_SECONDS = 2.0
STEP_CHARACTERS = 64  # the cost of a round or a call
LOOK_EVERY = 4096  # characters: then the clock is looked at
LARGEST_INTEGER_BITS = 4096
LARGEST_WIDTH = 4096  # of what is padded, indented or wrapped
LARGEST_INDENT = 16  # of JSON
DEEPEST_INDENTED = 32  # values in values: each line begins with as many indents
_WIDE = re.compile(r"\d{5,}|\*")  # a width in a format


class TooMuch(jinja2.TemplateError):
    """The template exceeded its budget."""


class Budget:
    """The budget left to one rendering."""

    __slots__ = ("left", "look_at", "until_s")

    def __init__(self) -> None:
        self.left = MOST_CHARACTERS
        self.look_at = MOST_CHARACTERS - LOOK_EVERY
        self.until_s = time.monotonic() + MOST_SECONDS

    def look(self, wanted: int = 0) -> None:
        if self.left < wanted:
            raise TooMuch(f"it makes more than {MOST_CHARACTERS} characters of them")
        if time.monotonic() > self.until_s:
            raise TooMuch(f"it takes longer than {MOST_SECONDS:g} s")
        self.look_at = self.left - LOOK_EVERY


_budget: ContextVar[Budget] = ContextVar("budget")
_current = _budget.get


def grant() -> None:
    """Start the budget of a rendering or compilation on this thread."""
    _budget.set(Budget())


def charge(characters: int) -> None:
    budget = _current()
    left = budget.left = budget.left - characters
    if left < budget.look_at:
        budget.look()


def sized(value: Any) -> Any:
    """Charge for a value: a text, or a container of values charged before."""
    if isinstance(value, (str, *_CONTAINERS)):
        charge(len(value))
    return value


def built(value: Any) -> Any:
    """Charge for a new container, including its nested containers: none can double without end."""
    charge(_weight(value))
    return value


_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


def _weight(value: Any, *, texts: bool = False) -> int:
    """The number of nested values, counted repeatedly; with `texts`, about the length of the written value."""
    weight, look_at, pending = 0, LOOK_EVERY, [value]
    while pending:
        each = pending.pop()
        weight += len(each) + 4 if texts and isinstance(each, str) else 1
        if isinstance(each, jinja2.utils.Namespace):
            each = each._Namespace__attrs
        if isinstance(each, dict):
            pending += each.values()
            if texts:
                pending += each
        elif isinstance(each, _CONTAINERS):
            pending += each
        elif isinstance(each, int) and each.bit_length() > LARGEST_INTEGER_BITS:
            raise TooMuch("it makes an integer of more than a thousand digits")
        if weight > look_at:
            _current().look(weight)
            look_at = weight + LOOK_EVERY
    return weight


def _size(value: Any) -> int:
    """The cost of comparing or hashing the value."""
    if type(value) is str:
        return len(value) + 1
    return _weight(value, texts=True) if isinstance(value, (str, *_CONTAINERS)) else 1


def _paid(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compared(left: Any, right: Any) -> Any:
        if type(left) is str:
            if type(right) is str:
                charge(min(len(left), len(right)))
        elif isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            charge(_size(left))
        return compare(left, right)

    return compared


def contained(value: Any, among: Any) -> bool:
    kind = type(among)
    if kind is str:
        charge(len(among))
    elif kind is dict:
        if type(value) is not str:
            charge(_size(value))
    elif isinstance(among, Iterator):
        return any(COMPARISONS["eq"](value, each) for each in among)
    elif isinstance(among, (str, *_CONTAINERS)):
        charge(len(among) * _size(value))
    return value in among


COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: _paid(getattr(operator, name)) for name in ("eq", "ne", "lt", "gt")},
    "lteq": _paid(operator.le),
    "gteq": _paid(operator.ge),
    "in": contained,
    "notin": lambda value, among: not contained(value, among),
}
_TESTS = {
    "==": "eq",
    "eq": "eq",
    "equalto": "eq",
    "!=": "ne",
    "ne": "ne",
    "in": "in",
    ">": "gt",
    "gt": "gt",
    "greaterthan": "gt",
    "ge": "gteq",
    ">=": "gteq",
    "<": "lt",
    "lt": "lt",
    "lessthan": "lt",
    "le": "lteq",
    "<=": "lteq",
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
        budget = _current()  # as in `charge`: nothing is done as often
        left = budget.left = budget.left - len(value)
        if left < budget.look_at:
            budget.look()
        return value
    charge(_weight(value, texts=True))
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
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        value = obj.get(attribute, _MISSING)
        return self.undefined(obj=obj, name=attribute) if value is _MISSING else value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _DECIDED_BY_TYPE:
            return self._is_safe_of_type(type(obj), attr)  # type: ignore[arg-type]  # types are hashable
        return attr not in _OF_BYTES and super().is_safe_attribute(obj, attr, value)

    @lru_cache(maxsize=1024)  # noqa: B019  # there is one environment, which lives as long as the process
    def _is_safe_of_type(self, of_type: type, attr: str) -> bool:
        return attr not in _OF_BYTES and super().is_safe_attribute(_DECIDED_BY_TYPE[of_type], attr, None)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_format(left, "%", (right,))
        return sized(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = obj.__dict__.get("__wrapped__") if isinstance(obj, FunctionType) else obj  # the sandbox wraps `format`
        if not isinstance(method, (BuiltinMethodType, MethodType)) or method.__name__ in _LOOKS:
            return super().call(context, obj, *args, **kwargs)
        of = method.__self__
        if isinstance(of, str):
            charge(len(of))
        elif isinstance(of, (list, tuple, jinja2.runtime.LoopContext)):  # `index`, `count` and `changed` compare
            charge(sum(map(_size, args)) * (1 if isinstance(of, jinja2.runtime.LoopContext) else len(of)))
        if method.__name__ == "join" and args:
            args = (list(args[0]), *args[1:])
        _check_arguments(method.__name__, of, args, kwargs)
        return sized(super().call(context, obj, *args, **kwargs))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > LARGEST_INTEGER_BITS:
            raise TooMuch("it multiplies integers to more than a thousand digits")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, (str, list, tuple)):
            charge(max(0, times) * max(1, len(repeated)))  # before it is made


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > LARGEST_INTEGER_BITS:
        raise TooMuch("it computes a power of more than a thousand digits")


def _check_format(text: str, mark: str, values: Iterable[Any]) -> None:
    if _WIDE.search(text):
        raise TooMuch(f"it formats with {text[:80]!r}; a width has at most 4 digits")
    if mark == "{" and any("{" in (form or "") for _, _, form, _ in Formatter().parse(text)):
        raise TooMuch(f"it formats with {text[:80]!r}; a width is a number, not a field")
    charge(text.count(mark) * sum(_weight(value, texts=True) for value in values))


def _check_arguments(name: str, of: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Charge for the result of a method or filter that may be much larger than its input."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, int) and value > LARGEST_WIDTH for value in values):
        raise TooMuch(f"it calls {name} with a number above {LARGEST_WIDTH}")
    if not isinstance(of, str):
        return
    if name in ("format", "format_map"):
        _check_format(of, "%" if name == "format" and "{" not in of else "{", values)
    elif name == "replace" and values[1:] and isinstance(values[0], str):
        charge(of.count(values[0]) * len(str(values[1])))
    elif name == "join" and args and isinstance(args[0], list):
        charge(len(args[0]) * len(of) + _weight(args[0], texts=True))
    elif name == "translate" and args:
        charge(len(of) * _longest(args[0]))
    elif name in ("indent", "wordwrap", "expandtabs"):
        widest = max((len(value) if isinstance(value, str) else LARGEST_WIDTH for value in values), default=8)
        charge((of.count("\n") + of.count("\t") + 1) * widest)


def _check_sum(_attribute: Any = None, start: Any = 0) -> None:
    """Require numbers in a sum that starts with a number: adding lists would copy them again and again."""
    if not isinstance(start, (int, float)):
        raise TooMuch(f"it sums from {type(start).__name__}; give a number")


def _longest(table: Any) -> int:
    """The length of the longest text that `translate` may substitute for a character."""
    if not isinstance(table, dict):
        raise TooMuch(f"it translates with {type(table).__name__}; give a dict")
    charge(len(table))
    return max((len(text) for text in table.values() if isinstance(text, str)), default=1)


_MISSING = object()
_DICT_ATTRIBUTES = frozenset(dir(dict))
# The sandbox's verdict on an attribute asks for the object's type alone; an object of each type to ask with.
_DECIDED_BY_TYPE: dict[type, Any] = {
    str: "",
    dict: {},
    list: [],
    jinja2.runtime.LoopContext: jinja2.runtime.LoopContext((), jinja2.Undefined, None),
}
_OF_BYTES = frozenset(("encode", "from_bytes", "to_bytes"))  # the methods of bytes are not charged for
_LOOKS = frozenset(("get", "items", "keys", "values"))
_ANY_NUMBER = frozenset(("float", "int", "string"))
_ORDERED = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
_FREE = frozenset(("count", "d", "default", "first", "items", "last", "length"))
_AS_LONG = frozenset(
    ("capitalize", "lower", "safe", "string", "title", "trim", "upper")
)  # no longer than what comes in
_SHALLOW = frozenset(
    (
        "attr",
        "batch",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sum",
    )
)


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
        if (name in ("join", "sum") or name in _ORDERED) and not isinstance(value, (str, *_CONTAINERS)):
            value = list(value)
            args = (*args[:at], value, *others)
        shallow = name in _SHALLOW and isinstance(value, _CONTAINERS)
        weight = len(value) if shallow else _weight(value, texts=True)
        charge(weight * len(value).bit_length() if name in _ORDERED else weight)
        if name == "sum":
            _check_sum(*others, **{key: kwargs[key] for key in kwargs if key == "start"})
        if name not in _ANY_NUMBER:
            _check_arguments(name, value, others, kwargs)
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
    if _WIDE.search(format):
        raise TooMuch(f"it formats the time with {format[:80]!r}")
    return datetime.now().strftime(format)


def _range(*args: int) -> range:
    made = jinja2.sandbox.safe_range(*args)
    charge(len(made))
    return made


def _dict(*args: Any, **kwargs: Any) -> Any:
    return built(dict(*args, **kwargs))


def _check_layout(value: Any, indent: int | None, separators: tuple[str, str] | None) -> None:
    """Charge for the separators in JSON; the values are charged, so their number is bounded."""
    if indent is None and separators is None:
        return
    if isinstance(indent, str) or (isinstance(indent, int) and indent > LARGEST_INDENT):
        raise TooMuch(f"it indents JSON by {str(indent)[:80]!r}; give a number of at most {LARGEST_INDENT}")
    between = sum(map(len, separators)) if separators else len(", : ")
    indent = max(0, indent) if isinstance(indent, int) else 0
    level, depth = [value], 0
    while level:
        if indent and depth > DEEPEST_INDENTED:
            raise TooMuch(f"it indents JSON that is nested deeper than {DEEPEST_INDENTED}; nest less")
        charge(len(level) * (between + indent * depth))
        level = [child for each in level for child in _children(each)]
        depth += 1


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    _check_layout(value, indent, separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=shown,
    )
    made.filters["tojson"] = _tojson
    made.tests |= {name: COMPARISONS[how] for name, how in _TESTS.items()}
    made.filters |= {name: _counted(name, made.filters[name]) for name in made.filters.keys() - _FREE}
    del made.globals["lipsum"]
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "range": _range, "dict": _dict}
    return made
