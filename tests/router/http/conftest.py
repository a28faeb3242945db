"""The router runs on uvloop, whose transports differ from asyncio's; so do its tests over HTTP."""

from collections.abc import Callable
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], Any]]:
    del config, item
    return {"uvloop": uvloop.new_event_loop}
