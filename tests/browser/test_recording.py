"""`warmroute events view`: a recording of real streams, looked at."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.pages import NARROW, Visit, visit
from tests.browser.recordings import viewing
from tests.browser.test_pages import barriers
from tests.browser.world import LOSSY, World, lose_events, talk
from tests.events.processes import tool, wait_until


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record r2 while some of its events are lost."""
    path = tmp_path_factory.mktemp("recording") / "incident.wre"
    ends = world.replicas[LOSSY].load()["endpoints"]
    sockets = [word for name in ("replay", "status", "snapshot") for word in (f"--{name}", ends[name])]
    events = world.lossy.ask()["endpoint"]
    with tool("record", events, *sockets, "--model", "demo", "-o", path) as recorder:
        wait_until(lambda: path.exists() and path.stat().st_size > 1000, "the snapshot is recorded")
        talk(world.replicas[LOSSY].url, 1, seed=91)
        lose_events(world, 92)
        wait_until(lambda: world.router.status_of(f"r{LOSSY}")["state"] == "exact", "the router has repaired it")
        recorder.end()
    return path


@pytest.fixture(scope="module")
def viewed(recorded: Path) -> Iterator[str]:
    with viewing(recorded) as url:
        yield url


@pytest.fixture
def tab(browser: Browser, viewed: str) -> Iterator[Visit]:
    with visit(browser, viewed) as made:
        made.page.goto(viewed)
        expect(made.page.locator(".icicle .node").nth(1)).to_be_visible()
        yield made


def test_tree_is_as_it_was_at_the_moment_that_is_chosen(tab: Visit) -> None:
    held = tab.page.locator(".moment .row").last
    expect(held).to_contain_text("exact")
    at_the_end = blocks_in(held.inner_text())
    tab.page.get_by_label("Moment").fill("0")
    expect(held).not_to_contain_text(f"{at_the_end:,} blocks")
    assert blocks_in(held.inner_text()) < at_the_end
    tab.page.get_by_label("Moment").fill("1000")
    expect(held).to_contain_text(f"{at_the_end:,} blocks")


def test_part_that_is_looked_at_is_that_of_the_moment(tab: Visit) -> None:
    tab.page.locator(".icicle .node").nth(1).click()
    bar = tab.page.locator(".icicle .node:not(.trunk)[tabindex='0']")
    card = tab.page.locator("section").filter(has=tab.page.get_by_role("heading", name="This part"))
    held = tab.page.locator(".moment .row").last
    compared = 0
    for moment in (1000, 900, 700, 500, 300):
        before = held.get_attribute("data-at") or ""
        tab.page.get_by_label("Moment").fill(str(moment - 1))
        expect(held).not_to_have_attribute("data-at", before)
        if bar.count() == 0:  # it was not there yet
            break
        label = bar.get_attribute("aria-label") or ""
        found = re.search(r"(\d+ branch\w*), last (.*), held by", label)
        assert found is not None, label
        assert f"in {found[1]}; last {found[2]}." in card.locator("p").first.inner_text()
        compared += 1
    assert compared > 1


def blocks_in(text: str) -> int:
    found = re.search(r"([\d,]+) blocks?", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_gap_and_its_repair_are_marked_and_gone_to(tab: Visit) -> None:
    marks = tab.page.get_by_role("table", name="What happened").get_by_role("row")
    expect(marks.filter(has_text="gap").first).to_be_visible()
    expect(marks.filter(has_text="repaired").first).to_be_visible()
    assert tab.page.locator("path.mark").count() >= 2
    when = tab.page.locator(".moment output")
    end = when.inner_text()
    expect(tab.page.get_by_role("button", name="Later mark")).to_be_disabled()
    tab.page.get_by_role("button", name="Earlier mark").click()
    expect(when).not_to_have_text(end)


def test_moment_is_chosen_in_the_chart(tab: Visit) -> None:
    when = tab.page.locator(".moment output")
    before = when.inner_text()
    tab.page.get_by_role("img", name="Blocks held").click()
    expect(when).not_to_have_text(before)


def test_has_no_serious_barrier_and_fits_a_narrow_window(browser: Browser, viewed: str) -> None:
    with visit(browser, viewed, NARROW, "dark") as made:
        made.page.goto(viewed)
        expect(made.page.locator(".icicle .node").nth(1)).to_be_visible()
        assert made.page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
        assert barriers(made.page) == []


def test_other_names_for_this_machine_are_refused(viewed: str, browser: Browser) -> None:
    """A page of another site, whose name was pointed to this machine, would send such a Host."""
    context = browser.new_context()
    try:
        answer = context.request.get(f"{viewed}/recording", headers={"Host": "somewhere.example"})
        assert answer.status == 403
        assert context.request.get(f"{viewed}/recording/tree?at=never").status == 400
        assert context.request.get(f"{viewed}/dashboard/../recording.py").status == 404
    finally:
        context.close()
