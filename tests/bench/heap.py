"""Measure the dashboard's browser memory: one tab stays at the overview, another goes from page to page.

It takes ten minutes, or one with `--small`, while conversations continue. Each sample follows a garbage collection.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from playwright.sync_api import expect

from tests.bench.measure import heading, row
from tests.browser.pages import Visit, chromium, replica_place, visit
from tests.browser.world import begun

LONG_S, SHORT_S = 600.0, 60.0
SAMPLES = 10
MEGABYTE = 10**6
TARGET_MB = 2.0
PLACES = ("/", "/charts", "/tree", replica_place("r0"), "/requests", "/playground")


class Kept(NamedTuple):
    heap_mb: float
    nodes: int
    listeners: int


def run(rounds: int, *, small: bool = False) -> None:
    del rounds  # one is long enough
    span_s = SHORT_S if small else LONG_S
    with ExitStack() as stack:
        url = stack.enter_context(begun()).url
        stack.enter_context(conversations(url, span_s))
        browser = stack.enter_context(chromium())
        stays, goes = (stack.enter_context(visit(browser, url)) for _ in range(2))
        stayed, went = watched(stays, goes, span_s)
    heading(f"JavaScript heap after {span_s / 60:g} minutes under load, and after the first tenth of that time")
    for name, kept in (("a tab at the overview", stayed), ("a tab that goes from page to page", went)):
        row(f"{name}: first", [kept[0].heap_mb], "MB")
        row(f"{name}: last", [kept[-1].heap_mb], "MB")
        row(f"{name}: growth", [kept[-1].heap_mb - kept[0].heap_mb], "MB", f"<= {TARGET_MB:g}")
        row(f"{name}: elements, last", [kept[-1].nodes], "")
    print()


def watched(stays: Visit, goes: Visit, span_s: float) -> tuple[list[Kept], list[Kept]]:
    stays.open()
    goes.open()
    for tab in (stays, goes):
        expect(tab.page.locator("#live")).to_have_text("live")
    stayed, went = [], []
    for _ in range(SAMPLES):
        go_round(goes, span_s / SAMPLES)
        stayed.append(kept_by(stays))
        went.append(kept_by(goes))
    return stayed, went


def go_round(tab: Visit, span_s: float) -> None:
    """Visit each page for an equal time, and end at the first one."""
    for place in (*PLACES[1:], PLACES[0]):
        tab.go(place)
        tab.page.wait_for_timeout(1000 * span_s / len(PLACES))
    expect(tab.page.get_by_role("table", name="Replicas")).to_be_visible()


def kept_by(tab: Visit) -> Kept:
    session = tab.page.context.new_cdp_session(tab.page)
    try:
        session.send("HeapProfiler.collectGarbage")
        used: Any = session.send("Runtime.getHeapUsage")
        counted: Any = session.send("Memory.getDOMCounters")
    finally:
        session.detach()
    return Kept(used["usedSize"] / MEGABYTE, counted["nodes"], counted["jsEventListeners"])


@contextmanager
def conversations(url: str, span_s: float) -> Iterator[None]:
    """Run conversations in a process of their own until the block ends."""
    process = subprocess.Popen([sys.executable, "-m", "tests.browser.traffic", url, str(2 * span_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
