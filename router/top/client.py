"""HTTP client of `warmroute top`: keeps its connections, and tells a refusal from an unreachable router."""

import time
from typing import TypeVar
from urllib.parse import quote

import click
import httpx2
import msgspec

from router.asking import checked, options, reason_of

TIMEOUT_S = 10.0
KEY_HINT = "--admin-key or WARMROUTE_ADMIN_KEY"

T = TypeVar("T")


class Unreachable(Exception):
    """Nothing answers, or something other than a router."""


class Refused(Exception):
    """The router answers with an error, such as a missing key."""


class RouterClient:
    """Close it with `contextlib.aclosing`. Its methods raise Unreachable and Refused."""

    def __init__(self, router_url: str, key: str | None) -> None:
        self.router_url = router_url
        self.round_trip_s = TIMEOUT_S  # the fastest answer so far: close to the network's round trip
        self._http = httpx2.AsyncClient(base_url=router_url, **options(key, TIMEOUT_S))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        answer = await self._request("GET", path)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Unreachable(f"no answer from a router: {path}: {error}") from error

    async def text(self, path: str) -> str:
        return (await self._request("GET", path)).decode(errors="replace")

    async def drain(self, replica: str, *, undo: bool) -> None:
        await self._request("POST", f"/replicas/{quote(replica, safe='')}/{'undrain' if undo else 'drain'}")

    async def _request(self, method: str, path: str) -> bytes:
        began_s = time.monotonic()
        try:
            response = await self._http.request(method, path)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(reason_of(error)) from error
        self.round_trip_s = min(self.round_trip_s, time.monotonic() - began_s)
        if response.status_code in (502, 504):  # from a proxy whose router is gone
            raise Unreachable(f"status {response.status_code} for {path}")
        try:
            return checked(response, self.router_url)
        except click.ClickException as error:
            message = error.message.replace("see --admin-key", f"see {KEY_HINT}")
            raise Refused(message) from error
