"""A client's connection. Requests that replicas answer go past ASGI, which would cost them a task and more each.

All others are the app's (`app.py`). Limits are those of `api.http.connection`.
"""

import urllib.parse
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.http.connection import HttpProtocol, Limits
from router.exchange import Exchange

# Given a request's method and path: who opens it, or None for the app.
Direct = Callable[[str, str], Callable[[Exchange], None] | None]
# Found without parsing, as nearly every request has one of them.
USUAL_PATHS = {b"/v1/chat/completions": "/v1/chat/completions", b"/v1/completions": "/v1/completions"}


class FrontConnection(HttpProtocol):
    def __init__(self, limits: Limits, direct: Direct, *arguments: Any, **options: Any) -> None:
        super().__init__(limits, *arguments, **options)
        self._direct = direct
        self._idle_since_s = 0.0

    # What follows is as the classes above do it, but each in one call, because every request has some of them.

    def on_url(self, url: bytes) -> None:
        self._undigested_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.head_bytes:
            self._count_head(0)  # refuses
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._undigested_bytes = 0
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.head_bytes:
            self._count_head(0)  # refuses
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        method = self.parser.get_method().decode("ascii")
        raw_path, query = self.url, b""
        path = USUAL_PATHS.get(raw_path)
        if path is None:
            url = httptools.parse_url(raw_path)
            raw_path, query = url.path or b"/", url.query or b""
            path = raw_path.decode("ascii")
            if "%" in path:
                path = urllib.parse.unquote(path)
        opens = None if self._spare else self._direct(method, path)
        if opens is None:
            self.scope["state"]["abort"] = self.abort  # for an answer without an end that nobody reads
            super().on_headers_complete()
            if self._answered_now() is not None:
                self.flow.resume_reading()  # or nobody would see that the client leaves
            return
        self._digested()
        version = self.parser.get_http_version()
        scope = self.scope
        scope["method"], scope["path"], scope["http_version"] = method, path, version
        scope["raw_path"], scope["query_string"] = raw_path, query
        exchange = Exchange(
            self,
            scope,  # type: ignore[arg-type]
            opens,
            keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self.server_state.retiring,
            expects_continue=self.expect_100_continue,
        )
        before, self.cycle = self.cycle, exchange  # type: ignore[assignment]
        self._open.append(self.cycle)
        self._await("body")
        if before is None or before.response_complete:
            exchange.begin()
        else:
            self.pipeline.appendleft((self.cycle, self.app))  # read on: the client may leave

    def on_body(self, body: bytes) -> None:
        exchange: RequestResponseCycle | Exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_body(body)
            return
        self._undigested_bytes = 0
        if not exchange.response_complete:
            exchange.body += body
            exchange.set()

    def on_message_complete(self) -> None:
        exchange: RequestResponseCycle | Exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
            return
        self._undigested_bytes = 0
        if self._awaited != "end":
            self._awaited = ""
        if not exchange.response_complete:
            exchange.more_body = False
            exchange.set()

    def on_response_complete(self) -> None:
        # Without a timer for each idle connection: the sweep ends those.
        if self._open:
            self._open.popleft()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since_s = self.loop.time()

    def end_if_overdue(self, now_s: float) -> None:
        idle = not (self._open or self._awaited or self.transport.is_closing())
        if idle and now_s - self._idle_since_s > self.timeout_keep_alive:
            self.transport.close()
        else:
            super().end_if_overdue(now_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle | Exchange, app: Any) -> None:
        if isinstance(cycle, Exchange):
            cycle.begin()
        else:
            super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        if (exchange := self._answered_now()) is not None:
            exchange.full()

    def resume_writing(self) -> None:
        super().resume_writing()
        if (exchange := self._answered_now()) is not None:
            exchange.ready()

    def _answered_now(self) -> Exchange | None:
        cycle: RequestResponseCycle | Exchange | None = self._open[0] if self._open else None
        return cycle if isinstance(cycle, Exchange) else None

    def close_after_answer(self, *, unread: bool) -> None:
        """Closed while it sends, a client would not read its answer: what it sends is dropped a little longer."""
        if not unread:
            self.transport.close()
            return
        self._await("end")
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def front_protocol(limits: Limits, direct: Direct) -> Any:
    return partial(FrontConnection, limits, direct)
