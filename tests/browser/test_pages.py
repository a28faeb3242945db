"""Every page shows its data, is accessible, fits a phone, and sends no request to other hosts."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.feeds import altered
from tests.browser.pages import NARROW, Visit, replica_place, request_place, visit
from tests.browser.world import World, another_router
from tests.events.processes import wait_until

Visiting = Callable[..., AbstractContextManager[Visit]]

PAGES = ("overview", "charts", "tree", "replica", "requests", "request", "sessions", "usage", "playground")


def place_of(name: str, world: World) -> str:
    match name:
        case "overview":
            return "/"
        case "replica":
            return replica_place("r0")
        case "request":
            return request_place(world.router.decisions(1)[0]["request_id"])
    return f"/{name}"


def wait_shown(page: Page, name: str) -> None:
    """Wait until the page shows its data, not only its frame."""
    expect(page.locator("#live")).to_have_text("live")
    match name:
        case "overview":
            expect(page.get_by_role("table", name="Replicas").get_by_role("row").nth(3)).to_be_visible()
        case "charts":
            expect(page.locator(".chart-summary").first).to_contain_text("p50")
        case "tree":
            expect(page.get_by_role("table", name="Shared prefixes").get_by_role("row").nth(3)).to_be_visible()
        case "replica":
            expect(page.get_by_text("Digests compared")).to_be_visible()
        case "requests":
            expect(page.get_by_role("table", name="Last requests").get_by_role("link").first).to_be_visible()
        case "request":
            expect(page.locator(".candidate.winner")).to_be_visible()
        case "sessions":
            expect(page.get_by_role("table", name="Sessions").get_by_role("row").nth(1)).to_contain_text(
                re.compile("silent|computes")
            )
        case "usage":
            expect(page.get_by_role("table", name="Usage").get_by_role("link")).to_have_text(["(none)"])
        case "playground":
            page.get_by_label("Message").fill("Hello there")
            expect(page.locator(".candidate.winner")).to_be_visible()


@pytest.mark.parametrize("name", PAGES)
def test_has_no_serious_barrier_in_light_and_dark(visiting: Visiting, world: World, name: str) -> None:
    with visiting(scheme="light") as visit:
        visit.open(place_of(name, world))
        wait_shown(visit.page, name)
        assert barriers(visit.page) == []
        visit.page.emulate_media(color_scheme="dark")
        assert barriers(visit.page) == []


def barriers(page: Page) -> list[dict[str, Any]]:
    """Violations that axe rates serious or critical."""
    return [one for one in violations(page) if one["impact"] in ("serious", "critical")]


def violations(page: Page) -> list[dict[str, Any]]:
    return [
        {"id": one["id"], "impact": one["impact"], "where": [node["html"][:200] for node in one["nodes"][:4]]}
        for one in Axe().run(page).response["violations"]
    ]


def test_fits_a_narrow_window(visiting: Visiting, world: World) -> None:
    with visiting(NARROW) as visit:
        for name in PAGES:
            visit.open(place_of(name, world))
            wait_shown(visit.page, name)
            width = visit.page.evaluate("document.documentElement.scrollWidth")
            assert width <= NARROW[0], f"{name} is {width} pixels wide"
            cut = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.ariaLabel)"
            if name in ("overview", "requests"):
                assert visit.page.eval_on_selector_all(".table-box:not([hidden])", cut) == [], "no column is cut"


def test_a_phone_has_send_in_sight(visiting: Visiting, world: World) -> None:
    with visiting(NARROW) as visit:
        visit.open(place_of("playground", world))
        wait_shown(visit.page, "playground")
        expect(visit.page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)


def test_overview_has_the_fleet_and_what_was_decided(page: Visit, world: World) -> None:
    page.open()
    wait_shown(page.page, "overview")
    expect(page.page.locator(".total", has_text="Replicas")).to_contain_text("3 of 3")
    row = page.page.get_by_role("row").filter(has=page.page.get_by_role("link", name="r1", exact=True)).first
    expect(row).to_contain_text("exact")
    newest = world.router.decisions(1)[0]
    decided = page.page.get_by_role("table", name="Last decisions").get_by_role("row").nth(1)
    expect(decided).to_contain_text(f"{newest['prompt_tokens']:,}")
    expect(page.page.get_by_text("judged at")).to_be_visible()


def test_replicas_are_sorted_and_filtered(page: Visit) -> None:
    page.open()
    wait_shown(page.page, "overview")
    table = page.page.get_by_role("table", name="Replicas")
    names = table.get_by_role("rowheader")
    table.get_by_role("button", name="Replica").click()
    expect(names).to_have_text(["r0", "r1", "r2"])
    table.get_by_role("button", name="Replica").click()
    expect(names).to_have_text(["r2", "r1", "r0"])
    assert table.get_by_role("columnheader", name="Replica").get_attribute("aria-sort") == "descending"
    page.page.get_by_label("Filter replicas").fill("r1")
    expect(names).to_have_text(["r1"])
    page.page.get_by_label("Filter replicas").fill("nobody")
    expect(page.page.get_by_text("No replica is like that.")).to_be_visible()


def test_chart_is_read_by_pointer_keyboard_and_as_a_table(page: Visit) -> None:
    page.open("/charts")
    wait_shown(page.page, "charts")
    chart = page.page.get_by_role("img", name="Time to first token")
    chart.hover()
    expect(chart.locator(".tip")).to_contain_text("p99")
    chart.focus()
    page.page.keyboard.press("Home")
    page.page.keyboard.press("End")
    expect(page.page.locator("#announcer")).to_have_text(re.compile(r"\d\d:\d\d:\d\d: p50 .*, p90 .*, p99 "))
    card = page.page.locator("section", has=chart)
    card.get_by_role("button", name="p50").click()
    expect(card.locator("path.line")).to_have_count(2)
    card.get_by_text("As a table").click()
    expect(card.get_by_role("columnheader")).to_have_text(["Time", "p50", "p90", "p99"])
    assert card.get_by_role("row").count() > 1


def test_replica_page_leads_to_the_prefixes_that_it_holds(page: Visit, world: World) -> None:
    name = world.router.decisions(1)[0]["chosen"]
    page.open()
    page.page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.heading(name)).to_be_visible()

    def has_all_blocks() -> bool:
        blocks = world.router.status_of(name)["index"]["blocks"]["GPU"]
        return page.page.get_by_text(f"{blocks:,} blocks of 16 tokens").is_visible()

    wait_until(has_all_blocks, f"the page of {name} has as many blocks as the router")
    page.page.get_by_role("link", name="Shared prefixes that it holds").click()
    wait_shown(page.page, "tree")
    expect(page.page.get_by_label("Held by")).to_have_value(name)
    rows = page.page.get_by_role("table", name="Shared prefixes").locator("tbody tr")
    held = rows.count()
    assert rows.filter(has_text=name).count() == held
    page.page.get_by_label("Held by").select_option("any replica")
    assert rows.count() >= held


def test_a_replica_without_work_says_why(browser: Browser, world: World) -> None:
    with another_router(world) as quiet, visit(browser, quiet.url) as made:
        made.open(replica_place("r0"))
        expect(made.page.get_by_text(re.compile("idle: no prompt came for it", re.I))).to_be_visible()
        made.open()
        row = made.page.get_by_role("row").filter(has=made.page.get_by_role("link", name="r0", exact=True))
        expect(row.get_by_title("idle: no prompt came for it")).to_be_visible()


def test_replica_that_is_not_there_is_reported(page: Visit) -> None:
    page.open("/replica/nobody")
    expect(page.page.get_by_role("alert").filter(has_text="nobody")).to_contain_text("no replica named 'nobody'")
    assert len(page.blame()) >= 1  # the browser itself writes status 404 to the console


def test_draining_is_asked_first_and_undone(page: Visit, world: World) -> None:
    page.open(replica_place("r1"))
    drain = page.page.get_by_role("button", name="Drain", exact=True)
    drain.click()
    page.page.get_by_role("button", name="Cancel").click()
    assert world.router.status_of("r1")["available"]
    drain.click()
    page.page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.page.locator(".page-head .badge").first).to_have_text("draining")
    assert not world.router.status_of("r1")["available"]
    page.page.get_by_role("button", name="Undrain").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
    expect(page.page.locator(".page-head .badge").first).to_have_text("exact")
    assert world.router.status_of("r1")["available"]


def test_request_page_says_why(page: Visit, world: World) -> None:
    decision = next(one for one in world.router.decisions() if (one["predicted_cached_tokens"] or 0) > 100)
    page.open(request_place(decision["request_id"]))
    expect(page.page.locator(".candidate")).to_have_count(3)
    winner = page.page.locator(".candidate.winner")
    expect(winner).to_contain_text(decision["chosen"])
    expect(winner).to_contain_text("chosen")
    drawn = winner.get_by_role("img", name=re.compile("has the first"))
    expect(drawn).to_have_accessible_name(re.compile(f"of {decision['prompt_tokens']:,} tokens cached"))
    assert drawn.locator("line").count() == decision["prompt_tokens"] // 16
    expect(page.page.get_by_text(f"It went to {decision['chosen']}, one of 3 replicas")).to_be_visible()
    expect(page.page.get_by_text("reported", exact=True)).to_be_visible()


def test_requests_are_filtered_held_and_explained(page: Visit) -> None:
    page.open("/requests")
    wait_shown(page.page, "requests")
    page.page.get_by_label("Filter requests").fill("no such thing")
    expect(page.page.get_by_text("No request is like that.")).to_be_visible()
    page.page.get_by_label("A prompt, or a request").fill("Once upon a time there was a router")
    page.page.get_by_role("button", name="Explain").click()
    expect(page.page.get_by_text("It would go to")).to_be_visible()
    page.page.get_by_label("A prompt, or a request").fill('{"messages": ')
    page.page.get_by_role("button", name="Explain").click()
    expect(page.page.get_by_role("alert").filter(has_text="no JSON")).to_be_visible()


def test_requests_of_one_id_have_a_line_each_and_no_more(page: Visit) -> None:
    """Clients choose ids."""

    def twice(route: Route) -> None:
        found = route.fetch().json()
        route.fulfill(json={**found, "decisions": found["decisions"][:1] * 2})

    page.page.route("**/decisions?limit=*", twice)
    page.open("/requests")
    lines = page.page.get_by_role("table", name="Last requests").get_by_role("row")
    expect(lines).to_have_count(3)
    for _ in range(2):
        with page.page.expect_response(re.compile("/decisions")):
            pass
        page.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => resolve(true)))")
    assert lines.count() == 3


def test_models_that_come_later_can_be_chosen(page: Visit) -> None:
    def gains(frame: dict[str, Any]) -> None:
        frame["models"] = ["demo", "another"]

    altered(page.page, page.router_url, gains)
    page.open("/requests")
    page.page.get_by_label("A prompt, or a request").fill("Once upon a time")
    page.page.get_by_label("Model", exact=True).select_option("another")
    with page.page.expect_request("**/explain") as asked:
        page.page.get_by_role("button", name="Explain").click()
    assert asked.value.post_data_json == {"model": "another", "prompt": "Once upon a time"}
    expect(page.page.get_by_role("alert").filter(has_text="another")).to_be_visible()
    page.go("/playground")
    expect(page.page.locator("#model option")).to_have_text(["demo", "another"])
    assert all("404" in complaint for complaint in page.blame())


def test_replica_that_leaves_is_greyed_and_has_no_buttons(page: Visit) -> None:
    left = False

    def told(route: Route) -> None:
        if left:
            route.fulfill(status=404, json={"error": {"message": "there is no replica named 'r0'", "code": None}})
            return
        found = route.fetch().json()
        found["replica"]["cache_used"] = None  # not every engine reports it
        route.fulfill(json=found)

    page.page.route("**/dashboard/replicas/r0", told)
    page.open(replica_place("r0"))
    drain = page.page.get_by_role("button", name="Drain", exact=True)
    expect(drain).to_be_visible()
    expect(page.page.get_by_text(re.compile("blocks? of 16 tokens"))).to_be_visible()
    expect(page.page.get_by_text(re.compile("% of .* taken"))).to_have_count(0)
    left = True
    expect(page.page.get_by_role("alert").filter(has_text="no replica named")).to_be_visible()
    expect(drain).to_have_count(0)
    expect(page.page.locator("main.gone")).to_be_visible()
    page.go("/")
    expect(page.page.locator("main.gone")).to_have_count(0)
    assert all("404" in complaint for complaint in page.blame())


def test_browser_without_the_newest_signals_will_do(page: Visit) -> None:
    page.page.add_init_script("delete AbortSignal.any")
    page.open()
    expect(page.page.locator("#live")).to_have_text("live")


def test_colours_are_chosen_and_remembered(page: Visit) -> None:
    page.open()
    button = page.page.get_by_role("button", name="colours")
    button.click()
    button.click()
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.page.evaluate(background)
    page.page.reload()
    assert page.page.evaluate(background) == dark != "rgb(244, 246, 249)"


def test_an_invalid_address_is_reported(page: Visit) -> None:
    page.open("/nowhere")
    expect(page.heading("There is no such page")).to_be_visible()
