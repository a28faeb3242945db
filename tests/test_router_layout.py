"""Structure of router/: its files and folders are rooms, and imports between rooms lead one way."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROUTER = Path(__file__).resolve().parent.parent / "router"
MOST_ROOMS = 40
MOST_FLOORS = 12


def imported(path: Path, *, for_types: bool) -> Iterator[str]:
    """Yield the modules that a file imports; `for_types`: those under `if TYPE_CHECKING:`, too."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            pending += ast.iter_child_nodes(node)


def modules(root: Path, *, for_types: bool) -> dict[str, set[str]]:
    """Return the names of all modules, each with those among them that it imports."""
    files = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    return {name: {*imported(path, for_types=for_types)} & files.keys() - {name} for name, path in files.items()}


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the files and folders directly in router/, each with those that it imports from."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if "." in name:
            mine = name.split(".")[1]
            found.setdefault(mine, set()).update({other.split(".")[1] for other in others if "." in other} - {mine})
    return found


def floors(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports; CycleError where they lead in a circle."""
    floor: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floor[name] = 1 + max((floor[other] for other in graph[name]), default=0)
    return max(floor.values())


@pytest.mark.parametrize("package", ["api", "engines", "events", "fleet", "kernels", "lab", "router"])
def test_no_module_imports_one_that_imports_it_not_even_for_types(package: str) -> None:
    assert floors(modules(ROUTER.with_name(package), for_types=True)) > 0


def test_rooms_are_few_and_lead_one_way() -> None:
    found = rooms(modules(ROUTER, for_types=False))
    print(f"{len(found)} rooms on {floors(found)} floors, {sum(map(len, found.values()))} arrows")
    assert len(found) <= MOST_ROOMS
    assert floors(found) <= MOST_FLOORS


def test_a_circle_is_caught(tmp_path: Path) -> None:
    for name, source in (
        ("a", "from router import b"),
        ("b", "if True:\n    import router.c"),
        ("c", "import router.a"),
    ):
        (tmp_path / "router").mkdir(exist_ok=True)
        (tmp_path / "router" / f"{name}.py").write_text(source)
    with pytest.raises(CycleError):
        floors(rooms(modules(tmp_path / "router", for_types=False)))
