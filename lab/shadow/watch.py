"""Takes requests and keeps what was seen, until it is told to end or its input ends."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing

from msgspec import Struct

from api.http.server import Signals, connection_limits, http_server
from api.process.settings import Unusable
from api.process.tasks import check, first
from lab.shadow.incoming import BadLine, lines_of, mirror, parse_line
from lab.shadow.placing import Placing, at_once_sums
from lab.shadow.replicas import Followed, Sample, followed, following, sampled, wait_ready
from router.config import RouterConfig
from router.proxy.services import Services

SETTLE_S = 0.1


class Wanted(Struct, frozen=True, kw_only=True):
    """The replicas and requests to watch; `requests` or `listener` is given, or both."""

    config: RouterConfig
    requests: str | None = None  # a file, or "-"
    listener: socket.socket | None = None
    interval_s: float = 5.0


class Seen(Struct, kw_only=True):
    placing: Placing
    skipped: Counter[str]  # requests by reason
    replicas: list[Followed]
    first: dict[str, Sample]
    last: dict[str, Sample]
    began_ts: float
    seconds: float


async def watched(wanted: Wanted, say: Callable[[str], None]) -> Seen | None:
    """Watch until a signal comes; None: it came before all was ready. Raise Unusable if nothing can be watched."""
    end = Signals().end
    async with following(wanted.config) as services:
        ready = asyncio.create_task(wait_ready(services))
        done = await first(ready, asyncio.create_task(end.wait()))
        check(done)
        if ready not in done:
            return None
        return await Watch(wanted, services, say).run(end)


class Watch:
    def __init__(self, wanted: Wanted, services: Services, say: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._services = services
        self._say = say
        self._skipped: Counter[str] = Counter()
        self._placing = Placing(services, self._skipped)

    async def run(self, end: asyncio.Event) -> Seen:
        services, whereabouts = self._services, self._placing.whereabouts
        before = await sampled(services.members.servers.values())
        began_ts, began_s = time.time(), time.monotonic()
        self._say(began_line(services, self._wanted.listener))
        work: tuple[Coroutine[None, None, object], ...] = (
            self._sources(),
            end.wait(),
            _often(SETTLE_S, lambda: whereabouts.settle(services.now_s())),
            _often(self._wanted.interval_s, lambda: self._say(live_line(services, self._placing, self._skipped))),
        )
        check(await first(*map(asyncio.create_task, work)))
        whereabouts.settle(services.now_s())
        whereabouts.end()
        last = await sampled(services.members.servers.values())
        return Seen(
            placing=self._placing,
            skipped=self._skipped,
            replicas=followed(services, last),
            first=before,
            last=last,
            began_ts=began_ts,
            seconds=time.monotonic() - began_s,
        )

    async def _sources(self) -> None:
        """Take requests from all sources until each has ended; that of copies never does."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._wanted.requests is not None:
                    group.create_task(self._read(self._wanted.requests))
                if self._wanted.listener is not None:
                    group.create_task(self._listen(self._wanted.listener))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _read(self, path: str) -> None:
        most_bytes = self._wanted.config.max_body_bytes
        has_read = False
        async with aclosing(lines_of(path, 2 * most_bytes)) as lines:
            async for line in lines:
                try:
                    incoming = None if line is None else parse_line(line)
                except BadLine as error:
                    if not has_read:
                        raise Unusable(f"--requests {path}: the first line cannot be used: {error}") from error
                    self._skipped["unreadable line"] += 1
                    continue
                has_read = True
                if incoming is None or len(incoming.body) > most_bytes:
                    self._skipped["too large"] += 1
                else:
                    await self._placing.take(incoming)
                    await asyncio.sleep(0)  # a long file must not keep events and signals waiting

    async def _listen(self, listener: socket.socket) -> None:
        config = self._wanted.config
        app = mirror(self._placing.take, config.max_body_bytes, config.max_bodies_bytes, self._skipped)
        server = http_server(app, connection_limits(config.max_connections))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait([serving])
        finally:
            server.end()
            await asyncio.wait([serving])


async def _often(interval_s: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        call()


def began_line(services: Services, listener: socket.socket | None) -> str:
    where = ""
    if listener is not None:
        host, port = listener.getsockname()[:2]
        where = f", copies of requests are taken at http://{f'[{host}]' if ':' in host else host}:{port}"
    return f"following {len(services.members)} replicas ({exact_trees(services)} trees exact){where}"


def live_line(services: Services, placing: Placing, skipped: Counter[str]) -> str:
    sums = at_once_sums(placing.records)
    parts = [f"{placing.seen:,} requests"]
    if sums.tokens:
        parts.append(
            f"cached where they went {sums.served_hit / sums.tokens:.1%}, "
            f"where warmroute would have sent each {sums.chosen_hit / sums.tokens:.1%}"
        )
    if len(placing.whereabouts):
        parts.append(f"{len(placing.whereabouts):,} on their way")
    if skipped:
        parts.append(f"{skipped.total():,} skipped")
    return "; ".join([*parts, f"{exact_trees(services)} of {len(services.members)} trees exact"])


def exact_trees(services: Services) -> int:
    return sum(services.doubt(member) is None for member in services.members)
