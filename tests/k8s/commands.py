"""Command lines of ours in manifests, read as click reads them; nothing is started, and no file has to be there."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click

from fleet.cli import warmroute
from tests.k8s.rendered import ROOT, Object, Pod, pods, rendered

PACKAGES = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router")
# What a downward value may look like when the container starts.
SEEN = {"status.podIP": "10.0.0.7", "metadata.name": "warmroute-0", "metadata.namespace": "warmroute"}


class Line(NamedTuple):
    where: str
    words: tuple[str, ...]  # without `warmroute` itself

    def values(self) -> dict[str, Any]:
        """Values by parameter; click.UsageError for refused ones."""
        context = click.Context(warmroute, info_name="warmroute")
        name, command, words = warmroute.resolve_command(context, list(self.words))
        if isinstance(command, click.Group):
            name, command, words = command.resolve_command(context, words)
        assert command is not None and name is not None, f"{self.where}: no command `warmroute {self.words[0]}`"
        with click.Context(command, parent=context, info_name=name) as own:
            given, rest, _ = command.make_parser(own).parse_args(args=list(words))
            if rest:
                raise click.UsageError(f"{self.where}: {rest} is too much for `warmroute {name}`")
            return {param.name: _converted(own, param, given.get(param.name)) for param in command.params if param.name}


def _converted(context: click.Context, param: click.Parameter, given: Any) -> Any:
    """As its type has it. Files are those of the container."""
    missing = not isinstance(given, str | int | float | list | tuple)  # click has a mark of its own for that
    if missing and param.required:
        raise click.MissingParameter(ctx=context, param=param)
    return None if missing else given if isinstance(param.type, click.Path) else param.type_cast_value(context, given)


def lines(pod: Pod) -> list[Line]:
    found: list[Line] = []
    for each in pod.containers:
        where = f"{pod.owner}, {each['name']}"
        expanded = [_expanded(word, variables(each)) for word in [*each.get("command", []), *each.get("args", [])]]
        if expanded[:1] == ["warmroute"]:
            found.append(Line(where, tuple(expanded[1:])))
        hooks = each.get("lifecycle", {}).values()
        scripts = [word for hook in hooks for word in hook.get("exec", {}).get("command", [])]
        found += [Line(where, words) for script in scripts for words in _of_shell(script, variables(each))]
    return found


def all_lines(variant: str) -> list[tuple[Pod, Line]]:
    return [(pod, line) for pod in pods(rendered(variant)) for line in lines(pod)]


def values_of(variant: str, command: str) -> dict[str, Any]:
    [found] = [line.values() for _, line in all_lines(variant) if line.words[0] == command]
    return found


def _of_shell(script: str, known: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for command in re.split(r";|&&|\|\|", script):
        words = [_expanded(re.sub(r"\$(\w+)", r"$(\1)", word), known) for word in shlex.split(command)]
        if words[:1] == ["warmroute"]:
            yield tuple(words[1:])


def variables(each: Object) -> dict[str, str]:
    """Variables as the container sees them, with a placeholder for Secrets."""
    found: dict[str, str] = {}
    for variable in each.get("env", []):
        source = variable.get("valueFrom", {})
        path = source.get("fieldRef", {}).get("fieldPath")
        found[variable["name"]] = variable.get("value", SEEN[path] if path else "a-secret")
    return found


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """$(NAME), as the kubelet replaces it: one that is not known would stay as it is."""
    for name in re.findall(r"\$\((\w+)\)", word):
        assert name in known, f"$({name}) in {word!r} is not a variable of its container"
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word)


def known_variables() -> set[str]:
    """Every WARMROUTE_... that our code reads: as an option's variable, or by its name."""
    context = click.Context(warmroute)
    commands = [warmroute.resolve_command(context, [name])[1] for name in warmroute.list_commands(context)]
    options = [param for command in commands if command is not None for param in command.params]
    by_option = {param.envvar for param in options if isinstance(param.envvar, str)}
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return by_option | {name for text in sources for name in re.findall(r'"(WARMROUTE_[A-Z_]+)"', text)}
