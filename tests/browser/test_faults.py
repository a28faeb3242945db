"""Faults while a page is open: a killed replica, a lost event, a router that is gone for a while."""

from playwright.sync_api import Browser, expect

from tests.browser.pages import Visit, replica_place, visit
from tests.browser.world import LOSSY, World, another_router, lose_events, steady_port
from tests.chaos.routers import router


def test_replica_that_is_killed_is_seen_to_go_and_to_return(page: Visit, world: World) -> None:
    page.open()
    rows = page.page.get_by_role("table", name="Replicas").get_by_role("row")
    state = rows.filter(has=page.page.get_by_role("rowheader", name="r1")).locator(".badge").first
    expect(state).to_have_text("exact")
    world.replicas.kill(1)
    expect(state).to_have_text("down")
    expect(page.page.locator(".total", has_text="Replicas")).to_contain_text("2 of 3")
    alert = page.page.locator(".alert", has_text="replica-down")
    expect(alert.get_by_role("link", name="r1")).to_be_visible()
    world.replicas.start(1)
    expect(state).to_have_text("exact")
    expect(page.page.locator(".total", has_text="Replicas")).to_contain_text("3 of 3")
    expect(alert).to_have_count(0)


def test_lost_event_is_seen_as_a_gap_and_its_repair(page: Visit, world: World) -> None:
    """r2's events come through a proxy that can lose them."""
    name = f"r{LOSSY}"
    page.open(replica_place(name))
    gaps = page.page.locator(".stream-line", has_text="Gaps")
    expect(gaps).to_be_visible()
    before = world.router.status_of(name)["events"]
    lose_events(world, 77)
    expect(gaps.locator(".badge")).not_to_have_text(str(before["gaps"]))
    events = world.router.status_of(name)["events"]
    assert events["gaps"] > before["gaps"]
    assert events["replays"] + events["snapshots"] > before["replays"] + before["snapshots"]
    expect(page.page.locator(".page-head .badge").first).to_have_text("exact")
    page.go("/")
    row = page.page.get_by_role("row").filter(has=page.page.get_by_role("rowheader", name=name))
    expect(row).to_contain_text("gap")


def test_router_that_is_gone_is_reported_and_found_again(world: World, browser: Browser) -> None:
    port = steady_port()
    with another_router(world, port=port) as running:
        url = running.url
        made = visit(browser, url)
        page = made.__enter__()
        page.open()
        live = page.page.locator("#live")
        expect(live).to_have_text("live")
        expect(page.page.locator(".total", has_text="Replicas")).to_contain_text("3 of 3")  # there is something to see
    try:
        expect(live).to_have_text("no connection")
        expect(page.page.locator("#outage")).to_contain_text("Trying again")
        expect(page.page.locator("#outage")).to_contain_text("What you see is")
        assert page.page.evaluate("document.documentElement.classList.contains('stale')")
        with router(*world.options, port=port):
            expect(live).to_have_text("live")
            expect(page.page.locator("#outage")).to_be_hidden()
            expect(page.page.locator(".total", has_text="Replicas")).to_contain_text("3 of 3")
            page.blame()
    finally:
        page.blame()  # the browser itself logs the failed connection
        made.__exit__(None, None, None)
