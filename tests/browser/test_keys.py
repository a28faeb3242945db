"""Keys: requested where one is demanded, kept in the tab, sent only to the router, and sufficient for their role."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.pages import Visit, replica_place, visit
from tests.browser.world import World, another_router

ADMIN, READER = "an-admin-key", "a-reader-key"


@pytest.fixture(scope="module")
def keyed_url(world: World) -> Iterator[str]:
    with another_router(world, "--admin-key", ADMIN, "--api-key", READER, ready=True) as running:
        yield running.url


@pytest.fixture
def keyed(browser: Browser, keyed_url: str) -> Iterator[Visit]:
    with visit(browser, keyed_url) as made:
        yield made
        # The browser itself logs each refusal.
        assert all("401" in complaint or "403" in complaint for complaint in made.blame())


def give(page: Page, key: str) -> None:
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.get_by_role("button", name="Use it").click()


def stored(page: Page) -> Any:
    return page.evaluate("sessionStorage.getItem('warmroute.key')")


def test_key_is_asked_for_and_remembered_in_the_tab(keyed: Visit) -> None:
    keyed.open()
    give(keyed.page, ADMIN)
    expect(keyed.page.locator("#live")).to_have_text("live")
    expect(keyed.page.get_by_role("table", name="Replicas")).to_be_visible()
    keyed.page.reload()
    expect(keyed.page.locator("#live")).to_have_text("live")
    assert keyed.page.get_by_role("dialog").count() == 0
    keyed.go(replica_place("r0"))
    expect(keyed.page.get_by_role("button", name="Drain", exact=True)).to_be_visible()
    assert keyed.page.evaluate("Object.keys(localStorage).some((name) => localStorage[name].includes('key'))") is False


def test_reader_sees_the_fleet_and_changes_nothing(keyed: Visit) -> None:
    keyed.open()
    give(keyed.page, READER)
    expect(keyed.page.get_by_role("table", name="Replicas")).to_be_visible()
    expect(keyed.page.get_by_role("heading", name="Last decisions")).to_be_hidden()
    keyed.go(replica_place("r0"))
    expect(keyed.page.get_by_text("Digests compared")).to_be_visible()
    assert keyed.page.get_by_role("button", name="Drain", exact=True).count() == 0
    keyed.go("/requests")
    expect(keyed.page.get_by_role("alert").filter(has_text="needs the admin key")).to_be_visible()
    assert keyed.page.get_by_role("dialog").count() == 0


def test_typing_is_not_interrupted_by_a_question_for_a_key(keyed: Visit) -> None:
    """Else the dialog would take further keystrokes for the key, and send them as one."""
    keyed.open("/playground")
    give(keyed.page, READER)
    expect(keyed.page.locator("#live")).to_have_text("live")
    message = keyed.page.get_by_label("Message", exact=True)
    message.press_sequentially("What is the weather")
    refusal = keyed.page.get_by_role("alert").filter(has_text="/explain needs the admin key")
    expect(refusal).to_be_visible()
    expect(keyed.page.locator(".tokens .block").first).to_be_visible()
    expect(message).to_be_focused()
    message.press_sequentially(" like tomorrow?")
    expect(message).to_have_value("What is the weather like tomorrow?")
    assert stored(keyed.page) == READER
    refusal.get_by_role("button", name="Give a key").click()
    give(keyed.page, ADMIN)
    expect(keyed.page.locator(".candidate.winner")).to_be_visible()


def test_key_is_kept_until_another_one_is_good(keyed: Visit) -> None:
    keyed.open("/requests")
    give(keyed.page, READER)
    # Until the key is tried, nobody is asked again.
    expect(keyed.page.get_by_role("alert").filter(has_text="needs the admin key")).to_be_visible()
    keyed.page.get_by_role("button", name="Give a key").click()
    dialog = keyed.page.get_by_role("dialog")
    for other, words in (("two words", "visible ASCII"), ("na\u00efve", "visible ASCII"), ("another", "not know")):
        give(keyed.page, other)
        expect(dialog).to_contain_text(words)
        assert stored(keyed.page) == READER
    keyed.page.get_by_role("button", name="Cancel").click()
    assert stored(keyed.page) == READER


def test_a_page_without_a_key_is_left_alone_until_it_asks(keyed: Visit) -> None:
    keyed.open()
    keyed.page.get_by_role("button", name="Cancel").click()
    expect(keyed.page.locator("#live")).to_have_text("key wanted")
    expect(keyed.page.locator("#outage")).to_contain_text("key")
    keyed.page.get_by_role("button", name="Key", exact=True).click()
    give(keyed.page, ADMIN)
    expect(keyed.page.locator("#live")).to_have_text("live")
    keyed.page.get_by_role("button", name="Forget key").click()
    expect(keyed.page.get_by_role("dialog")).to_be_visible()
