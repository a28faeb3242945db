"""Requests on the lanes of their replicas, and the prefill that caches have saved."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from playwright.sync_api import Browser, expect

from tests.browser.feeds import altered
from tests.browser.pages import NARROW, Visit, visit
from tests.browser.world import World, another_router, talk
from tests.events.processes import wait_until

Visiting = Callable[..., AbstractContextManager[Visit]]


def test_each_request_flows_to_its_replica_by_how_much_was_cached(page: Visit, world: World) -> None:
    page.page.add_init_script(WATCH_PILLS)
    page.open()
    expect(page.page.locator(".lane")).to_have_count(3)
    talk(world.url, 2, seed=4711)
    decided = world.router.decisions(20)

    def flown() -> set[tuple[str, str]]:
        return {tuple(one) for one in page.page.evaluate("window.flown")}

    expected = {(one["chosen"], shown_share(one)) for one in decided[:6]}
    wait_until(lambda: expected <= flown(), f"{expected} have flown")


# Pills vanish at the end of their lanes.
WATCH_PILLS = """
window.flown = [];
new MutationObserver((changes) => {
  for (const { target, addedNodes } of changes)
    for (const pill of addedNodes)
      if (pill.classList?.contains("pill"))
        window.flown.push([target.parentElement.firstChild.textContent, pill.style.getPropertyValue("--warm-share")]);
}).observe(document, { childList: true, subtree: true });
"""


def shown_share(decision: dict[str, Any]) -> str:
    cached = decision["reported_cached_tokens"] or 0
    return f"{int(100 * cached / decision['prompt_tokens'] + 0.5)}%"


def test_pills_stand_still_for_those_who_want_no_motion(visiting: Visiting, world: World) -> None:
    with visiting(NARROW, reduced_motion="reduce") as calm:
        calm.open()
        talk(world.url, 1, seed=4712)
        expect(calm.page.locator(".pill").first).to_be_visible()
        assert calm.page.evaluate("document.getAnimations().length") == 0


def test_lanes_and_pills_are_bounded_in_a_large_busy_fleet(page: Visit) -> None:
    def grows(frame: dict[str, Any]) -> None:
        [row] = frame["replicas"][:1]
        frame["replicas"] = [
            {**row, "name": f"n{number}", "recent": {**row["recent"], "requests_per_s": 100 - number}}
            for number in range(100)
        ]
        frame["totals"] |= {"replicas": 500, "requests_per_s": 9000.0}
        frame["decisions"] = [
            {**json.loads(json.dumps(frame["decisions"][0])), "chosen": "n0", "request_id": str(number)}
            for number in range(80)
        ]

    altered(page.page, page.router_url, grows)
    page.open()
    expect(page.page.locator(".lane")).to_have_count(9)
    expect(page.page.locator(".lane").last).to_contain_text(re.compile("492 others.*/s"))
    expect(page.page.get_by_text("80 requests of 9,000/s drawn")).to_be_visible()
    assert page.page.locator(".lane", has_text="n0").locator(".pill").count() <= 24


def test_saved_prefill_is_shown_in_tokens_time_and_money(browser: Browser, world: World) -> None:
    with (
        another_router(world, "--set=price_per_million_tokens=1000") as priced,
        visit(browser, priced.url) as made,
    ):
        talk(priced.url, 3, seed=4713)
        saved = sum(one["reported_cached_tokens"] for one in priced.decisions(100))
        assert saved > 100
        made.open()
        total = made.page.locator(".total", has_text="Prefill saved")
        expect(total).to_contain_text(f"{saved / 1000:,.2f}, since the start")
        expect(total).to_contain_text(re.compile(r"tokens, [\d.]+ m?s, worth"))
