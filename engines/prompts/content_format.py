"""Finds out whether a chat template loops over the parts of a message's content, or takes it as one text.

Engines decide from the template's syntax tree which of the two it gets, and so does the router. A template that hides
its loop costs no wrong tokens: prompts are compared with the engine's (`router.prompts.shapes`).
"""

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(template: nodes.Template) -> bool:
    """Return whether the template loops over the parts of a content."""
    messages = {"messages"}  # and all that are assigned from them
    assigned = list(template.find_all(nodes.Assign))
    while found := {name for one in assigned for name in _assigned(one, messages)} - messages:
        messages |= found
    items = {target.name for loop, target in _loops(template) if _is_one_of(loop.iter, messages)}
    handed = _parameters_for_content(template, items)
    in_macros = {id(loop) for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop, _ in _loops(template):
        looped = _unwrapped(loop.iter)
        if _is_content_of(looped, items):
            return True
        if isinstance(looped, nodes.Name) and looped is loop.iter:
            if looped.name in handed.get(id(loop), ()):
                return True
            if looped.name == "content" and id(loop) not in in_macros:
                return True
    return False


def loops_over_content(template: nodes.Template, names: set[str]) -> bool:
    """Return whether the template loops over the content of a variable with one of these names."""
    return any(_is_content_of(loop.iter, names) for loop in template.find_all(nodes.For))


def _loops(root: nodes.Node) -> Iterator[tuple[nodes.For, nodes.Name]]:
    for loop in root.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop, loop.target


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """The node below filters, tests and slices."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _dotted(node: nodes.Node | None) -> str | None:
    """The name of a variable or of a namespace's attribute, such as `ns.rest`."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and (base := _dotted(node.node)) is not None:
        return f"{base}.{node.attr}"
    return None


def _is_one_of(node: nodes.Node | None, names: set[str]) -> bool:
    return _dotted(_unwrapped(node)) in names


def _assigned(one: nodes.Assign, known: set[str]) -> Iterator[str]:
    target, value = _dotted(one.target), one.node
    if target is None:
        return
    if _is_one_of(value, known):
        yield target
    elif isinstance(value, nodes.Call) and _dotted(value.node) == "namespace":
        yield from (f"{target}.{given.key}" for given in value.kwargs if _is_one_of(given.value, known))


def _is_content_of(node: nodes.Node | None, items: set[str]) -> bool:
    node = _unwrapped(node)
    if isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return named and _dotted(node.node) in items
    return isinstance(node, nodes.Getattr) and node.attr == "content" and _dotted(node.node) in items


def _parameters_for_content(root: nodes.Node, items: set[str]) -> dict[int, set[str]]:
    """By loop within a macro: the macro's parameters that some call hands a content to."""
    calls = list(root.find_all(nodes.Call))
    found: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        handed: set[str] = set()
        for call in calls:
            if _dotted(call.node) != macro.name:
                continue
            by_place = zip(names, call.args, strict=False)
            by_name = [(given.key, given.value) for given in call.kwargs if given.key in names]
            handed.update(name for name, value in (*by_place, *by_name) if _is_content_of(value, items))
        found |= {id(loop): handed for loop in macro.find_all(nodes.For)}
    return found
