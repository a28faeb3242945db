"""A Chromium set up as a visitor's, which records forbidden behaviour of pages."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = (1280, 900)
NARROW = (400, 800)
PATIENCE_MS = 15_000


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


class Visit(NamedTuple):
    """One visitor's tab and the complaints about it."""

    page: Page
    router_url: str
    complaints: list[str]  # of the console, of scripts, and of requests that went elsewhere

    def open(self, place: str = "") -> None:
        """Open the dashboard; `place` follows the #, such as `/tree`."""
        self.page.goto(f"{self.router_url}/dashboard#{place}")

    def go(self, place: str) -> None:
        """Navigate within the page, as a link does."""
        self.page.evaluate("place => { location.hash = place; }", place)

    def heading(self, text: str) -> Any:
        return self.page.get_by_role("heading", level=1, name=re.compile(text))

    def blame(self) -> list[str]:
        """Return the complaints so far, and clear them."""
        found = list(self.complaints)
        self.complaints.clear()
        return found


@contextmanager
def visit(
    browser: Browser, router_url: str, size: tuple[int, int] = WIDE, scheme: Any = "light", **context: Any
) -> Iterator[Visit]:
    """Nothing is complained of at its end, unless a test expected it."""
    size_of = {"width": size[0], "height": size[1]}
    opened = browser.new_context(viewport=size_of, color_scheme=scheme, **context)  # type: ignore[arg-type]
    opened.set_default_timeout(PATIENCE_MS)
    try:
        made = Visit(opened.new_page(), router_url, [])
        _watch(opened, made)
        yield made
        assert made.complaints == []
    finally:
        opened.close()


def _watch(context: BrowserContext, made: Visit) -> None:
    def elsewhere(route: Route) -> None:
        made.complaints.append(f"asked {route.request.url}")
        route.abort()

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            made.complaints.append(message.text)

    own = urlsplit(made.router_url).netloc
    context.route(lambda url: urlsplit(url).netloc != own, elsewhere)
    page = made.page
    page.on("pageerror", lambda error: made.complaints.append(f"raised {error}"))
    page.on("console", said)


def replica_place(name: str) -> str:
    return f"/replica/{quote(name, safe='')}"


def request_place(request_id: str) -> str:
    return f"/request/{quote(request_id, safe='')}"
