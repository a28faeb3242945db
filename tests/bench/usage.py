"""Measure GET /usage and the dashboard's page of it with 90 days of 1,000 keys. It needs Chromium."""

import gc
import logging
import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from playwright.sync_api import expect
from starlette.datastructures import QueryParams

from router.http.usage import MAX_ROWS, usage_answer
from router.tenants.admission import Admitted
from router.tenants.ledger import Ledger
from router.tenants.limits import DAY_S
from router.tenants.usage import Usage
from tests.bench.dashboard import TARGET_MS, told
from tests.bench.front import FrontOnWires
from tests.bench.measure import heading, row
from tests.browser.pages import Visit, chromium, visit
from tests.browser.used import counted, made_up
from tests.chaos.routers import router

DAYS, KEYS = 90, 1000
NAMES = tuple(f"key-{number:04d}" for number in range(KEYS))
ASKED = (  # name, query, limit, target
    ("the page's days", "by=day", MAX_ROWS, TARGET_MS),
    ("the page's keys", "by=key", 1000, TARGET_MS),
    ("its CSV", "by=day,key&format=csv", MAX_ROWS, ""),
    ("every row", "", MAX_ROWS, ""),
)
# What takes the page's thread longer than 50 ms: other input waits for it.
TASKS = """
window.longestTask = 0;
new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) window.longestTask = Math.max(window.longestTask, duration);
}).observe({ type: "longtask" });
"""


def run(rounds: int) -> None:
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as folder:
        path = Path(folder, "usage.db")
        made_up(path, DAYS, NAMES, ("m",))
        uvloop.run(_answers(path, rounds))
        uvloop.run(_answers(None, rounds))
        _page(path, rounds)
    logging.disable(logging.NOTSET)


async def _answers(path: Path | None, rounds: int) -> None:
    front = FrontOnWires(usage_db=None if path is None else str(path))
    if path is None:
        front.router.ledger._unsaved = remembered()
    gc.collect()
    gc.freeze()
    heading(f"GET /usage, {DAYS} days of {KEYS:,} keys, {'in memory' if path is None else 'in a file'}")
    for name, query, limit, target in ASKED:
        answer = partial(body, front.router.ledger, QueryParams(f"from={first_day()}&{query}"), limit)
        await told(name, answer, rounds, target)
        row(f"{name}: size", [len(await answer()) / 1000], "kB")
    print()
    await front.router.ledger.close()
    await front.close()


async def body(ledger: Ledger, query: QueryParams, limit: int) -> bytes:
    answer = await usage_answer(ledger, None, query, limit, Admitted("bench", admin=True))
    return bytes(answer.body)


def first_day() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time.time() - (DAYS - 1) * DAY_S))


def remembered() -> Usage:
    """Usage in memory, which adds up what is more than it may keep."""
    chance, usage = random.Random(1), Usage()
    for ago in range(DAYS):
        for name in NAMES:
            usage.counts(time.time() - ago * DAY_S, name, "m").add(counted(chance, 0.1))
    return usage


def _page(path: Path, rounds: int) -> None:
    """The whole way: a router's process, a browser, and the table of all days."""
    figures = []
    with ExitStack() as stack:
        running = stack.enter_context(router("--replica", "http://127.0.0.1:9", "--usage-db", path, ready=False))
        browser = stack.enter_context(chromium())
        for _ in range(rounds):
            with visit(browser, running.url) as tab:
                figures.append(looked_at(tab))
    shown_ms, first_ms, all_ms = (list(column) for column in zip(*figures, strict=True))
    heading(f"the dashboard's page, {DAYS} days of {KEYS:,} keys")
    row("from the link to the table", shown_ms, "ms", "<= 1000 ms")
    row("longest task until then", first_ms, "ms", "<= 200 ms")
    row("longest task, all rows shown and sorted", all_ms, "ms", "<= 500 ms")
    print()


def looked_at(tab: Visit) -> tuple[float, float, float]:
    page = tab.page
    page.add_init_script(TASKS)
    tab.open()
    expect(page.locator("#live")).to_have_text("live")
    began_s = time.perf_counter()
    tab.go(f"/usage?days={DAYS}")
    expect(page.get_by_text(f"{KEYS:,} keys")).to_be_visible()
    shown_ms = (time.perf_counter() - began_s) * 1000
    first_ms = float(page.evaluate("window.longestTask"))
    page.get_by_role("button", name="Show 900 more").click()
    page.get_by_role("button", name="Requests").click()
    expect(page.get_by_role("columnheader", name="Requests")).to_have_attribute("aria-sort", "descending")
    return shown_ms, first_ms, float(page.evaluate("window.longestTask"))
