"""The prefix tree: while it is read, when nothing is shared, and what a row says."""

from typing import Any

from playwright.sync_api import Route, expect

from tests.browser.pages import Visit


def prefix(name: str, prompts: int, *below: dict[str, Any], **more: Any) -> dict[str, Any]:
    shown = {
        "id": name, "model": "demo", "begin": 0, "tokens": 32, "prompts": prompts, "exact": True, "below": list(below),
        "text": f"{name} text", "replicas": ["r0"], "held_by": 1, "idle_s": 3.0, "sources": {},
    }  # fmt: skip
    return shown | more


def answer(page: Visit, *prefixes: dict[str, Any]) -> None:
    found = {"prompts": 100, "span_s": 60.0, "texts": True, "prefixes": list(prefixes)}
    page.page.route("**/prefixes?*", lambda route: route.fulfill(json=found))


def test_says_that_it_reads_and_then_that_nothing_is_shared(page: Visit) -> None:
    waiting: list[Route] = []
    page.page.route("**/prefixes?*", lambda route: waiting.append(route))
    page.open("/tree")
    expect(page.page.get_by_text("Reading the tree")).to_be_visible()
    for route in waiting:
        route.fulfill(json={"prompts": 0, "span_s": 0.0, "texts": True, "prefixes": []})
    expect(page.page.get_by_text("No two prompts have begun alike yet.")).to_be_visible()
    expect(page.page.get_by_text("Reading the tree")).to_have_count(0)


def test_a_row_has_its_place_in_the_tree_and_its_holders(page: Visit) -> None:
    below = prefix("below", 9, sources={"r0": "CPU"})
    answer(page, prefix("above", 60, below), prefix("gone", 5, replicas=[], held_by=0))
    page.open("/tree")
    rows = page.page.get_by_role("table", name="Shared prefixes").locator("tbody tr")
    expect(rows.get_by_role("rowheader")).to_have_text(["above text", "below text", "gone text"])
    expect(rows.nth(0).locator(".meter span")).to_have_attribute("style", "width: 60%;")
    expect(rows.nth(1).locator(".indent")).to_have_count(1)
    expect(rows.nth(1)).to_contain_text("r0 (host memory)")
    expect(rows.nth(1)).to_contain_text("256")  # tokens saved
    expect(rows.nth(2)).to_contain_text("nobody")
