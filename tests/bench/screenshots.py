"""Draws the pictures of docs/dashboard.md: a real fleet of simulated replicas, looked at by Chromium."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, expect

from tests.bench.pictures_of import check_sizes, save, save_sheet
from tests.browser.pages import NARROW, Visit, chromium, replica_place, request_place, visit
from tests.browser.test_pages import PAGES, place_of, wait_shown
from tests.browser.used import made_up
from tests.browser.world import LOSSY, World, another_router, begun, lose_events

SIZE = (1120, 800)
REPLICAS = 4
TALKS = 40
TALL = (1120, 1240)
USAGE_SIZE = (1120, 970)
MOVING_S = 3.0  # until requests are on their way
CHART_S = 75.0  # of traffic before the charts are drawn


def run(rounds: int) -> None:  # noqa: ARG001
    with begun(REPLICAS, TALKS) as world, chromium() as browser, TemporaryDirectory() as folder:
        live(world, browser)
        used(world, browser, Path(folder, "usage.db"))
    check_sizes()


@contextmanager
def conversations(url: str, span_s: float) -> Iterator[None]:
    """Run conversations in a process of their own until the block ends."""
    process = subprocess.Popen([sys.executable, "-m", "tests.browser.traffic", url, str(2 * span_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def live(world: World, browser: Browser) -> None:
    with conversations(world.url, CHART_S):
        with visit(browser, world.url, SIZE) as light:
            live_pages(light)
        with visit(browser, world.url, SIZE, "dark") as dark:
            overview(dark, "dashboard-dark")
        with visit(browser, world.url, NARROW) as phone:
            overview(phone, "dashboard-phone")
        every_page(world, browser)
    with visit(browser, world.url, SIZE) as light:
        tree(light)
        why_there(light, world)
        out_of_step(light, world)


def every_page(world: World, browser: Browser) -> None:
    """All pages on one sheet: dark, and on a phone."""
    for name, size, scheme, width in (("dark", SIZE, "dark", 1600), ("phone", NARROW, "light", 1080)):
        shots = []
        with visit(browser, world.url, size, scheme) as tab:
            for page in PAGES:
                tab.open(place_of(page, world))
                wait_shown(tab.page, page)
                tab.page.wait_for_timeout(MOVING_S * 1000)
                shots.append(tab.page.screenshot())
        save_sheet(shots, f"all-{name}", width)


def live_pages(tab: Visit) -> None:
    overview(tab, "dashboard-overview")
    tab.go("/charts")
    tab.page.wait_for_timeout(CHART_S * 1000)
    tab.page.get_by_role("img", name="Time to first token").hover()
    save(tab.page, "dashboard-charts")


def overview(tab: Visit, name: str) -> None:
    tab.open()
    expect(tab.page.get_by_text("judged at")).to_be_visible()
    tab.page.wait_for_timeout(MOVING_S * 1000)
    save(tab.page, name)


def used(world: World, browser: Browser, path: Path) -> None:
    """Months of usage are made up."""
    made_up(path, 90)
    with another_router(world, "--usage-db", path) as running, visit(browser, running.url, USAGE_SIZE) as tab:
        tab.open("/usage")
        expect(tab.page.get_by_text("8 keys")).to_be_visible()
        tab.page.get_by_role("img", name="Tokens").hover()
        save(tab.page, "dashboard-usage")


def tree(tab: Visit) -> None:
    tab.open("/tree")
    wait_shown(tab.page, "tree")
    save(tab.page, "dashboard-tree")


def why_there(tab: Visit, world: World) -> None:
    answered = (one for one in world.router.decisions(200) if one["status"] == 200)
    warm = next(one for one in answered if one["chosen"] != "r0" and one["reported_cached_tokens"])
    tab.go("/requests")
    tab.page.get_by_label("Filter requests").fill(warm["chosen"])
    expect(tab.page.get_by_role("table", name="Last requests").get_by_role("link").first).to_be_visible()
    save(tab.page, "dashboard-requests")
    tab.go(request_place(warm["request_id"]))
    expect(tab.page.locator(".candidate.winner")).to_be_visible()
    save(tab.page, "dashboard-request")


def out_of_step(tab: Visit, world: World) -> None:
    """Events of one replica are lost on the way, and another replica is gone."""
    name = f"r{LOSSY}"
    tab.go("/")
    expect(tab.page.get_by_role("table", name="Replicas")).to_be_visible()
    lose_events(world, 77)
    world.replicas.kill(0)
    expect(tab.page.get_by_role("table", name="Replicas").get_by_text("down")).to_be_visible()
    expect(tab.page.get_by_role("table", name="Replicas").get_by_text("gap")).to_be_visible()
    tab.page.wait_for_timeout(6000)  # until it is judged
    tab.page.set_viewport_size({"width": TALL[0], "height": TALL[1]})
    save(tab.page, "dashboard-trouble")
    tab.go(replica_place(name))
    expect(tab.page.locator(".stream-line", has_text="Gaps").locator(".badge")).to_be_visible()
    save(tab.page, "dashboard-replica")
