"""The replicas that were weighed, what each would cost, and what came of a decision."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.pages import Visit, request_place
from tests.browser.world import World

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def decision(world: World) -> dict[str, Any]:
    return next(one for one in world.router.decisions(100) if (one["reported_cached_tokens"] or 0) > 100)


def told(page: Page, request_id: str, change: Change) -> None:
    """Answer for this request with a changed decision."""

    def answer(route: Route) -> None:
        found = route.fetch().json()
        change(found)
        route.fulfill(json=found)

    page.route(f"**/decisions/{request_id}", answer)


def test_a_cost_is_split_into_parts_that_add_up(page: Visit, decision: dict[str, Any]) -> None:
    for one in decision["candidates"]:
        assert sum(one["parts"].values()) == pytest.approx(one["cost_s"], abs=2e-6)

    def costly(found: dict[str, Any]) -> None:
        winner = next(one for one in found["candidates"] if one["name"] == found["chosen"])
        winner |= {"cost_s": 0.75, "parts": {"compute_s": 0.5, "queue_s": 0.2, "harm_s": 0.05}}

    told(page.page, decision["request_id"], costly)
    page.open(request_place(decision["request_id"]))
    winner = page.page.locator(".candidate.winner")
    expect(winner).to_contain_text("compute 500 ms + queue 200 ms + harm 50 ms")
    widths = [winner.locator(f".strip.thin .{kind}").get_attribute("width") for kind in ("compute", "queue", "harm")]
    assert widths == ["0.5", "0.2", "0.05"]
    expect(page.page.get_by_text("Costs are in seconds of a replica's prefill.")).to_be_visible()


def test_an_older_router_tells_no_parts(page: Visit, decision: dict[str, Any]) -> None:
    def older(found: dict[str, Any]) -> None:
        for one in found["candidates"]:
            del one["parts"]

    told(page.page, decision["request_id"], older)
    page.open(request_place(decision["request_id"]))
    expect(page.page.locator(".candidate.winner .strip.thin .compute")).to_have_count(1)
    expect(page.page.get_by_text("Costs are in seconds")).to_have_count(0)


def test_candidates_are_ordered_and_those_that_could_not_take_it_are_last(
    page: Visit, decision: dict[str, Any]
) -> None:
    chosen = decision["chosen"]

    def many(found: dict[str, Any]) -> None:
        one = found["candidates"][0]
        found["candidates"] = [
            {**one, "name": chosen, "cost_s": 0.002},
            *({**one, "name": f"x{number}", "cost_s": 0.001 * number} for number in range(20, 3, -1)),
            {**one, "name": "away", "cost_s": None, "parts": None},
        ]

    told(page.page, decision["request_id"], many)
    page.open(request_place(decision["request_id"]))
    names = page.page.locator(".candidate strong")
    expect(names).to_have_text([chosen, *(f"x{number}" for number in range(4, 15))])
    expect(page.page.get_by_text(f"The next best, x4, had {decision_cached(decision)} cached")).to_be_visible()
    page.page.get_by_role("button", name="Show 7 more").click()
    expect(names.last).to_have_text("away")
    expect(page.page.locator(".candidate.out")).to_contain_text("cannot take it")
    expect(page.page.get_by_text("would have cost 2.0 times as much")).to_be_visible()


def decision_cached(decision: dict[str, Any]) -> str:
    return f"{decision['candidates'][0]['matched_tokens']:,}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reported_cached_tokens": 120, "predicted_cached_tokens": 120}, "To the token what was predicted."),
        ({"reported_cached_tokens": None}, "One of the two is not known."),
        ({"status": 502, "why": "all replicas failed"}, "all replicas failed"),
        ({"retries": 2, "resumes": 1}, "tried 2 more times"),
        ({"tokens_exact": False, "why_inexact": "it is a guess"}, "it is a guess"),
        ({"chosen": None}, "No replica could take it."),
        ({"portions": []}, "not told"),
    ],
)
def test_request_page_tells_what_came_of_it(
    page: Visit, decision: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    told(page.page, decision["request_id"], lambda found: found.update(change))
    page.open(request_place(decision["request_id"]))
    expect(page.page.get_by_text(re.compile(re.escape(words))).first).to_be_visible()


def test_request_that_is_forgotten_is_reported(page: Visit) -> None:
    page.open(request_place("none/such"))
    expect(page.page.get_by_role("alert").filter(has_text="none/such")).to_be_visible()
    assert len(page.blame()) >= 1  # the browser itself writes status 404 to the console
