"""A router, asked again and again over the same connections; what it says no to, and its silence, are told apart."""

import time
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import click
import httpx2
import msgspec

from router.asking import checked, options, reason_of

TIMEOUT_S = 10.0
KEY_HINT = "--admin-key or WARMROUTE_ADMIN_KEY"

T = TypeVar("T")


class Away(Exception):
    """Nobody answers, or somebody who is no router."""


class Refused(Exception):
    """The router answers, but not this, or not us."""


class Asking:
    """To be closed, or used as a context manager."""

    def __init__(self, router_url: str, key: str | None) -> None:
        self.router_url = router_url
        self.way_s = TIMEOUT_S  # the quickest answer so far: about what the way there and back takes
        self._http = httpx2.AsyncClient(base_url=router_url, **options(key, TIMEOUT_S))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, path: str, kind: type[T]) -> T:
        """Away, Refused."""
        answer = await self._ask("GET", path)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Away(f"what answers is no router: {path}: {error}") from error

    async def text(self, path: str) -> str:
        return (await self._ask("GET", path)).decode(errors="replace")

    async def drain(self, replica: str, *, undo: bool) -> None:
        """Away, Refused."""
        await self._ask("POST", f"/replicas/{quote(replica, safe='')}/{'undrain' if undo else 'drain'}")

    async def _ask(self, method: str, path: str) -> bytes:
        began_s = time.monotonic()
        try:
            response = await self._http.request(method, path)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Away(reason_of(error)) from error
        self.way_s = min(self.way_s, time.monotonic() - began_s)
        if response.status_code in (502, 504):  # of a proxy whose router is gone
            raise Away(f"status {response.status_code} for {path}")
        try:
            return checked(response, self.router_url)
        except click.ClickException as error:
            message = error.message.replace("see --admin-key", f"see {KEY_HINT}")
            raise Refused(message) from error
