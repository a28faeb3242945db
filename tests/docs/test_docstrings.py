"""Docstrings say what is returned or done: an imperative, or a noun phrase."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router", "tests", "qualification")
RELATIVE = re.compile(r"(Of|What|Who|Whether)\b")
QUOTED = re.compile(rf"[\"']\s*{RELATIVE.pattern}")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def relative_clauses(source: str) -> Iterator[str]:
    """Yield the first lines of docstrings that begin with a relative clause in place of a noun."""
    if not QUOTED.search(source):
        return  # parsing takes a hundred times as long
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and RELATIVE.match(text := ast.get_docstring(node) or ""):
            yield text.partition("\n")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_relative_clause(package: str) -> None:
    found = {path: [*relative_clauses(path.read_text())] for path in (ROOT / package).rglob("*.py")}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_a_relative_clause_is_found() -> None:
    assert [*relative_clauses('def f():\n    """Whether it is full.\n\n    More.\n    """')] == ["Whether it is full."]
    assert [*relative_clauses('"""Office hours."""')] == []
