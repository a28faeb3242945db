"""A small request to a replica on the router's own behalf, over the connections that its clients' requests use."""

import asyncio
from typing import NamedTuple

from router.members.broken import Broken
from router.members.upstream import Header, Upstream

MAX_BYTES = 4 * 1024 * 1024


class TooLong(Broken):
    """An answer above the limit."""


class Fetched(NamedTuple):
    status: int
    headers: list[Header]
    body: bytes


class _Collected:
    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.status = 0
        self.headers: list[Header] = []
        self.body = bytearray()
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: list[Header]) -> None:
        self.status, self.headers = status, headers
        if not self.whole and not self.done.done():
            self.done.set_result(Fetched(status, headers, b""))

    def received(self, body: bytes, complete: bool) -> None:
        self.body += body
        if self.done.done():
            return
        if complete:
            self.done.set_result(Fetched(self.status, self.headers, bytes(self.body)))
        elif len(self.body) > MAX_BYTES:
            self.done.set_exception(TooLong(f"its answer is longer than {MAX_BYTES:,} bytes"))

    def broke(self, broken: Broken) -> None:
        if not self.done.done():
            self.done.set_exception(broken)


async def fetch(
    upstream: Upstream,
    path: str,
    *,
    body: bytes | None = None,
    lines: bytes = b"",
    timeout_s: float = 2.0,
    whole: bool = True,
) -> Fetched:
    """Send a GET, or a POST if there is a (JSON) body; raise Broken on failure and on time-out.

    `whole`: False if the answer's head is enough.
    """
    target = upstream.target
    method = "GET" if body is None else "POST"
    head = f"{method} {target.path}{path} HTTP/1.1\r\nhost: {target.authority}\r\n".encode() + lines
    if body is not None:
        head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    collected = _Collected(whole)
    sending = upstream.send(head + b"\r\n" + (body or b""), collected)
    try:
        async with asyncio.timeout(timeout_s):
            return await collected.done
    except TimeoutError:
        upstream.drop_idle()  # the others may be dead too: the next request opens a new one
        raise Broken(f"it did not answer {path} within {timeout_s:g} s", silent=True) from None
    finally:
        sending.cancel()
