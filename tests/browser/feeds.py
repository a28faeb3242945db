"""Frames of a router changed to describe another fleet, as a page receives them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import httpx2
from playwright.sync_api import Page, Route

from tests.events.processes import DEADLINE_S

Change: TypeAlias = Callable[[dict[str, Any]], None]  # changes a frame


def altered(page: Page, router_url: str, change: Change) -> None:
    """Answer each of the page's questions with the same frame of the router, changed."""
    answer = httpx2.get(f"{router_url}/dashboard/fleet", timeout=DEADLINE_S, trust_env=False)

    def tell(route: Route) -> None:
        frame = answer.json()
        change(frame)
        route.fulfill(json=frame)

    page.route("**/dashboard/fleet*", tell)
