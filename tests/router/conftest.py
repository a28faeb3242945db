"""Tests marked `virtual` run in virtual time; `virtual(False)` excepts one of a file."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.virtual import virtual_loop


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual(is_so=True): in virtual time, on a network in memory")


def pytest_asyncio_loop_factories(config: Any, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    del config
    mark = item.get_closest_marker("virtual")
    return {"virtual": virtual_loop} if mark and mark.args in ((), (True,)) else {"real": asyncio.new_event_loop}
