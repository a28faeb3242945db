"""Each claim of docs/concepts.md is held by a test that is really there."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#(\w+))?\)")


def dangling(page: str, folder: Path) -> list[str]:
    """The links of a page to files, or to tests in them, that are not there."""
    return [
        f"{path}#{test}" if test else path
        for path, test in LINK.findall(page)
        if not (folder / path).is_file() or (test and test not in names_of(folder / path))
    ]


def names_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_claim_is_held_by_a_test_that_exists() -> None:
    page = PAGE.read_text()
    assert dangling(page, PAGE.parent) == []
    assert len({test for _, test in LINK.findall(page) if test}) >= 25


def test_a_link_to_a_test_that_was_renamed_would_be_noticed() -> None:
    here = f"../tests/replica/{Path(__file__).name}"
    page = f"[a]({here}) [b]({here}#test_a_link_to_nothing) [c](../tests/replica/test_nothing.py#test_x)"
    assert dangling(page, PAGE.parent) == [f"{here}#test_a_link_to_nothing", "../tests/replica/test_nothing.py#test_x"]
