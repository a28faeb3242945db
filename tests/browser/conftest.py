"""The fleet that the tests of the pages share, and a Chromium."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.pages import CHROMIUM, PATIENCE_MS, Visit, chromium, visit
from tests.browser.world import World, begun

HERE = Path(__file__).parent
expect.set_options(timeout=PATIENCE_MS)
NO_CHROMIUM = "there is no Chromium here: apt-get install chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs the browser."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer than a module: while it runs, tests of other folders could not run an event loop in this thread."""
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Shared by all tests: a test that changes something changes it back."""
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with begun() as made:
        yield made


@pytest.fixture
def visiting(browser: Browser, world: World) -> Callable[..., AbstractContextManager[Visit]]:
    """A visit to the router that all share."""
    return partial(visit, browser, world.url)


@pytest.fixture
def page(visiting: Callable[..., AbstractContextManager[Visit]]) -> Iterator[Visit]:
    """A tab of a visitor with a wide window."""
    with visiting() as made:
        yield made
