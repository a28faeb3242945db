"""Draw the film of docs/pictures: two replicas of smollm2 come up and warm up, and one dies in the middle of an answer.

All is real. It also draws the playground of docs/dashboard.md.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx2
from playwright.sync_api import Browser, Page, expect

from replica.fetching.fetch import smollm2_folder
from tests.bench.pictures_of import FILM, save
from tests.browser.pages import Visit, chromium, visit
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import wait_until

SIZE, WIDE = (800, 600), (1120, 1000)
REPLICAS = 2
PATIENCE_S = 120.0  # for an answer that is computed on a busy machine
LONG_ANSWER = 200  # tokens
MODEL = "smollm2"
QUESTION = {
    "model": MODEL,
    "max_tokens": LONG_ANSWER,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "Tell the whole story of a lighthouse, from its first stone on."}],
}


def run(rounds: int) -> None:
    del rounds  # a film is shot once
    FILM.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=1000 * PATIENCE_S)
    folder = smollm2_folder()
    options = ("--engine", "native", "--model", folder, "--served-model-name", MODEL, "--threads", 1)
    with ExitStack() as stack:
        replicas = stack.enter_context(fleet(REPLICAS, *options))
        running = stack.enter_context(router(*replicas.as_options, "--model-dir", f"{MODEL}={folder}"))
        browser = stack.enter_context(chromium())
        questions(running, browser)
        loss(running, replicas, browser)


def questions(running: RouterProcess, browser: Browser) -> None:
    with visit(browser, running.url, SIZE) as tab:
        whole(tab)
        save(tab.page, "1-fleet-up", FILM)
        tab.go("/playground")
        sample(tab.page, "Ask a long guide")
        frame(tab.page, "Conversation", "2-first-question")
        send(tab.page)
        frame(tab.page, "Answer", "3-first-answer")
        expect(tab.page.locator(".tokens .block.warm").nth(10)).to_be_visible()
        frame(tab.page, "Tokens and blocks", "4-now-cached")
        sample(tab.page, "Ask it again")
        frame(tab.page, "Where it would go", "5-second-question")
        send(tab.page)
        frame(tab.page, "Answer", "6-warm-answer")
        tab.page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
        tab.page.evaluate("() => scrollTo(0, 0)")
        save(tab.page, "dashboard-playground")


def loss(running: RouterProcess, replicas: Fleet, browser: Browser) -> None:
    with visit(browser, running.url, SIZE, reduced_motion="reduce") as tab, asked(running) as answer:
        whole(tab)
        name = busy(running)
        save(tab.page, "7-long-answer", FILM)
        number = int(name.removeprefix("r"))
        replicas.kill(number)
        expect(tab.page.locator(".lane.down")).to_contain_text("down")
        save(tab.page, "8-replica-killed", FILM)
        answer.join(PATIENCE_S)
        resumed = tab.page.get_by_role("table", name="Last decisions").get_by_role("row").filter(has_text="1 resumed")
        resumed.get_by_role("link").first.click()
        expect(tab.page.get_by_text("went on elsewhere once")).to_be_visible()
        save(tab.page, "9-answered-elsewhere", FILM)
        replicas.start(number)
        tab.go("/")
        expect(tab.page.locator(".chip", has_text="exact")).to_have_text(re.compile(f"{REPLICAS} exact"))
        expect(tab.page.locator(".lane.down")).to_have_count(0)
        save(tab.page, "10-healed", FILM)


def whole(tab: Visit) -> None:
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
    page.evaluate("() => Promise.allSettled(document.getAnimations().map((one) => one.finished))")
    save(page, name, FILM)


@contextmanager
def asked(running: RouterProcess) -> Iterator[threading.Thread]:
    """A long answer is being read, and must come completely."""
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with httpx2.Client(base_url=running.url, timeout=PATIENCE_S, trust_env=False) as http:
            answers.append(http.post("/v1/chat/completions", json=QUESTION))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == LONG_ANSWER, answer.text[:200]


def busy(running: RouterProcess) -> str:
    """The replica that answers."""
    found: list[str] = []

    def any_busy() -> bool:
        replicas = running.get("/replicas").json["replicas"]
        found[:] = [one["name"] for one in replicas if one["load"]["in_flight"]]
        return bool(found)

    wait_until(any_busy, "a replica answers")
    return found[0]
