"""The prefix tree: while it is read, when nothing is shared, and its bars at every width."""

from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.browser.pages import Visit


def prefix(name: str, prompts: int, *below: dict[str, Any], **more: Any) -> dict[str, Any]:
    shown = {
        "id": name, "model": "demo", "begin": 0, "tokens": 32, "prompts": prompts, "exact": True, "below": list(below),
        "text": f"{name} text", "replicas": ["r0"], "held_by": 1, "idle_s": 3.0, "retained_s": None, "sources": {},
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
    expect(page.page.locator(".icicle")).to_be_hidden()
    for route in waiting:
        route.fulfill(json={"prompts": 0, "span_s": 0.0, "texts": True, "prefixes": []})
    expect(page.page.get_by_text("No two prompts have begun alike yet.")).to_be_visible()
    expect(page.page.get_by_text("Reading the tree")).to_have_count(0)


def test_narrow_bars_keep_words_that_can_be_read(page: Visit) -> None:
    children = [prefix(f"question {number}", 10) for number in range(10)]
    answer(page, prefix("instructions", 100, *children))
    page.open("/tree")
    node = page.page.locator(".icicle .node", has_text="question 4")
    words, under = node.locator(".words > span").first, node.locator(".under")
    expect(words).to_be_visible()
    expect(under).to_be_hidden()
    assert words.evaluate("node => node.scrollWidth <= node.clientWidth && node.scrollHeight <= node.clientHeight + 1")
    node.click()  # now it is as wide as the tree
    expect(under).to_have_text("32 tokens, 10 prompts")


def test_models_are_told_apart_when_there_are_several(page: Visit) -> None:
    answer(page, prefix("one", 60), prefix("two", 40, model="other"))
    page.open("/tree")
    bars = page.page.locator(".icicle .node:not(.trunk)")
    expect(bars).to_have_count(2)
    page.page.get_by_label("Model", exact=True).select_option("other")
    expect(bars).to_have_count(1)
    expect(bars).to_contain_text("two text")


def test_prefix_that_nobody_holds_is_marked_and_explained(page: Visit) -> None:
    answer(page, prefix("gone", 5, replicas=[], held_by=0), prefix("below", 9, sources={"r0": "CPU"}, retained_s=600))
    page.open("/tree")
    cold = page.page.locator(".icicle .node.cold")
    cold.hover()
    expect(page.page.get_by_text("No replica holds all of it")).to_be_visible()
    page.page.locator(".icicle .node", has_text="below text").hover()
    expect(page.page.get_by_text("(host memory)").last).to_be_visible()
    expect(page.page.get_by_text("Given up last for another 10 min")).to_be_visible()


def test_width_stands_for_prompts_or_for_tokens(page: Visit) -> None:
    answer(page, prefix("few", 10, tokens=900), prefix("many", 90, tokens=100))
    page.open("/tree")
    many = page.page.locator(".icicle .node", has_text="many text")
    expect(many).to_be_visible()
    assert share_of(many) == pytest.approx(0.9)
    page.page.get_by_role("button", name="By tokens").click()
    assert share_of(many) == pytest.approx(0.1)


def share_of(node: Any) -> float:
    return float(node.evaluate("node => parseFloat(node.style.width) / 100"))
