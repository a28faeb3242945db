"""The house stays small: what `python -m tests.house` measures has a budget, which is only ever lowered.

A change that exceeds a budget is too large for its room: take something out, or build it elsewhere.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOT, Measures, floors, importers, measured, modules, private_helpers, reach, rooms

BUDGETS = {
    "api": Measures(rooms=17, floors=9, in_circles=0, files=11, lines=7_234),
    "engines": Measures(rooms=7, floors=4, in_circles=0, files=8, lines=1_725),
    "events": Measures(rooms=16, floors=8, in_circles=0, files=14, lines=8_901),
    "fleet": Measures(rooms=11, floors=5, in_circles=0, files=10, lines=6_480),
    "kernels": Measures(rooms=12, floors=5, in_circles=0, files=12, lines=2_181),
    "lab": Measures(rooms=11, floors=4, in_circles=0, files=10, lines=7_403),
    "replica": Measures(rooms=20, floors=7, in_circles=0, files=12, lines=13_474),
    "router": Measures(rooms=17, floors=9, in_circles=0, files=18, lines=27_320),
}
SHARE_OF_HELPERS_USED_ONCE = 0.367
LINES_OF_TESTS = {"tests": 97_666, "qualification": 8_653}
INTRUSIONS = (181, 99)  # see below; the parts replaced include faults that a test plants
OF_NAMEDTUPLE = ("_asdict", "_fields", "_replace")
IMPORTERS_OF_ROUTER = 2  # where it is assembled: the process, and the app


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_keeps_its_budget(package: str) -> None:
    found, budget = measured(ROOT / package), BUDGETS[package]
    over = {name: value for name, value in found._asdict().items() if value > getattr(budget, name)}
    assert not over, f"{package}/ has a budget of {budget}"


@pytest.mark.parametrize("folder", LINES_OF_TESTS)
def test_tests_keep_their_budget(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= LINES_OF_TESTS[folder]


def test_control_flow_is_not_scattered_over_helpers() -> None:
    helpers, once = private_helpers()
    assert once / helpers <= SHARE_OF_HELPERS_USED_ONCE


def test_tests_reach_no_further_into_the_house() -> None:
    """Count reads of others' private attributes, and replaced parts that are no constant, as bounds and pauses are."""
    reads = replaced = 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                reads += ast.unparse(node.value) not in ("self", "cls", "super()") and node.attr not in OF_NAMEDTUPLE
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
                named = [part.value for part in node.args[:2] if isinstance(part, ast.Constant)]
                replaced += not (named and str(named[-1]).rpartition(".")[2].isupper())
    assert reads <= INTRUSIONS[0]
    assert replaced <= INTRUSIONS[1]


def test_whole_router_goes_only_to_where_it_is_assembled() -> None:
    assert importers(ROOT, "router.core", "Router") <= IMPORTERS_OF_ROUTER


def test_a_circle_is_counted(tmp_path: Path) -> None:
    for name, source in (
        ("a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import b"),
        ("b", "def late():\n    import house.c"),
        ("c", "import house.a"),
        ("above", "import house.c"),
        ("below", ""),
    ):
        (tmp_path / "house").mkdir(exist_ok=True)
        (tmp_path / "house" / f"{name}.py").write_text(source)
    assert floors(reach(rooms(modules(tmp_path / "house")))) == {"a": 1, "b": 1, "c": 1, "above": 2, "below": 1}
    assert measured(tmp_path / "house") == Measures(rooms=5, floors=2, in_circles=6, files=5, lines=7)
