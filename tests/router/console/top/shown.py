"""The screen of `warmroute top` before a router, without a terminal; and what can be read on it."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

from rich.cells import set_cell_size

from router.console.asking import Client
from router.console.top.poller import ROUTER, TIMEOUT_S, Poller
from router.console.top.screen import Screen

DEADLINE_S = 50.0  # none of what is awaited takes this long, whatever else the machine does
INTERVAL_S = 0.1
SMALL = (80, 24)
TITLES = re.compile(r"(replica|decided)[ ▲▼]")


class Shown:
    def __init__(self, poller: Poller, size: tuple[int, int]) -> None:
        self.poller = poller
        self.screen = Screen(poller)
        self.size = size

    @property
    def lines(self) -> list[str]:
        drawn = ("".join(text for text, _ in line) for line in self.screen.lines(*self.size))
        return [set_cell_size(line, self.size[0]).rstrip() for line in drawn]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def line_of(self, begin: str) -> str:
        return next((line for line in self.lines if line.startswith(begin)), "")

    def value_of(self, label: str) -> str:
        """In the details of something."""
        return self.line_of(f"   {label} ").removeprefix(f"   {label}").strip()

    def rows(self, title: str) -> list[str]:
        """The first cell of each row that can be seen of the table with this first title."""
        lines = self.lines
        top = next(y for y, line in enumerate(lines) if (found := TITLES.match(line)) and found[1] == title)
        below = next((y for y in range(top + 1, len(lines)) if TITLES.match(lines[y])), len(lines) - 1)
        return [line.split()[0] for line in lines[top + 1 : below] if line]

    def cursor(self) -> str:
        """The first cell of the row in front."""
        marked = [line for line in self.screen.lines(*self.size) if any("on #264f78" in style for _, style in line)]
        return "".join(text for text, _ in marked[0]).split()[0]

    async def press(self, *keys: str) -> None:
        for key in keys:
            _ = self.lines
            self.screen.press(key)

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
async def shown(
    url: str, key: str | None = None, size: tuple[int, int] = SMALL, timeout_s: float = TIMEOUT_S, **how: Any
) -> AsyncIterator[Shown]:
    poller = Poller(Client(url, key, ROUTER, timeout_s), INTERVAL_S, **how)
    await asyncio.to_thread(poller.poll)
    polling = Thread(target=poller.run)
    polling.start()
    try:
        yield Shown(poller, size)
    finally:
        poller.ended.set()
        await asyncio.to_thread(polling.join)
