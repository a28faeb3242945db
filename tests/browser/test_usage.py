"""The page of usage: what keys have used of a real router, for whoever may see it."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.pages import NARROW, Visit, visit
from tests.browser.test_pages import violations
from tests.browser.used import made_up
from tests.browser.world import World, another_router
from tests.chaos.routers import RouterProcess
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

KEYS_FILE = """
[keys.alice]
key = "alice"
[keys.bob]
key = "bob"
[keys.root]
key = "root"
admin = true
"""
MARKUP = "<img src=x onerror=alert(1)> & ?key=a%2F#"
ROOT = {"authorization": "Bearer root"}
NAMES = ("support", "alice", MARKUP)
MODELS = ("large", "</td><b>small")

Visiting = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS_FILE)
    return path


@pytest.fixture(scope="module")
def kept(world: World, keys: Path) -> Iterator[RouterProcess]:
    """A router with a file of the last 90 days."""
    path = keys.with_name("usage.db")
    made_up(path, 90, NAMES, MODELS)
    with another_router(world, "--api-keys", keys, "--usage-db", path) as running:
        yield running


@pytest.fixture
def admin(browser: Browser, kept: RouterProcess) -> Iterator[Page]:
    with visit(browser, kept.url) as made:
        yield shown(made, "root")


def shown(made: Visit, key: str | None = None, place: str = "/usage") -> Page:
    if key is not None:
        made.page.add_init_script(f"sessionStorage.setItem('warmroute.key', '{key}')")
    made.open(place)
    return made.page


def names(page: Page) -> Any:
    return page.get_by_role("table", name="Usage").get_by_role("rowheader")


def total(page: Page, name: str) -> Any:
    return page.locator(".total", has_text=name)


def row(page: Page, name: str) -> Any:
    return page.get_by_role("table", name="Usage").get_by_role("row").filter(has_text=name).first


# ---- what a router has counted


def test_tokens_of_real_requests_are_shown_with_their_key(browser: Browser, world: World, keys: Path) -> None:
    with another_router(world, "--api-keys", keys, ready=True) as running, visit(browser, running.url) as made:
        page = shown(made, "root")
        expect(page.get_by_text("Nothing was used on these days.")).to_be_visible()
        expect(page.get_by_role("img", name="Tokens")).to_be_hidden()
        expect(page.locator(".note")).to_contain_text(re.compile("kept in memory.*--usage-db usage.db keeps it"))
        body = {"model": MODEL, "prompt": "Once upon a time. " * 20, "max_tokens": 5, "ignore_eos": True}
        for name in ("alice", "bob", "alice"):
            assert running.post("/v1/completions", body, authorization=f"Bearer {name}").status == 200

        def told() -> Any:
            return running.ask("GET", "/usage?by=key", headers=ROOT).json["usage"]

        wait_until(lambda: sum(one["requests"] for one in told()) == 3, "all are counted")
        alice, bob = told()
        page.reload()
        expect(names(page)).to_have_text(["alice", "bob"])
        expect(row(page, "alice").get_by_role("cell").nth(3)).to_have_text(str(alice["generated_tokens"]))
        prompt = sum(one["computed_tokens"] + one["cached_tokens"] for one in (alice, bob))
        assert alice["cached_tokens"] > 0
        expect(total(page, "From the cache")).to_contain_text(f"of {prompt:,} prompt tokens")
        expect(total(page, "Requests")).to_contain_text("3no errors")
        expect(page.locator(".chart-summary")).to_contain_text(
            f"cached {alice['cached_tokens'] + bob['cached_tokens']:,} "
        )


# ---- who sees what


def test_a_client_sees_its_own_usage_and_the_refusal_of_others(browser: Browser, kept: RouterProcess) -> None:
    with visit(browser, kept.url) as made:
        page = shown(made, "alice")
        expect(names(page)).to_have_text(["alice"])
        assert "support" not in page.content()
        made.go("/usage?key=support")
        refusal = page.get_by_role("alert").filter(has_text="sees only the usage of its own API key")
        expect(refusal.get_by_role("button", name="Give a key")).to_be_visible()
        expect(page.get_by_role("img", name="Tokens")).to_be_hidden()
        assert len(complaints := made.blame()) >= 2 and all("403" in one for one in complaints)
        made.go("/usage?key=alice")
        expect(names(page)).to_have_text([*MODELS])
        expect(refusal).to_have_count(0)


# ---- choices


def test_a_period_is_chosen_in_the_address_and_by_hand(admin: Page) -> None:
    expect(admin.get_by_role("link", name="Usage", exact=True)).to_have_attribute("aria-current", "page")
    expect(names(admin)).to_have_text(["support", "alice", MARKUP])
    month = total(admin, "Requests").text_content()
    period = admin.get_by_label("Last")
    period.focus()
    period.select_option("90 days")
    expect(admin.locator("#announcer")).to_have_text(re.compile("^Last 90 days: [0-9,]+ tokens$"))
    assert total(admin, "Requests").text_content() != month
    expect(period).to_be_focused()
    assert admin.url.endswith("#/usage?days=90&by=key")
    admin.reload()
    expect(names(admin)).to_have_count(3)
    expect(period.locator("option:checked")).to_have_text("90 days")
    admin.go_back()
    expect(admin.get_by_label("Last").locator("option:checked")).to_have_text("30 days")
    expect(total(admin, "Requests")).to_have_text(month or "")


def test_names_are_text_and_lead_to_their_parts(admin: Page) -> None:
    admin.get_by_role("link", name=MARKUP).click()
    expect(admin.locator(".narrowed strong")).to_have_text([MARKUP])
    expect(names(admin)).to_have_text([*MODELS])
    admin.get_by_role("link", name=MODELS[1]).click()
    expect(admin.locator(".narrowed strong")).to_have_text([MARKUP, MODELS[1]])
    expect(names(admin)).to_have_text([MARKUP])
    assert admin.locator("main img, main b").count() == 0
    admin.get_by_role("link", name="all keys").click()
    expect(names(admin)).to_have_text(["support", "alice", MARKUP])
    admin.get_by_label("By").select_option("key and model")
    expect(names(admin)).to_have_count(3)  # of one model
    admin.get_by_role("link", name="all models").click()
    expect(names(admin)).to_have_text([*MODELS])


def test_rows_are_sorted_filtered_and_compared_by_bars(admin: Page) -> None:
    expect(names(admin)).to_have_count(3)
    table = admin.get_by_role("table", name="Usage")
    assert table.get_by_role("columnheader", name="Tokens").get_attribute("aria-sort") == "descending"
    bars = table.locator("td:nth-child(2) .meter").evaluate_all(
        "bars => bars.map(bar => [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
    )
    assert 99 < bars[0] < 101 and bars == sorted(bars, reverse=True)
    table.get_by_role("button", name="Requests").click()
    table.get_by_role("button", name="Requests").click()
    expect(names(admin)).to_have_text([MARKUP, "alice", "support"])
    table.get_by_role("button", name="Key", exact=True).click()
    expect(names(admin)).to_have_text([MARKUP, "alice", "support"])
    admin.get_by_label("Filter usage").fill("SUPP")
    expect(names(admin)).to_have_text(["support"])
    expect(admin.get_by_text("1 key", exact=True)).to_be_visible()
    admin.get_by_label("Filter usage").fill("nobody")
    expect(admin.get_by_text("No name is like that.")).to_be_visible()


def test_chart_has_a_point_for_each_day(admin: Page) -> None:
    chart = admin.get_by_role("img", name="Tokens")
    expect(chart.locator("path.line")).to_have_count(3)
    chart.focus()
    admin.keyboard.press("End")
    admin.keyboard.press("ArrowLeft")
    expect(admin.locator("#announcer")).to_have_text(re.compile(r"^\d+ \w+ 20\d\d: computed .*, cached .*, generated "))
    card = admin.locator("section", has=chart)
    card.get_by_text("As a table").click()
    expect(card.get_by_role("columnheader")).to_have_text(["Day", "computed", "cached", "generated"])
    expect(card.get_by_role("row")).to_have_count(31)


def test_csv_is_what_the_router_sends_to_this_key(admin: Page, kept: RouterProcess) -> None:
    admin.get_by_label("Last").select_option("7 days")
    expect(admin.locator("#announcer")).to_contain_text("Last 7 days")
    with admin.expect_download() as started:
        admin.get_by_role("link", name="Download CSV").click()
    assert started.value.suggested_filename == "usage.csv"
    text = Path(started.value.path()).read_text()
    [head, *rows] = csv.reader(io.StringIO(text))
    assert head[:3] == ["day", "key", "requests"] and len(rows) == 7 * 3
    days = f"from={rows[0][0]}&to={rows[-1][0]}"
    answer = kept.ask("GET", f"/usage?by=day,key&format=csv&{days}", headers=ROOT)
    assert answer.body.decode().splitlines() == text.splitlines()


# ---- states


def test_it_says_that_it_reads_and_what_the_router_says_is_wrong(browser: Browser, kept: RouterProcess) -> None:
    with visit(browser, kept.url) as made:
        held: list[Route] = []
        made.page.route("**/usage?*", lambda route: held.append(route))
        page = shown(made, "root")
        expect(page.get_by_role("status").filter(has_text="Reading what was used")).to_be_visible()
        wait_until(lambda: page.title() and len(held) == 2, "both questions are asked")
        for route in held:
            error = {"message": "that is more than 100,000 rows; <b>choose</b> fewer days", "code": "invalid"}
            route.fulfill(status=400, json={"error": error})
        made.page.unroute("**/usage?*")
        alert = page.get_by_role("alert").filter(has_text="100,000 rows; <b>choose</b> fewer days.")
        expect(alert).to_be_visible()
        expect(page.get_by_text("Reading what was used")).to_be_hidden()
        page.get_by_label("Last").select_option("7 days")
        expect(names(page)).to_have_count(3)
        expect(alert).to_have_count(0)
        assert all("400" in one for one in made.blame())


def test_a_broken_file_is_named(browser: Browser, world: World, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    path.write_bytes(b"no database" * 100)
    with another_router(world, "--usage-db", path, ready=False) as running, visit(browser, running.url) as made:
        page = shown(made)
        expect(page.locator(".note.bad")).to_have_text("The file of --usage-db fails: file is not a database.")


# ---- how it looks


@pytest.mark.parametrize(("scheme", "size"), [("light", (1280, 900)), ("dark", NARROW)])
def test_has_no_barrier_at_all(browser: Browser, kept: RouterProcess, scheme: str, size: tuple[int, int]) -> None:
    with visit(browser, kept.url, size, scheme) as made:
        page = shown(made, "root", "/usage?days=90&key=alice&by=key,model")
        expect(names(page)).to_have_count(2)
        assert violations(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0]
        nav = page.get_by_role("navigation", name="Pages").locator("ul")
        assert nav.evaluate("list => list.scrollWidth - list.clientWidth") <= 0, "a page is out of sight"
