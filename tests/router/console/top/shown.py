"""The application in a terminal of memory, before a router; and what can be read on its screen."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from router.console.top.app import Top
from router.console.top.poller import Poller, RouterClient

DEADLINE_S = 50.0  # none of what is awaited takes so long, whatever else the machine does
INTERVAL_S = 0.1
SMALL = (80, 24)


class Shown:
    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def lines(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def line_of(self, begin: str) -> str:
        return next((line for line in self.lines if line.startswith(begin)), "")

    def value_of(self, label: str) -> str:
        """In the details of something."""
        return self.line_of(f"   {label} ").removeprefix(f"   {label}").strip()

    def first_cells(self, table: str) -> list[str]:
        """The first cell of each visible row of a table."""
        view = self.app.views[table]
        top = view.region.y + 1
        return [line.split()[0] for line in self.lines[top : view.region.bottom] if line.strip()]

    async def press(self, *keys: str) -> None:
        """Press them; return when the screen stands still: what is shown is laid out after what was pressed for it."""
        await self.pilot.press(*keys)
        before = ""
        while before != self.text:
            before = self.text
            await self.pilot.pause()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}\n{self.text}") from None

    async def until_text(self, *texts: str) -> None:
        await self.until(lambda: all(text in self.text for text in texts), f"{texts} can be read")


@asynccontextmanager
async def shown(url: str, key: str | None = None, size: tuple[int, int] = SMALL, **how: Any) -> AsyncIterator[Shown]:
    async with aclosing(RouterClient(url, key)) as client:
        poller = Poller(client, INTERVAL_S, **how)
        await poller.poll()
        app = Top(poller, INTERVAL_S)
        async with app.run_test(size=size, notifications=True) as pilot:
            await pilot.pause()
            yield Shown(app, pilot)
