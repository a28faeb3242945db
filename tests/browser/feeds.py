"""Router feeds changed to describe another fleet, as a page receives them."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import httpx2
from playwright.sync_api import Page, Route

from tests.events.processes import DEADLINE_S

Change: TypeAlias = Callable[[dict[str, Any]], None]  # changes a frame


def altered(page: Page, router_url: str, change: Change) -> None:
    """Answer each of the page's requests with one changed frame of the router; then the connection ends."""
    hello, frame = first_events(router_url)

    def tell(route: Route) -> None:
        told = json.loads(frame)
        change(told)
        # CRLF, since some proxies end lines so.
        events = {"hello": hello, "fleet": json.dumps(told)}
        body = "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in events.items())
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/dashboard/feed*", tell)


def first_events(router_url: str) -> tuple[str, str]:
    """Contents of the feed's hello, and of its first frame."""
    found: dict[str, str] = {}
    with httpx2.stream("GET", f"{router_url}/dashboard/feed", timeout=DEADLINE_S, trust_env=False) as answer:
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                found[name] = line.removeprefix("data: ")
                if name == "fleet":
                    break
    return found["hello"], found["fleet"]
