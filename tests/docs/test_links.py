"""Links lead somewhere, every page is in the index, and no page is too long to read."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT, WITH_LINKS, anchors, name_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"docs/[\w/-]+\.md(?:#[\w-]+)?")  # in code, manifests and messages
README_LINES, PAGE_LINES = 200, 350
SOURCES = (
    "api",
    "events",
    "fleet",
    "k8s",
    "kernels",
    "lab",
    "monitoring",
    "replica",
    "router",
    "Dockerfile",
    "Makefile",
)


def dangling(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text())
    return [link for link in LINK.findall(text) if "://" not in link and not leads_somewhere(page.parent, link)]


def leads_somewhere(folder: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (folder / path).resolve()
    # A link without a path leads to the page that it is on, which `dangling` has no name for: its folder's pages.
    pages = [target] if path else [page for page in WITH_LINKS if page.parent == folder]
    if not all(page.exists() for page in pages):
        return False
    return not anchor or any(anchor in names(page) for page in pages)


def names(target: Path) -> set[str]:
    if target.suffix == ".py":
        return {node.name for node in ast.parse(target.read_text()).body if isinstance(node, ast.FunctionDef)}
    return anchors(target.read_text())


@pytest.mark.parametrize("page", WITH_LINKS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert dangling(page) == []


@pytest.mark.parametrize("page", WITH_LINKS, ids=name_of)
def test_anchors_on_the_same_page_exist(page: Path) -> None:
    text = page.read_text()
    assert [
        link for link in LINK.findall(FENCE.sub("", text)) if link[0] == "#" and link[1:] not in anchors(text)
    ] == []


def test_a_link_to_nothing_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b: c\n[one](page.md#a-b-c) [two](page.md#b) [three](nothing.md)\n```sh\n[four](five)\n```\n")
    assert dangling(page) == ["page.md#b", "nothing.md"]


def test_pages_named_in_code_and_manifests_exist() -> None:
    files = [
        file for name in SOURCES for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    texts = {
        name_of(file): file.read_text()
        for file in files
        if file.suffix not in (".pyc", ".so", ".png") and file.is_file()
    }
    wrong = {
        name: link for name, text in texts.items() for link in NAMED.findall(text) if not leads_somewhere(ROOT, link)
    }
    assert wrong == {}


def test_the_index_has_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    linked = {name_of((ROOT / "docs" / link.partition("#")[0]).resolve()) for link in LINK.findall(text)}
    within = {name_of(page) for page in PAGES if page.parent.name != "decisions"}
    assert within - linked == {"README.md", "docs/README.md"}


def test_the_list_of_decisions_has_every_one_with_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(r"^\| \[(\d+)\]\((.+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [file for _, file, _ in rows] == [page.name for page in sorted(folder.glob("0*.md"))]
    for number, file, _ in rows:
        assert (folder / file).read_text().startswith(f"# {number}: ")


def test_no_page_is_too_long() -> None:
    longest = {name_of(page): README_LINES if page.name == "README.md" else PAGE_LINES for page in PAGES}
    lines = {name_of(page): len(page.read_text().splitlines()) for page in PAGES}
    assert {name: count for name, count in lines.items() if count > longest[name]} == {}
