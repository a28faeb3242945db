"""Measures the house: each package's rooms, floors and circles by its imports, its files in a folder, and its lines.

`python -m tests.house` prints the table; `python -m tests.house FOLDER`, that of another checkout beside it. Rooms are
the files and folders at the top of a package; one is above another if something in it imports something of the other,
even if only for types.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click

from api.process.options import KeyOption

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router")
Graph = Mapping[str, set[str]]


class Measures(NamedTuple):
    rooms: int
    floors: int
    in_circles: int  # rooms of the package, and modules anywhere in it, that import each other in a circle
    files: int  # in the folder that has most
    lines: int


class Import(NamedTuple):
    """One import statement, `import_module("x")` included."""

    module: str
    names: tuple[str, ...]  # that are taken from it
    line: int
    inside_function: bool

    @property
    def modules(self) -> list[str]:
        """Whatever may be a module: `from replica import runners` names `replica` and `replica.runners`."""
        return [self.module, *(f"{self.module}.{name}" for name in self.names)]


class File(NamedTuple):
    lines: int
    imports: list[Import]
    helpers: list[str]  # private functions and methods
    used: Counter[str]  # names


@cache
def read(path: Path) -> File:
    """Parse a file, once: several tests ask about all files of the packages."""
    source = path.read_text()
    file = File(len(source.splitlines()), [], [], Counter())
    _look(ast.parse(source), file, inside_function=False)
    return file


def _look(node: ast.AST, file: File, *, inside_function: bool) -> None:
    file.imports.extend(Import(*found, node.lineno, inside_function) for found in _imported_by(node))  # type: ignore[attr-defined]
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            inside_function = True
            if name.startswith("_") and not name.startswith("__"):
                file.helpers.append(name)
        case ast.Lambda():
            inside_function = True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            file.used[name] += 1
    for child in ast.iter_child_nodes(node):
        _look(child, file, inside_function=inside_function)


def _imported_by(node: ast.AST) -> list[tuple[str, tuple[str, ...]]]:
    match node:
        case ast.Import():
            return [(alias.name, ()) for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [(module, tuple(alias.name for alias in node.names))]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [(module, ())]
    return []


def files(root: Path = ROOT) -> Iterator[tuple[Path, File]]:
    """Yield the packages' files."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path, read(path)


def measured(package: Path) -> Measures:
    graph = modules(package)
    reached, of_rooms = reach(graph), reach(rooms(graph))
    return Measures(
        rooms=len(of_rooms),
        floors=max(floors(of_rooms).values(), default=0),
        in_circles=sum(name in others for found in (reached, of_rooms) for name, others in found.items()),
        files=max(Counter(path.parent for path in package.rglob("*.py")).values()),
        lines=sum(read(path).lines for path in package.rglob("*.py")),
    )


def modules(package: Path) -> dict[str, set[str]]:
    """Return the names of all modules, each with those among them that it imports."""
    found = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): read(path)
        for path in package.rglob("*.py")
    }
    return {
        name: {module for one in file.imports for module in one.modules} & found.keys() - {name}
        for name, file in found.items()
    }


def rooms(graph: Graph) -> dict[str, set[str]]:
    """Return the files and folders directly in the package, each with those that it imports from."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if "." in name:
            mine = name.split(".")[1]
            found.setdefault(mine, set()).update({other.split(".")[1] for other in others if "." in other} - {mine})
    return found


def reach(graph: Graph) -> dict[str, set[str]]:
    """Return all that each one imports, by way of others, too; who is in a circle reaches itself."""
    found = {name: set(others) for name, others in graph.items()}
    for middle in found:
        for others in found.values():
            if middle in others:
                others |= found[middle]
    return found


def floors(reached: Graph) -> dict[str, int]:
    """Return each one's floor: one above the highest that it imports. Those of one circle are on one floor."""
    floor: dict[str, int] = {}
    for name in sorted(reached, key=lambda name: (len(reached[name]), name not in reached[name])):
        below = [floor[other] for other in reached[name] - {name} if name not in reached[other]]
        floor[name] = 1 + max(below, default=0)
    return floor


def private_helpers(root: Path = ROOT) -> tuple[int, int]:
    """Count the private functions and methods, and those among them whose name is used once beside its definition."""
    helpers = [(file, name) for _, file in files(root) for name in file.helpers]
    return len(helpers), sum(file.used[name] == 1 for file, name in helpers)


def flags(command: click.Command) -> list[str]:
    """Return the command's options; keys of the configuration are none."""
    return [
        param.opts[0]
        for param in command.params
        if isinstance(param, click.Option) and not isinstance(param, KeyOption)
    ]


def importers(root: Path, module: str, name: str) -> int:
    """Count the modules that import this name, even if only for types."""
    return sum(any(one.module == module and name in one.names for one in file.imports) for _, file in files(root))


# Run in a checkout: a warm chat through its front, without sockets.
WALK = """
import logging, uvloop
from tests.bench import front as it
from tests.bench.measure import calls
async def main():
    logging.disable(logging.WARNING)
    front = it.FrontOnWires()
    *others, last = it.bodies(800, False, 0)[:9]
    for body in others:
        front.ask(body, [it.PLAIN])
    with calls() as made:
        front.ask(last, [it.PLAIN])
    upstream = next(n for n, file in enumerate(made) if file.endswith("members/upstream.py"))
    print(len(made), len({file for file in made[:upstream] if "/router/" in file}))
    await front.close()
uvloop.run(main())
"""


def of_checkout(root: Path) -> dict[str, str]:
    """Return the rows of the whole house, each with its figure in this checkout."""
    environment = os.environ | {"PYTHONPATH": str(root)}

    def printed(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout

    helpers, once = private_helpers(root)
    made, files = printed("-c", WALK).split()
    helps = (printed("-m", "fleet", name, "--help") for name in ("router", "replica"))
    options = (len(re.findall(r"^  --(?!help)", text, re.M)) for text in helps)
    packages = {name: measured(root / name) for name in PACKAGES if (root / name).exists()}
    return {name: ", ".join(f"{value:,}" for value in found) for name, found in packages.items()} | {
        "importers of `Router`": str(importers(root, "router.core", "Router")),
        "Python calls of a warm chat; files of router/ before the upstream": f"{made}; {files}",
        "flags of router / replica": " / ".join(map(str, options)),
        "private helpers that are used once": f"{once / helpers:.0%} of {helpers:,}",
        "lines of product Python": f"{sum(found.lines for found in packages.values()):,}",
    }


def main() -> None:
    roots = [*(Path(name).resolve() for name in sys.argv[1:2]), ROOT]
    columns = [of_checkout(root) for root in roots]
    print(f"| {', '.join(Measures._fields)} of |" + (" before |" if len(roots) > 1 else "") + " now |")
    print("| --- |" + " --- |" * len(roots))
    for name in columns[-1]:
        print(f"| {name} | " + " | ".join(column.get(name, "") for column in columns) + " |")


if __name__ == "__main__":
    main()
