"""Measures the house: each package's rooms, floors and circles by its imports, its files in a folder, and its lines.

`python -m tests.house` prints the table. Rooms are the files and folders at the top of a package; one is above another
if something in it imports something of the other, even if only for types.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click

from api.process.options import KeyOption
from replica.cli import replica
from router.process.cli import router

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router")
Graph = Mapping[str, set[str]]


class Measures(NamedTuple):
    rooms: int
    floors: int
    in_circles: int  # rooms of the package, and modules anywhere in it, that import each other in a circle
    files: int  # in the folder that has most
    lines: int


def measured(package: Path) -> Measures:
    graph = modules(package)
    reached, of_rooms = reach(graph), reach(rooms(graph))
    return Measures(
        rooms=len(of_rooms),
        floors=floors(of_rooms),
        in_circles=sum(name in others for found in (reached, of_rooms) for name, others in found.items()),
        files=max(Counter(path.parent for path in package.rglob("*.py")).values()),
        lines=sum(len(path.read_text().splitlines()) for path in package.rglob("*.py")),
    )


def modules(package: Path) -> dict[str, set[str]]:
    """Return the names of all modules, each with those among them that it imports."""
    files = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    return {name: {*_imported(path)} & files.keys() - {name} for name, path in files.items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


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


def floors(reached: Graph) -> int:
    """Return the length of the longest chain of imports; those of one circle are on one floor."""
    floor: dict[str, int] = {}
    for name in sorted(reached, key=lambda name: (len(reached[name]), name not in reached[name])):
        below = [floor[other] for other in reached[name] - {name} if name not in reached[other]]
        floor[name] = 1 + max(below, default=0)
    return max(floor.values(), default=0)


def private_helpers() -> tuple[int, int]:
    """Count the private functions and methods, and those among them whose name is used once beside its definition."""
    defined, used = list[str](), Counter[str]()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.startswith("__"):
                    defined.append(f"{path} {node.name}")
            elif isinstance(node, ast.Name | ast.Attribute):
                used[f"{path} {node.id if isinstance(node, ast.Name) else node.attr}"] += 1
    return len(defined), sum(used[name] == 1 for name in defined)


def flags(command: click.Command) -> list[str]:
    """Return the command's options; keys of the configuration are none."""
    return [
        param.opts[0]
        for param in command.params
        if isinstance(param, click.Option) and not isinstance(param, KeyOption)
    ]


def main() -> None:
    print("| package | " + " | ".join(Measures._fields) + " |")
    print("| --- |" + " --- |" * len(Measures._fields))
    total = 0
    for package in PACKAGES:
        found = measured(ROOT / package)
        total += found.lines
        print(f"| {package} | " + " | ".join(f"{value:,}" for value in found) + " |")
    helpers, once = private_helpers()
    print(f"\n{total:,} lines of product Python; {once / helpers:.0%} of {helpers:,} private helpers are used once.")
    print(f"`warmroute router` has {len(flags(router))} flags, `warmroute replica` {len(flags(replica))}.")


if __name__ == "__main__":
    main()
