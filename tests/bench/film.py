"""Draw the film of docs/pictures: a fleet comes up, warms up, loses a replica in the middle of an answer, and heals.

Everything is real but the model: simulated replicas behind a router, looked at by Chromium.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from playwright.sync_api import Browser, Page, expect

from tests.bench.pictures_of import FILM, save
from tests.browser.pages import Visit, chromium, visit
from tests.browser.world import OPTIONS, World, begun
from tests.events.processes import DEADLINE_S, wait_until

SIZE = (800, 600)
REPLICAS = 3
LONG_ANSWER = 900  # tokens: nine seconds, at the speed of `tests.browser.world`
QUESTION = {
    "model": "demo",
    "max_tokens": LONG_ANSWER,
    "messages": [{"role": "user", "content": "Tell the whole story of the lighthouse, from its first stone on. " * 8}],
}


def run(rounds: int) -> None:
    del rounds  # a film is shot once
    FILM.mkdir(parents=True, exist_ok=True)
    with begun(REPLICAS, 0, OPTIONS) as world, chromium() as browser:
        questions(world, browser)
        loss(world, browser)


def questions(world: World, browser: Browser) -> None:
    with visit(browser, world.url, SIZE) as tab:
        fleet(tab)
        save(tab.page, "1-fleet-up", FILM)
        tab.go("/playground")
        sample(tab.page, "A customer asks")
        frame(tab.page, "Conversation", "2-first-question")
        send(tab.page)
        frame(tab.page, "Answer", "3-first-answer")
        expect(tab.page.locator(".tokens .block.warm").nth(10)).to_be_visible()
        frame(tab.page, "Tokens and blocks", "4-now-cached")
        sample(tab.page, "Another customer asks")
        frame(tab.page, "Where it would go", "5-second-question")
        send(tab.page)
        frame(tab.page, "Answer", "6-warm-answer")


def loss(world: World, browser: Browser) -> None:
    with visit(browser, world.url, SIZE, reduced_motion="reduce") as tab, asked(world) as answer:
        fleet(tab)
        name = busy(world)
        save(tab.page, "7-long-answer", FILM)
        number = int(name.removeprefix("r"))
        world.replicas.kill(number)
        expect(tab.page.locator(".lane.down")).to_contain_text("down")
        save(tab.page, "8-replica-killed", FILM)
        answer.join(DEADLINE_S)
        resumed = tab.page.get_by_role("table", name="Last decisions").get_by_role("row").filter(has_text="1 resumed")
        resumed.get_by_role("link").first.click()
        expect(tab.page.get_by_text("went on elsewhere once")).to_be_visible()
        save(tab.page, "9-answered-elsewhere", FILM)
        world.replicas.start(number)
        tab.go("/")
        expect(tab.page.locator(".chip", has_text="exact")).to_have_text(re.compile(f"{REPLICAS} exact"))
        expect(tab.page.locator(".lane.down")).to_have_count(0)
        save(tab.page, "10-healed", FILM)


def fleet(tab: Visit) -> None:
    tab.open()
    expect(tab.page.get_by_text("judged at")).to_be_visible()
    expect(tab.page.locator(".lane")).to_have_count(REPLICAS)


def sample(page: Page, title: str) -> None:
    page.get_by_role("button", name=title, exact=True).click()
    expect(page.locator(".candidate.winner")).to_be_visible()


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer")).to_have_attribute("data-state", "ended")
    expect(page.locator(".hit")).to_be_visible()


def frame(page: Page, card: str, name: str) -> None:
    """Save the page with this card at its top."""
    found = page.get_by_role("heading", name=card, exact=True)
    found.evaluate("node => scrollTo(0, node.closest('.card').getBoundingClientRect().top + scrollY - 90)")
    page.evaluate("() => Promise.all(document.getAnimations().map((one) => one.finished))")
    save(page, name, FILM)


@contextmanager
def asked(world: World) -> Iterator[threading.Thread]:
    """A long answer is being read, and must come completely."""
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with httpx2.Client(base_url=world.url, timeout=DEADLINE_S, trust_env=False) as http:
            answers.append(http.post("/v1/chat/completions", json=QUESTION))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == LONG_ANSWER, answer.text[:200]


def busy(world: World) -> str:
    """The replica that answers."""
    found: list[str] = []

    def any_busy() -> bool:
        replicas = world.router.get("/replicas").json["replicas"]
        found[:] = [one["name"] for one in replicas if one["load"]["in_flight"]]
        return bool(found)

    wait_until(any_busy, "a replica answers")
    return found[0]
